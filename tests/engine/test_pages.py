"""The page pool and the tables over it never lose, share or invent a page."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lserve_tools.engine.pages import PagePool
from lserve_tools.engine.tables import PageTable, StreamingTable


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocations and frees, beside a plain set of free pages."""

    SIZE = 37

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(self.SIZE)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            before = self.pool.num_free
            with pytest.raises(MemoryError):
                self.pool.allocate(count)
            assert self.pool.num_free == before
        else:
            pages = self.pool.allocate(count)
            assert len(set(pages)) == count
            self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.free(data.draw(st.permutations(pages)))
        if pages:
            with pytest.raises(ValueError, match="not in use"):
                self.pool.free(pages[:1])

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        held = [page for pages in self.held for page in pages]
        free = [p for a, n in zip(self.pool._starts, self.pool._lengths, strict=True) for p in range(a, a + n)]
        assert sorted(held + free) == list(range(self.SIZE))
        assert len(free) == self.pool.num_free


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_freed_pool_is_one_run_again() -> None:
    pool = PagePool(10)
    parts = [pool.allocate(n) for n in (3, 4, 3)]
    for part in (parts[1], parts[0], parts[2]):
        pool.free(part)
    assert pool.allocate(10) == list(range(10))


def test_allocation_prefers_the_smallest_run_that_fits() -> None:
    pool = PagePool(20)
    a, b, c = pool.allocate(5), pool.allocate(2), pool.allocate(3)
    pool.free(a)
    pool.free(c)  # free now: 0-4 and 7-19
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert b == [5, 6]


@pytest.mark.parametrize("page", [-1, 20, 3])
def test_a_page_that_is_not_in_use_cannot_be_freed(page: int) -> None:
    with pytest.raises(ValueError, match="not in use"):
        PagePool(20).free([page])


def test_every_chunk_opens_a_page() -> None:
    table = PageTable(PagePool(9), (10, 8, 1), page_size=8)
    assert table.pages == [0, 1, 2, 3]
    assert table.slots(8, 12) == [8, 9, 16, 17]
    assert table.slots(0, 19) == [*range(10), *range(16, 25)]
    assert table.valid(19) == [8, 2, 8, 1]
    assert table.valid(11) == [8, 2, 1]
    assert PageTable.count((10, 8, 1), 8) == 4


class StreamingMachine(RuleBasedStateMachine):
    """A sliding table beside the set of positions that a later query can see."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(64)
        self.table = StreamingTable(self.pool, sink=5, recent=11, page_size=4)
        self.position = 0

    @rule(length=st.integers(1, 30))
    def grow(self, length: int) -> None:
        end = self.position + length
        kept = [(self.position, end)] if length == 1 else self.table.kept(self.position, end)
        for first, last in kept:
            self.table.append(first, last)
        self.position = end
        self.table.slide(end)

    @invariant()
    def what_is_visible_is_there_and_little_more(self) -> None:
        there = {e.base + i for e in self.table.entries for i in range(e.count)}
        seen = {p for p in range(self.position) if p < 5 or self.position - p < 11}
        assert seen <= there
        assert len(self.table.entries) <= 2 + 5
        assert self.pool.num_free == 64 - len(self.table.entries)


TestStreaming = StreamingMachine.TestCase
TestStreaming.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
