"""Attention of packed queries to paged keys: plain torch, and the product on a CPU.

Queries that share pages are attended to them together, so pages are read once for all of them however many sequences
stand over one context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lserve_kernels.layout import slots
from lserve_kernels.partial import Partial, attend, merge_into


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Pages that a block of consecutive rows sees wholly.

    Args:
        first_row, last_row: the rows, end exclusive.
        pages: page ids `[P]`; `first_page` is set if they follow each other, and then no copy is made.
        bias: `[1, 1, 1, P * page_size]`, hides slots without a token, or None if there are none.
    """

    first_row: int
    last_row: int
    pages: Tensor
    first_page: int | None
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class OwnRuns:
    """Pages of rows that have their own each.

    Args:
        rows: `[B]` int64.
        pages: `[B, P]`, or `[H, B, P]` where every head sees pages of its own choice, int64.
        bias: `[B, 1 or H, 1, P * page_size]`, hides what a row does not see.
    """

    rows: Tensor
    pages: Tensor
    bias: Tensor


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    shared: list[SharedRun],
    own: list[OwnRuns],
    total: Partial,
    *,
    scale: float,
    softcap: float | None = None,
) -> None:
    """Join attention over pages into `total`.

    Args:
        query: `[H, G, T, D]`, `G` query heads a KV head, `T` packed rows.
        key_pages, value_pages: `[H, P, page_size, D]`.
        shared, own: what each row sees.
        total: output `[H, G, T, D]` and log-sum-exp `[H, G, T]` of what the rows have seen so far; changed in place.
    """
    for run in shared:
        rows = slice(run.first_row, run.last_row)
        out, lse = total.out[:, :, rows], total.lse[:, :, rows]
        folded = query[:, :, rows].flatten(1, 2)[None]  # [1, H, G * R, D]: the group's heads read keys together
        keys, values = (_run_slots(pages, run)[None] for pages in (key_pages, value_pages))
        part = attend(folded, keys, values, scale, run.bias, softcap=softcap)
        shape = out.shape[1:3]
        merge_into(Partial(out, lse), Partial(part.out[0].unflatten(1, shape), part.lse[0].unflatten(1, shape)))
    for runs in own:
        part = _attend_own(query, key_pages, value_pages, runs, scale, softcap)
        rows_total = Partial(total.out[:, :, runs.rows], total.lse[:, :, runs.rows])
        merge_into(rows_total, part)
        total.out[:, :, runs.rows] = rows_total.out
        total.lse[:, :, runs.rows] = rows_total.lse


def _run_slots(pages: Tensor, run: SharedRun) -> Tensor:
    """Slots `[H, N, D]` of a run, without a copy if its pages follow each other."""
    count = run.pages.shape[0]
    if run.first_page is not None:
        return slots(pages[:, run.first_page : run.first_page + count])
    return pages.index_select(1, run.pages).flatten(1, 2)


def _attend_own(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, runs: OwnRuns, scale: float, softcap: float | None
) -> Partial:
    """Attend each row to its own pages; `[H, G, B, D]` and `[H, G, B]`."""
    keys, values = (_gather(pages, runs.pages).transpose(0, 1) for pages in (key_pages, value_pages))
    rows = query.index_select(2, runs.rows).permute(2, 0, 1, 3)  # [B, H, G, D]
    part = attend(rows, keys, values, scale, runs.bias, softcap=softcap)
    return Partial(part.out.permute(1, 2, 0, 3), part.lse.permute(1, 2, 0))


def _gather(pages: Tensor, wanted: Tensor) -> Tensor:
    """Slots `[H, B, P * page_size, D]` of pages `[B, P]` or `[H, B, P]`."""
    heads, total, size, width = pages.shape
    batch, count = wanted.shape[-2:]
    if wanted.dim() == 3:  # one list of all heads' pages, so that a whole page is copied at a time
        wanted = wanted + torch.arange(heads, device=wanted.device)[:, None, None] * total
        pages = pages.reshape(1, heads * total, size, width)
    return pages.index_select(1, wanted.flatten()).view(heads, batch, count * size, width)
