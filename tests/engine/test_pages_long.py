"""Very many allocations, shares and releases: no page is lost, none is given away twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from lserve_tools.engine.pages import PagePool
from lserve_tools.engine.tables import PageTable, StreamingTable

OPERATIONS = 1_000_000  # at full size
PAGE_SIZE, SINK, RECENT = 4, 5, 11


@dataclass
class Shared:
    """A table and the number of its users."""

    table: PageTable
    users: int = 1


@dataclass
class World:
    """Tables over one pool, shared as contexts in memory are."""

    rng: random.Random
    pool: PagePool = field(default_factory=lambda: PagePool(500))
    tables: list[Shared] = field(default_factory=list)
    streams: list[tuple[StreamingTable, int]] = field(default_factory=list)

    def allocate(self) -> None:
        """A segment of some chunks; refused as a whole if there is no room."""
        chunks = [self.rng.randint(1, 40) for _ in range(self.rng.randint(1, 4))]
        free, count = self.pool.num_free, PageTable.count(chunks, PAGE_SIZE)
        if count > free:
            with pytest.raises(MemoryError):
                PageTable(self.pool, chunks, PAGE_SIZE)
            assert self.pool.num_free == free
        else:
            self.tables.append(Shared(PageTable(self.pool, chunks, PAGE_SIZE)))
            assert self.pool.num_free == free - count

    def share(self) -> None:
        """One more user of a segment."""
        if self.tables:
            self.rng.choice(self.tables).users += 1

    def release(self) -> None:
        """One user less; the last one gives the pages back, and they cannot be given back again."""
        if not self.tables:
            return
        at = self.rng.randrange(len(self.tables))
        self.tables[at].users -= 1
        if not self.tables[at].users:
            table = self.tables.pop(at).table
            pages = list(table.pages)
            table.release()
            with pytest.raises(ValueError, match="not in use"):
                self.pool.free([self.rng.choice(pages)])
            table.release()

    def stream(self) -> None:
        """A sliding table grows, or a new one begins."""
        if len(self.streams) < 8 and self.pool.num_free > 20:
            self.streams.append((StreamingTable(self.pool, SINK, RECENT, PAGE_SIZE), 0))
        if not self.streams or self.pool.num_free < 10:
            return
        at = self.rng.randrange(len(self.streams))
        table, position = self.streams[at]
        end = position + self.rng.randint(1, 20)
        for first, last in table.kept(position, end):
            table.append(first, last)
        table.slide(end)
        self.streams[at] = (table, end)

    def end_stream(self) -> None:
        """A sliding table ends."""
        if self.streams:
            self.streams.pop(self.rng.randrange(len(self.streams)))[0].release()

    def check(self) -> None:
        """Every page is in one place."""
        held = [page for entry in self.tables for page in entry.table.pages]
        held += [e.page for table, _ in self.streams for e in table.entries]
        pool = self.pool
        free = [p for a, n in zip(pool._starts, pool._lengths, strict=True) for p in range(a, a + n)]
        assert sorted(held + free) == list(range(pool.num_pages))
        assert len(free) == pool.num_free


@pytest.mark.parametrize("count", [10_000, pytest.param(OPERATIONS, marks=pytest.mark.slow)])
def test_no_page_is_lost_or_given_away_twice(count: int) -> None:
    world = World(random.Random(count))
    operations: list[Callable[[], None]] = [world.allocate, world.share, world.release, world.stream, world.end_stream]
    weights = [3, 2, 5, 6, 1]
    for number, operation in enumerate(world.rng.choices(operations, weights, k=count)):
        operation()
        if number % 500 == 0:
            world.check()
    world.check()
    while world.tables:
        world.release()
    while world.streams:
        world.end_stream()
    assert world.pool.allocate(500) == list(range(500))
