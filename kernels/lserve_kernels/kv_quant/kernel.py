"""Codes of whole pages, on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kv_quant_kernel(
    numbers,
    counts,
    codes,
    step,
    low,
    num_pages,
    width,
    per_channel: tl.constexpr,
    bits: tl.constexpr,
    size: tl.constexpr,
    block_s: tl.constexpr,
    block_h: tl.constexpr,
):
    """One program per page and head; both halves of the channels, `[S, D / 2]` each, because 4-bit codes pair them."""
    page, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    half = width // 2
    token, channel = tl.arange(0, block_s), tl.arange(0, block_h)
    base = (head * num_pages + page) * size
    inside = (token < size)[:, None] & (channel < half)[None, :]
    source = token
    if per_channel:  # what stands behind the last token must not move the bounds: there the last token is repeated
        source = tl.minimum(token, tl.load(counts + page) - 1)
    places = numbers + (base + source)[:, None] * width + channel[None, :]
    left = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(places + half, mask=inside, other=0.0).to(tl.float32)
    most: tl.constexpr = (1 << bits) - 1
    if per_channel:
        rows = (token < size)[:, None]
        scale_at = (head * num_pages + page) * width + channel
        low_left = tl.min(tl.where(rows, left, float("inf")), 0)
        low_right = tl.min(tl.where(rows, right, float("inf")), 0)
        step_left = (tl.max(tl.where(rows, left, float("-inf")), 0) - low_left) / most
        step_right = (tl.max(tl.where(rows, right, float("-inf")), 0) - low_right) / most
        tl.store(low + scale_at, low_left, mask=channel < half)
        tl.store(low + scale_at + half, low_right, mask=channel < half)
        tl.store(step + scale_at, step_left, mask=channel < half)
        tl.store(step + scale_at + half, step_right, mask=channel < half)
        code_left = _code(left, low_left[None, :], step_left[None, :], most)
        code_right = _code(right, low_right[None, :], step_right[None, :], most)
    else:
        columns = (channel < half)[None, :]
        least = tl.minimum(
            tl.min(tl.where(columns, left, float("inf")), 1), tl.min(tl.where(columns, right, float("inf")), 1)
        )
        greatest = tl.maximum(
            tl.max(tl.where(columns, left, float("-inf")), 1), tl.max(tl.where(columns, right, float("-inf")), 1)
        )
        one = (greatest - least) / most
        tl.store(low + base + token, least, mask=token < size)
        tl.store(step + base + token, one, mask=token < size)
        code_left = _code(left, least[:, None], one[:, None], most)
        code_right = _code(right, least[:, None], one[:, None], most)
    if bits == 8:
        at = codes + (base + token)[:, None] * width + channel[None, :]
        tl.store(at, code_left, mask=inside)
        tl.store(at + half, code_right, mask=inside)
    else:
        at = codes + (base + token)[:, None] * half + channel[None, :]
        tl.store(at, code_left | (code_right << 4), mask=inside)


@triton.jit
def _code(numbers, low, step, most: tl.constexpr):
    """Codes of numbers, rounded half to even as torch does."""
    exact = (numbers - low) / tl.where(step > 0, step, 1.0)
    floor = tl.floor(exact)
    rest = exact - floor
    odd = floor - 2 * tl.floor(floor / 2)
    whole = floor + tl.where((rest > 0.5) | ((rest == 0.5) & (odd > 0)), 1.0, 0.0)
    return tl.minimum(tl.maximum(whole, 0.0), most * 1.0).to(tl.uint8)
