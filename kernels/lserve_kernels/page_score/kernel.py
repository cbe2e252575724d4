"""Scores of pages against queries, on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def page_score_kernel(
    query,
    low,
    high,
    pages,
    counts,
    scores,
    query_head_stride,
    query_group_stride,
    query_row_stride,
    bound_head_stride,
    page_row_stride,
    num_rows,
    num_pages,
    width,
    group: tl.constexpr,
    per_page: tl.constexpr,
    logical_size: tl.constexpr,
    block_p: tl.constexpr,
    block_d: tl.constexpr,
):
    """One program per block of pages, row and head: the best bound of any query head and logical page."""
    column = tl.program_id(0) * block_p + tl.arange(0, block_p)
    row, head = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    channel = tl.arange(0, block_d)
    inside, wide = column < num_pages, channel < width
    page = tl.load(pages + row * page_row_stride + column, mask=inside, other=0)
    count = tl.load(counts + row * page_row_stride + column, mask=inside, other=0)
    best = tl.full([block_p], float("-inf"), tl.float32)
    for logical in tl.static_range(per_page):
        places = head * bound_head_stride + (page * per_page + logical)[:, None] * width + channel[None, :]
        held = inside & (logical * logical_size < count)
        seen = held[:, None] & wide[None, :]
        smallest = tl.load(low + places, mask=seen, other=0.0).to(tl.float32)
        largest = tl.load(high + places, mask=seen, other=0.0).to(tl.float32)
        for member in tl.static_range(group):
            start = query + head * query_head_stride + member * query_group_stride + row * query_row_stride
            asked = tl.load(start + channel, mask=wide, other=0.0).to(tl.float32)[None, :]
            score = tl.sum(tl.maximum(asked * smallest, asked * largest), 1)
            best = tl.where(held, tl.maximum(best, score), best)
    tl.store(scores + (head * num_rows + row) * num_pages + column, best, mask=inside)
