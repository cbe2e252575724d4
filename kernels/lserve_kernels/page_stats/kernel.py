"""Bounds of the keys of logical pages, on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def page_stats_kernel(
    keys,
    low,
    high,
    logical,
    source,
    counts,
    key_head_stride,
    bound_head_stride,
    width,
    size: tl.constexpr,
    block_d: tl.constexpr,
):
    """One program per touched logical page and head: keys `[size, D]` to their bounds `[D]`."""
    head = tl.program_id(1).to(tl.int64)
    page = tl.load(logical + tl.program_id(0))
    place = tl.load(source + tl.program_id(0))
    count = tl.load(counts + tl.program_id(0))
    channel = tl.arange(0, block_d)
    token = tl.minimum(tl.arange(0, size), count - 1)  # a slot without a token repeats the last one
    places = keys + head * key_head_stride + (place * size + token[:, None]) * width + channel[None, :]
    block = tl.load(places, mask=(channel < width)[None, :])
    target = head * bound_head_stride + page * width + channel
    tl.store(low + target, tl.min(block, 0), mask=channel < width)
    tl.store(high + target, tl.max(block, 0), mask=channel < width)
