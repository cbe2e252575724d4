"""Which tokens of a document its streaming heads keep in a shard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]

CHECKPOINT = 4096  # tokens between places from which a document can be computed on


@dataclass(frozen=True, slots=True)
class ChunkWindow:
    """What streaming heads keep of one chunk.

    Args:
        ranges: of tokens, counted from the chunk's first: ascending, apart from each other.
        has_tail: with what earlier chunks keep, all of the document's last `recent` tokens up to the chunk's end.
    """

    ranges: Ranges
    has_tail: bool


def document_windows(chunks: Sequence[int], position: int, sink: int, recent: int) -> list[ChunkWindow]:
    """Windows of a document: the prompt's sink, its last `recent` tokens, and a checkpoint every 4,096.

    Args:
        chunks: their lengths in tokens.
        position: of the document's first token in the prompt.
        sink, recent: windows of streaming heads, in tokens.
    """
    length = sum(chunks)
    wanted = [(0, sink - position), (length - recent, length)]
    first = 0
    for count in chunks:
        end = first + count
        if end // CHECKPOINT > first // CHECKPOINT:
            wanted.append((max(end - recent, first), end))
        first = end
    kept = merge(wanted, length)
    windows, first = [], 0
    for count in chunks:
        end = first + count
        tail = (max(end - recent, 0), end)
        windows.append(ChunkWindow(_within(kept, first, end), covers(kept, (tail,))))
        first = end
    return windows


def merge(ranges: Iterable[tuple[int, int]], length: int) -> Ranges:
    """The same tokens in ascending ranges that do not touch, cut to `0 … length − 1`."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((max(a, 0), min(b, length)) for a, b in ranges):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def covers(kept: Ranges, wanted: Ranges) -> bool:
    """Whether all tokens of `wanted` are among those of `kept`, which is merged."""
    return all(any(a <= start and stop <= b for a, b in kept) for start, stop in wanted if start < stop)


def _within(ranges: Ranges, first: int, last: int) -> Ranges:
    """The part of `ranges` in `first … last − 1`, counted from `first`."""
    cut = ((max(a, first) - first, min(b, last) - first) for a, b in ranges)
    return tuple((a, b) for a, b in cut if a < b)
