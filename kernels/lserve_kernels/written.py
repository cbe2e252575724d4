"""Where new tokens go: worked out once, used by every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lserve_kernels.layout import PageLayout


@dataclass(frozen=True, slots=True)
class Written:
    """Slots of new tokens, and the pages that they touch.

    Args:
        slots: of the tokens, a slice where they follow each other (which copies faster) or `[T]` int64.
        pages: `[N]` int64, the pages touched.
        local: `[T]` int64, slots of the tokens counted through `pages`.
        counts: `[N]` int64, tokens that each touched page holds then.
        logical, logical_counts: `[M]` int64, logical pages touched, counted through all pages, and the tokens in each.
        local_logical: `[M]` int64, the same counted through `pages`.
        closed: `[C]` int64, which of `pages` are complete.
        resumed: `[2, R]` int64, which of `pages` held tokens before, and the open page where these are.
        open: `[2, O]` int64, which of `pages` are not complete, and the open page that takes them.
    """

    slots: slice | Tensor
    pages: Tensor
    local: Tensor
    counts: Tensor
    logical: Tensor
    logical_counts: Tensor
    local_logical: Tensor
    closed: Tensor
    resumed: Tensor
    open: Tensor

    @classmethod
    def plan(
        cls, slots: Sequence[int], layout: PageLayout, device: torch.device, open_pages: Mapping[int, int] | None = None
    ) -> Written:
        """Work out where tokens with these slots go.

        Args:
            slots: those of a page ascending and without a gap.
            open_pages: of the pages that more tokens will come to, or whose first tokens came before, the open page.
                A page that is not named is complete with these tokens, full or not.
        """
        size, open_pages = layout.page_size, open_pages or {}
        logical_size = layout.logical_size or size
        pages: dict[int, int] = {}  # page to its last offset
        logical: dict[int, int] = {}
        first: dict[int, int] = {}
        for slot in slots:
            page, offset = divmod(slot, size)
            first.setdefault(page, offset)
            pages[page] = offset
            logical[slot // logical_size] = slot % logical_size + 1
        index = {page: i for i, page in enumerate(pages)}
        per_page = size // logical_size
        unfinished = [page for page in pages if page in open_pages and pages[page] + 1 < size]
        continued = [page for page in pages if first[page]]

        def tensor(numbers: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        return cls(
            slots=_as_index(slots, device),
            pages=tensor(list(pages)),
            local=tensor([index[slot // size] * size + slot % size for slot in slots]),
            counts=tensor([last + 1 for last in pages.values()]),
            logical=tensor(list(logical)),
            logical_counts=tensor(list(logical.values())),
            local_logical=tensor([index[i // per_page] * per_page + i % per_page for i in logical]),
            closed=tensor([i for page, i in index.items() if page not in unfinished]),
            resumed=tensor([[index[p] for p in continued], [open_pages.get(p, 0) for p in continued]]),
            open=tensor([[index[p] for p in unfinished], [open_pages[p] for p in unfinished]]),
        )


def _as_index(places: Sequence[int], device: torch.device) -> slice | Tensor:
    if places and places[-1] - places[0] == len(places) - 1 and list(places) == sorted(places):
        return slice(places[0], places[-1] + 1)
    return torch.tensor(list(places), dtype=torch.int64, device=device)
