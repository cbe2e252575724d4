"""Scores of pages, by the kernel or its twin."""

from __future__ import annotations

import torch
from torch import Tensor

from lserve_kernels.dispatch import use_triton
from lserve_kernels.page_score import reference
from lserve_kernels.page_stats.reference import PageBounds

_BLOCK = 32  # pages a program


def score_pages(query: Tensor, bounds: PageBounds, pages: Tensor, counts: Tensor) -> Tensor:
    """See `reference.score_pages`."""
    if not use_triton(query):
        return reference.score_pages(query, bounds, pages, counts)
    import triton

    from lserve_kernels.page_score.kernel import page_score_kernel

    heads, group, rows, width = query.shape
    num_pages = pages.shape[1]
    scores = torch.empty(heads, rows, num_pages, dtype=torch.float32, device=query.device)
    if not scores.numel():
        return scores
    query = query if query.stride(-1) == 1 else query.contiguous()
    pages, counts = pages.contiguous(), counts.contiguous()
    page_score_kernel[(triton.cdiv(num_pages, _BLOCK), rows, heads)](
        query,
        bounds.low,
        bounds.high,
        pages,
        counts,
        scores,
        *query.stride()[:3],
        bounds.low.stride(0),
        num_pages if pages.shape[0] == rows else 0,
        rows,
        num_pages,
        width,
        group=group,
        per_page=bounds.low.shape[2],
        logical_size=bounds.logical_size,
        block_p=_BLOCK,
        block_d=triton.next_power_of_2(width),
    )
    return scores
