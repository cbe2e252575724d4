"""One question of a batch, whichever form its line has."""

from __future__ import annotations

from dataclasses import dataclass

from lserve_tools.text.prompts import Turn


@dataclass(frozen=True, slots=True)
class Question:
    """What one line asks.

    Args:
        text: the question; of a conversation its last turn, of a raw prompt all of it.
        earlier: turns of the conversation before it.
        raw: the prompt stands without chat template.
        documents: names or globs; None is the whole cache, none at all if empty.
        context: text given in the line itself, read after the documents.
        system: another system text than the cache's.
        answer: what a right answer holds, any one of them.
        model: that the line asks for.
        max_tokens, temperature, top_p, seed, stop: of the answer, where the line has a say in them.
    """

    id: str
    text: str
    earlier: tuple[Turn, ...] = ()
    raw: bool = False
    documents: tuple[str, ...] | None = None
    context: str | None = None
    system: str | None = None
    answer: tuple[str, ...] | None = None
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None

    @property
    def names_nothing(self) -> bool:
        """Whether the line says nothing of what is to be read, and so asks about all there is."""
        return self.documents is None and self.context is None

    def answered_by(self, text: str) -> bool | None:
        """Whether an answer holds one of those expected, letter case aside; None if none is."""
        if self.answer is None:
            return None
        return any(expected.casefold() in text.casefold() for expected in self.answer)
