"""Codes of whole pages, by the kernel or its twin."""

from __future__ import annotations

import torch
from torch import Tensor

from lserve_kernels.dispatch import use_triton
from lserve_kernels.kv_quant import reference
from lserve_kernels.kv_quant.reference import Codes


def quantize_keys(keys: Tensor, counts: Tensor, bits: int) -> Codes:
    """See `reference.quantize_keys`."""
    if not use_triton(keys) or not keys.numel() or keys.shape[-1] % 2:
        return reference.quantize_keys(keys, counts, bits)
    return _launch(keys, counts, bits)


def quantize_values(values: Tensor, bits: int) -> Codes:
    """See `reference.quantize_values`."""
    if not use_triton(values) or not values.numel() or values.shape[-1] % 2:
        return reference.quantize_values(values, bits)
    return _launch(values, None, bits)


def _launch(numbers: Tensor, counts: Tensor | None, bits: int) -> Codes:
    import triton

    from lserve_kernels.kv_quant.kernel import kv_quant_kernel

    heads, pages, size, width = numbers.shape
    numbers = numbers.contiguous()
    scale = (heads, pages, size, 1) if counts is None else (heads, pages, 1, width)
    step, low = (torch.empty(scale, dtype=torch.float32, device=numbers.device) for _ in range(2))
    codes = torch.empty(heads, pages, size, width * bits // 8, dtype=torch.uint8, device=numbers.device)
    kv_quant_kernel[(pages, heads)](
        numbers,
        numbers if counts is None else counts,  # not read for values
        codes,
        step,
        low,
        pages,
        width,
        per_channel=counts is not None,
        bits=bits,
        size=size,
        block_s=triton.next_power_of_2(size),
        block_h=triton.next_power_of_2(width // 2),
    )
    return Codes(codes, step, low)
