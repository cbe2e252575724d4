"""Attention of packed queries to paged keys: plain torch, and the product on a CPU.

Queries that share pages are attended to them together, so pages are read once for all of them however many sequences
stand over one context.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lserve_kernels.pages import KVPages
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
    pages: KVPages,
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
        pages: of the `H` KV heads.
        shared, own: what each row sees.
        total: output `[H, G, T, D]` and log-sum-exp `[H, G, T]` of what the rows have seen so far; changed in place.
    """
    for run in shared:
        rows = slice(run.first_row, run.last_row)
        out, lse = total.out[:, :, rows], total.lse[:, :, rows]
        folded = query[:, :, rows].flatten(1, 2)[None]  # [1, H, G * R, D]: the group's heads read keys together
        keys, values = pages.read(run.pages, run.first_page)
        part = attend(folded, keys[None], values[None], scale, run.bias, softcap=softcap)
        shape = out.shape[1:3]
        merge_into(Partial(out, lse), Partial(part.out[0].unflatten(1, shape), part.lse[0].unflatten(1, shape)))
    for runs in own:
        part = _attend_own(query, pages, runs, scale, softcap)
        rows_total = Partial(total.out[:, :, runs.rows], total.lse[:, :, runs.rows])
        merge_into(rows_total, part)
        total.out[:, :, runs.rows] = rows_total.out
        total.lse[:, :, runs.rows] = rows_total.lse


def _attend_own(query: Tensor, pages: KVPages, runs: OwnRuns, scale: float, softcap: float | None) -> Partial:
    """Attend each row to its own pages; `[H, G, B, D]` and `[H, G, B]`."""
    keys, values = (x.transpose(0, 1) for x in pages.gather(runs.pages))
    rows = query.index_select(2, runs.rows).permute(2, 0, 1, 3)  # [B, H, G, D]
    part = attend(rows, keys, values, scale, runs.bias, softcap=softcap)
    return Partial(part.out.permute(1, 2, 0, 3), part.lse.permute(1, 2, 0))
