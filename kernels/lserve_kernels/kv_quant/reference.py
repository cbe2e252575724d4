"""Codes of whole pages, 8 or 4 bits: plain torch, and the product on a CPU.

Keys have one step per channel of a page, values one per token (KIVI, arXiv:2402.02750): outliers of keys lie in
channels, and a biased channel costs no precision because its bounds are stored too. A number is `low + code * step`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Codes(NamedTuple):
    """Numbers `[..., S, D]` as codes.

    Args:
        codes: `[..., S, D]` uint8, or `[..., S, D / 2]` where two channels share a byte: channel c and c + D / 2.
        step, low: fp32, `[..., 1, D]` of keys, `[..., S, 1]` of values.
    """

    codes: Tensor
    step: Tensor
    low: Tensor


def quantize_keys(keys: Tensor, counts: Tensor, bits: int) -> Codes:
    """Codes of key pages `[H, N, S, D]` of which the first `counts` `[N]` tokens are there (at least one)."""
    last = torch.minimum(torch.arange(keys.shape[2], device=keys.device), counts[:, None] - 1)
    # What stands behind the last token must not move the bounds: there the last token is repeated.
    filled = keys.gather(2, last[None, :, :, None].expand_as(keys)).float()
    return _encode(filled, 2, bits)


def quantize_values(values: Tensor, bits: int) -> Codes:
    """Codes of value pages `[H, N, S, D]`."""
    return _encode(values.float(), 3, bits)


def dequantize(codes: Codes, bits: int, dtype: torch.dtype) -> Tensor:
    """The numbers `[..., S, D]`."""
    whole = codes.codes if bits == 8 else torch.cat([codes.codes & 15, codes.codes >> 4], dim=-1)
    return torch.addcmul(codes.low, whole.float(), codes.step).to(dtype)


def _encode(numbers: Tensor, dim: int, bits: int) -> Codes:
    low, high = numbers.aminmax(dim=dim, keepdim=True)
    most = (1 << bits) - 1
    step = (high - low) / most
    codes = ((numbers - low) / torch.where(step > 0, step, 1)).round_().clamp_(0, most).to(torch.uint8)
    if bits == 4:
        half = codes.shape[-1] // 2
        codes = codes[..., :half] | (codes[..., half:] << 4)
    return Codes(codes, step, low)
