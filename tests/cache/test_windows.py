"""What streaming heads keep of a document is enough for all that is computed after it, and little more."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lserve_tools.cache.windows import CHECKPOINT, covers, document_windows, merge

CHUNKS = st.lists(st.integers(1, 2048), min_size=1, max_size=12)


def kept_tokens(chunks: list[int], position: int, sink: int, recent: int) -> tuple[set[int], list[bool]]:
    """Tokens of the document that are kept, and whether each chunk has a tail."""
    windows = document_windows(chunks, position, sink, recent)
    assert len(windows) == len(chunks)
    kept: set[int] = set()
    for first, count, window in zip(accumulate([0, *chunks[:-1]]), chunks, windows, strict=True):
        previous = -1
        for start, stop in window.ranges:
            assert previous < start < stop <= count  # ascending, apart, inside the chunk
            previous = stop
            kept.update(range(first + start, first + stop))
    return kept, [window.has_tail for window in windows]


@given(chunks=CHUNKS, position=st.integers(0, 200), sink=st.integers(0, 300), recent=st.integers(0, 3000))
def test_sink_and_the_last_tokens_are_kept(chunks: list[int], position: int, sink: int, recent: int) -> None:
    length = sum(chunks)
    kept, tails = kept_tokens(chunks, position, sink, recent)
    assert set(range(max(0, min(length, sink - position)))) <= kept
    assert set(range(max(0, length - recent), length)) <= kept
    assert tails[-1]


@given(chunks=CHUNKS, position=st.integers(0, 200), sink=st.integers(0, 300), recent=st.integers(0, 3000))
def test_a_tail_is_claimed_only_where_it_is(chunks: list[int], position: int, sink: int, recent: int) -> None:
    """A token computed right after a chunk sees the last `recent` tokens of the document up to there."""
    kept, tails = kept_tokens(chunks, position, sink, recent)
    for end, has_tail in zip(accumulate(chunks), tails, strict=True):
        assert has_tail == (set(range(max(0, end - recent), end)) <= kept)


@given(chunks=CHUNKS, recent=st.integers(1, 512))
def test_a_long_document_can_be_computed_on_from_every_checkpoint(chunks: list[int], recent: int) -> None:
    kept, tails = kept_tokens(chunks, 10, 4, recent)
    ends = list(accumulate(chunks))
    for place in range(CHECKPOINT, sum(chunks) + 1, CHECKPOINT):
        at = next(i for i, end in enumerate(ends) if end >= place)
        if recent <= chunks[at]:
            assert tails[at]
    # Beside sink and end there are no more than these.
    assert len(kept) <= recent * (1 + sum(chunks) // CHECKPOINT)


def test_windows_of_a_short_document_hold_all_of_it() -> None:
    kept, tails = kept_tokens([30, 20], 5, 64, 64)
    assert kept == set(range(50))
    assert tails == [True, True]


def test_the_middle_of_a_long_document_is_left_out() -> None:
    kept, tails = kept_tokens([1000] * 10, 20, 64, 256)
    sink, checkpoints, end = 44, 2 * 256, 256
    assert len(kept) == sink + checkpoints + end
    assert tails == [False, False, False, False, True, False, False, False, True, True]


@given(
    ranges=st.lists(st.tuples(st.integers(-5, 40), st.integers(-5, 40)), max_size=6),
    wanted=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_merging_keeps_exactly_the_tokens(ranges: list[tuple[int, int]], wanted: tuple[int, int]) -> None:
    tokens = {t for a, b in ranges for t in range(a, b) if 0 <= t < 30}
    merged = merge(ranges, 30)
    assert {t for a, b in merged for t in range(a, b)} == tokens
    assert all(b < c for (_, b), (c, _) in pairwise(merged))
    assert covers(merged, (wanted,)) == (set(range(*wanted)) <= tokens)


@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (64, 0)])
def test_without_a_recent_window_only_the_sink_is_kept(sink: int, recent: int) -> None:
    kept, _ = kept_tokens([5000], 0, sink, recent)
    assert kept == set(range(sink))
