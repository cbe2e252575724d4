"""Cutting a document into chunks where its content says so, so that an edit moves only the cuts near it.

A cut may lie behind any token that ends a line. Whether it does is drawn from a digest of that line's tokens, with a
chance in proportion to the line's length: cuts then come every `rate` tokens on average, however long the lines are.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence

from lserve_tools.text.tokenizer import Tokenizer, token_texts

MIN_TOKENS = 512
MAX_TOKENS = 2048
MEAN_TOKENS = 1024


def cut_chunks(
    token_ids: Sequence[int],
    tokenizer: Tokenizer,
    *,
    min_tokens: int = MIN_TOKENS,
    mean_tokens: int = MEAN_TOKENS,
    max_tokens: int = MAX_TOKENS,
) -> tuple[int, ...]:
    """Lengths of the chunks of a document, in tokens; only the last may be shorter than `min_tokens`.

    Args:
        token_ids: of the whole document.
        min_tokens, max_tokens: bounds of a chunk; a line longer than the upper one is cut inside.
        mean_tokens: what chunks of ordinary text come to on average.
    """
    ends = _line_ends(token_ids, tokenizer)
    ranks = _line_ranks(token_ids, ends, rate=mean_tokens - min_tokens)
    lengths: list[int] = []
    start = 0
    while len(token_ids) - start > min_tokens:
        stop = _next_cut(ends, ranks, start + min_tokens, start + max_tokens, len(token_ids))
        lengths.append(stop - start)
        start = stop
    if start < len(token_ids):
        lengths.append(len(token_ids) - start)
    return tuple(lengths)


def _line_ends(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Positions behind the tokens that hold a line end."""
    breaking = {token for token, text in token_texts(tokenizer, token_ids).items() if "\n" in text}
    return [i + 1 for i, token in enumerate(token_ids) if token in breaking]


def _line_ranks(token_ids: Sequence[int], ends: list[int], rate: int) -> list[float]:
    """How much each line's end wants to be a cut, from its content alone: below 1 it is one, the lowest most of all."""
    data = array("q", token_ids).tobytes()
    ranks: list[float] = []
    start = 0
    for end in ends:
        digest = hashlib.blake2b(data[8 * start : 8 * end], digest_size=8).digest()
        ranks.append(int.from_bytes(digest, "little") / 2**64 * rate / (end - start))
        start = end
    return ranks


def _next_cut(ends: list[int], ranks: list[float], lowest: int, highest: int, total: int) -> int:
    """The first line end in `lowest … highest` that is a cut, else the one that comes nearest to it."""
    first, last = bisect_right(ends, lowest - 1), bisect_right(ends, min(highest, total - 1))
    for i in range(first, last):
        if ranks[i] < 1.0:
            return ends[i]
    if total <= highest:
        return total
    if first == last:  # one line fills the whole range
        return highest
    return ends[min(range(first, last), key=lambda i: ranks[i])]
