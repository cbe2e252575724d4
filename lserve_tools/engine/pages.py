"""The pool of page ids: who may write where. It holds no tensors."""

from __future__ import annotations

from bisect import bisect_left


class PagePool:
    """Hands out page ids, neighbouring ones where it can, so that a run of pages is a view and not a copy.

    Free pages are kept as intervals sorted by their first page, never two that touch.

    Args:
        num_pages: pages in all.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._starts: list[int] = [0] if num_pages else []
        self._lengths: list[int] = [num_pages] if num_pages else []

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages: the smallest interval that holds them all, else the largest ones first.

        Raises:
            MemoryError: if fewer pages are free; nothing is taken then.
        """
        if count > self.num_free:
            raise MemoryError(f"{count} pages wanted, {self.num_free} free")
        pages: list[int] = []
        while len(pages) < count:
            wanted = count - len(pages)
            fitting = [(length, i) for i, length in enumerate(self._lengths) if length >= wanted]
            index = min(fitting)[1] if fitting else max((length, -i) for i, length in enumerate(self._lengths))[1]
            pages += self._take(abs(index), wanted)
        self.num_free -= count
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back.

        Raises:
            ValueError: if one of them is free already or was never in the pool.
        """
        for page in sorted(pages):
            self._give(page)
        self.num_free += len(pages)

    def _take(self, index: int, wanted: int) -> list[int]:
        start, length = self._starts[index], self._lengths[index]
        taken = min(wanted, length)
        if taken == length:
            del self._starts[index], self._lengths[index]
        else:
            self._starts[index], self._lengths[index] = start + taken, length - taken
        return list(range(start, start + taken))

    def _give(self, page: int) -> None:
        at = bisect_left(self._starts, page)
        end_before = self._starts[at - 1] + self._lengths[at - 1] if at else -1
        if not 0 <= page < self.num_pages or page < end_before or (at < len(self._starts) and self._starts[at] == page):
            raise ValueError(f"page {page} is not in use")
        joins_after = at < len(self._starts) and self._starts[at] == page + 1
        if end_before == page:
            self._lengths[at - 1] += 1
            if joins_after:
                self._lengths[at - 1] += self._lengths[at]
                del self._starts[at], self._lengths[at]
        elif joins_after:
            self._starts[at] = page
            self._lengths[at] += 1
        else:
            self._starts.insert(at, page)
            self._lengths.insert(at, 1)
