"""Channel-wise bounds of the keys of logical pages: plain torch, and the product on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lserve_kernels.layout import PageLayout, slots, zeros


@dataclass(frozen=True, slots=True)
class PageBounds:
    """Smallest and largest key of every channel (Quest, arXiv:2406.10774), per logical page (LServe, arXiv:2502.14866).

    A physical page holds `page_size / logical_size` logical ones, so that selection stays fine-grained however large
    the pages are that attention reads.

    Args:
        low, high: `[H, P, L, D]` in the keys' dtype; what they hold for a logical page without a token means nothing.
        logical_size: tokens of a logical page.
    """

    low: Tensor
    high: Tensor
    logical_size: int

    @classmethod
    def allocate(cls, layout: PageLayout, num_heads: int, num_pages: int, device: torch.device) -> PageBounds:
        """Bounds for pages of a layout that has a `logical_size`."""
        if layout.logical_size is None:
            raise ValueError("bounds need a logical size")
        shape = (num_heads, num_pages, layout.page_size // layout.logical_size, layout.head_dim)
        return cls(zeros(shape, layout.dtype, device), zeros(shape, layout.dtype, device), layout.logical_size)


def update_bounds(
    bounds: PageBounds, key_pages: Tensor, logical: Tensor, counts: Tensor, source: Tensor | None = None
) -> None:
    """Bound the keys of some logical pages anew from all that they hold now.

    Nothing is carried over from what stood there before, so a page that is used again needs no clearing.

    Args:
        bounds: changed in place.
        key_pages: `[H, P, page_size, D]`.
        logical: `[N]` int64, indices of logical pages counted through all pages.
        counts: `[N]` int64, tokens that each holds, at least 1.
        source: `[N]` int64, where they lie in `key_pages` if these are not all pages.
    """
    size = bounds.logical_size
    offset = torch.arange(size, device=logical.device)
    # A slot without a token repeats the last token, which changes no bound.
    places = (logical if source is None else source)[:, None] * size + torch.minimum(offset, counts[:, None] - 1)
    keys = slots(key_pages)[:, places]  # [H, N, size, D]
    for target, found in ((bounds.low, keys.amin(2)), (bounds.high, keys.amax(2))):
        target.flatten(1, 2)[:, logical] = found
