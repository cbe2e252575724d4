"""Bounds of keys, by the kernel or its twin."""

from __future__ import annotations

from torch import Tensor

from lserve_kernels.dispatch import use_triton
from lserve_kernels.page_stats import reference
from lserve_kernels.page_stats.reference import PageBounds


def update_bounds(
    bounds: PageBounds, key_pages: Tensor, logical: Tensor, counts: Tensor, source: Tensor | None = None
) -> None:
    """See `reference.update_bounds`. A logical page must be of a power of two tokens, at most 128."""
    if not use_triton(key_pages):
        reference.update_bounds(bounds, key_pages, logical, counts, source)
        return
    import triton

    from lserve_kernels.page_stats.kernel import page_stats_kernel

    heads, _, _, width = key_pages.shape
    if not heads or not len(logical):
        return
    page_stats_kernel[(len(logical), heads)](
        key_pages,
        bounds.low,
        bounds.high,
        logical,
        logical if source is None else source,
        counts,
        key_pages.stride(0),
        bounds.low.stride(0),
        width,
        size=bounds.logical_size,
        block_d=triton.next_power_of_2(width),
        num_warps=1,
    )
