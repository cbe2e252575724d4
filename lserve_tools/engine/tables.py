"""Page tables: which pages hold which tokens of a segment or of a sequence's own tail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from lserve_tools.engine.pages import PagePool


class PageTable:
    """Pages of retrieval heads: all tokens of a segment, each of its chunks opening a new page.

    Args:
        pool: where the pages come from; all are taken at once, so that a run of them is one view.
        chunks: lengths of the chunks in tokens.
        page_size: tokens of a page.
    """

    def __init__(self, pool: PagePool, chunks: Iterable[int], page_size: int) -> None:
        self._pool = pool
        self.page_size = page_size
        self.chunks = tuple(chunks)
        pages_per_chunk = [-(-length // page_size) for length in self.chunks]
        self.first_pages = [sum(pages_per_chunk[:i]) for i in range(len(pages_per_chunk) + 1)]
        self.first_tokens = [sum(self.chunks[:i]) for i in range(len(self.chunks) + 1)]
        self.pages = pool.allocate(self.first_pages[-1])
        self.contiguous = all(b == a + 1 for a, b in pairwise(self.pages))  # then a run of them is a view

    @staticmethod
    def count(chunks: Iterable[int], page_size: int) -> int:
        """Pages that chunks of these lengths need."""
        return sum(-(-length // page_size) for length in chunks)

    def slots(self, first: int, last: int) -> list[int]:
        """Slots of tokens `first … last − 1`, counted within the segment."""
        found: list[int] = []
        for chunk, start in enumerate(self.first_tokens[:-1]):
            a, b = max(first, start), min(last, self.first_tokens[chunk + 1])
            for token in range(a - start, b - start):
                page = self.pages[self.first_pages[chunk] + token // self.page_size]
                found.append(page * self.page_size + token % self.page_size)
        return found

    def valid(self, num_tokens: int) -> list[int]:
        """Tokens in each page that is in use when the first `num_tokens` are there."""
        counts: list[int] = []
        for start, length in zip(self.first_tokens, self.chunks, strict=False):
            left = min(length, num_tokens - start)
            while left > 0:
                counts.append(min(left, self.page_size))
                left -= self.page_size
        return counts

    def release(self) -> None:
        """Give all pages back."""
        self._pool.free(self.pages)
        self.pages = []


@dataclass(slots=True)
class StreamingPage:
    """A page of streaming heads: `count` tokens from position `base` on."""

    page: int
    base: int
    count: int


class StreamingTable:
    """Pages of streaming heads: those that hold a sink token or one of the last `recent`. It slides.

    Args:
        pool: where pages come from, one at a time.
        sink, recent: the widest windows of any layer, in tokens.
        page_size: tokens of a page.
    """

    def __init__(self, pool: PagePool, sink: int, recent: int, page_size: int) -> None:
        self._pool = pool
        self.sink, self.recent, self.page_size = sink, recent, page_size
        self.entries: list[StreamingPage] = []

    def kept(self, first: int, last: int) -> list[tuple[int, int]]:
        """Ranges of positions `first … last − 1` that later tokens can see."""
        sink_end = min(max(self.sink, first), last)
        recent_start = max(last - self.recent, sink_end)
        return [(a, b) for a, b in ((first, sink_end), (recent_start, last)) if a < b]

    def append(self, first: int, last: int) -> list[int]:
        """Make room for positions `first … last − 1` and return their slots."""
        slots: list[int] = []
        for position in range(first, last):
            entry = self.entries[-1] if self.entries else None
            if entry is None or entry.count == self.page_size or entry.base + entry.count != position:
                entry = StreamingPage(self._pool.allocate(1)[0], position, 0)
                self.entries.append(entry)
            slots.append(entry.page * self.page_size + entry.count)
            entry.count += 1
        return slots

    def slide(self, position: int) -> None:
        """Give back pages of which a query at `position` or later sees nothing."""
        gone = [e for e in self.entries if not self.visible(e, position)]
        if gone:
            self.entries = [e for e in self.entries if self.visible(e, position)]
            self._pool.free([e.page for e in gone])

    def visible(self, entry: StreamingPage, position: int) -> bool:
        """Whether a query at `position` sees a token of the page."""
        return entry.base < self.sink or position - (entry.base + entry.count - 1) < self.recent

    def release(self) -> None:
        """Give all pages back."""
        self._pool.free([e.page for e in self.entries])
        self.entries = []
