"""Choosing documents by BM25, for questions over more documents than fit into one prompt."""

from __future__ import annotations

from collections.abc import Sequence

import bm25s

from lserve_tools.errors import RetrievalError
from lserve_tools.text.segments import Segment
from lserve_tools.text.tokenizer import Tokenizer


class Retriever:
    """Ranks documents for questions.

    Args:
        tokenizer: gives their text back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rankings: dict[tuple[str, ...], _Ranking] = {}

    def choose(self, question: str, documents: Sequence[Segment], room: int) -> list[Segment]:
        """The best of `documents` that fit into `room` tokens together, best first; equals stay in their order.

        Raises:
            RetrievalError: if none shares a word with the question, or none that does fits.
        """
        names = tuple(s.name for s in documents)
        if names not in self._rankings:  # most lines of a batch ask about the same ones
            self._rankings[names] = _Ranking(documents, self._tokenizer)
        matching = self._rankings[names].rank(question)
        chosen: list[Segment] = []
        for place in matching:
            if len(documents[place].token_ids) <= room:
                chosen.append(documents[place])
                room -= len(documents[place].token_ids)
        if not chosen:
            why = "that share a word with the question fits" if matching else "shares a word with the question"
            raise RetrievalError(f"none of {len(documents)} documents {why}.", cure='Name some with "documents".')
        return chosen


class _Ranking:
    """An index of documents' chunks: a document counts as its best one, so that long documents are not drowned."""

    def __init__(self, documents: Sequence[Segment], tokenizer: Tokenizer) -> None:
        texts: list[str] = []
        self._owners: list[int] = []
        for place, segment in enumerate(documents):
            first = 0
            for length in segment.chunks:
                texts.append(str(tokenizer.decode(segment.token_ids[first : first + length])))
                self._owners.append(place)
                first += length
        self._index = bm25s.BM25()
        self._index.index(_words(texts), show_progress=False)

    def rank(self, question: str) -> list[int]:
        """Places of the documents that share a word with the question, best first."""
        (words,) = _words([question])
        best: dict[int, float] = {}
        for owner, score in zip(self._owners, self._index.get_scores(words).tolist() if words else [], strict=False):
            best[owner] = max(best.get(owner, 0.0), score)
        return sorted((p for p, score in best.items() if score > 0.0), key=lambda place: (-best[place], place))


def _words(texts: list[str]) -> list[list[str]]:
    words: list[list[str]] = bm25s.tokenize(texts, stopwords=None, return_ids=False, show_progress=False)
    return words
