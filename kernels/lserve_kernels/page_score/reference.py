"""Scores of pages against queries and the choice of the best ones: plain torch, and the product on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from lserve_kernels.page_stats.reference import PageBounds

NEVER = float("-inf")  # score of a page that a row does not have


def score_pages(query: Tensor, bounds: PageBounds, pages: Tensor, counts: Tensor) -> Tensor:
    """The most that a key in each page can score, from its bounds alone.

    A logical page scores `sum over d of max(q[d] * low[d], q[d] * high[d])`, which no key in it exceeds (Quest); a
    physical page scores as the best of its logical pages (LServe); for a KV head the best of its query heads counts.

    Args:
        query: `[H, G, R, D]`, `G` query heads a KV head, `R` rows.
        bounds: of `H` heads.
        pages: `[R, P]` or `[1, P]` (the same for all rows) int64.
        counts: tokens in each, shaped as `pages`; 0 scores `NEVER`.

    Returns:
        Scores `[H, R, P]` in fp32.
    """
    heads, group, rows, width = query.shape
    low, high = (x[:, pages].float().flatten(2, 3) for x in (bounds.low, bounds.high))  # [H, R or 1, P * L, D]
    asked = query.float().transpose(1, 2)  # [H, R, G, D]
    if pages.shape[0] != rows or rows == 1:
        asked = asked.reshape(heads, 1, rows * group, width)
    best = torch.matmul(asked.clamp(min=0), high.transpose(-1, -2))
    best += torch.matmul(asked.clamp(max=0), low.transpose(-1, -2))
    logical = best.view(heads, rows, group, pages.shape[1], -1).amax(2)
    first = torch.arange(logical.shape[-1], device=counts.device) * bounds.logical_size
    return logical.masked_fill(first >= counts[..., None], NEVER).amax(-1)


def choose_pages(scores: Tensor, num_pages: Tensor, most: int) -> Tensor:
    """The best `most` pages of every row, its first and its newest page always among them.

    Args:
        scores: `[H, R, P]`.
        num_pages: `[R]` int64, pages of each row, at least `most`; scores beyond them are `NEVER`.
        most: pages to choose, at least 2.

    Returns:
        Columns `[H, R, most]` int64, ascending. Of equal scores the earlier page wins.

    Raises:
        ValueError: if `most` has no room for the first and the newest page.
    """
    if most < 2:
        raise ValueError(f"{most} pages do not hold the first and the newest page")
    column = torch.arange(scores.shape[-1], device=scores.device)
    forced = (column == 0) | (column == num_pages[:, None] - 1)
    order = scores.masked_fill(forced, float("inf")).argsort(dim=-1, descending=True, stable=True)
    return order[..., :most].sort(dim=-1).values
