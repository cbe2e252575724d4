"""Codes of pages: how far they are from the numbers, and kernels against their twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lserve_kernels import PageLayout, PlainPages, QuantizedPages, Written
from lserve_kernels.kv_quant.launch import quantize_keys, quantize_values
from lserve_kernels.kv_quant.reference import Codes, dequantize
from tests.helpers.devices import KINDS

SIZE, WIDTH, HEADS = 16, 8, 2


def spoiled(keys: Tensor, counts: Tensor) -> Tensor:
    """Poison behind the last token of every page."""
    return keys.masked_fill((torch.arange(keys.shape[2]) >= counts[:, None])[..., None], 1e4)


@given(seed=st.integers(0, 10**6), bits=st.sampled_from([8, 4]), bias=st.sampled_from([0.0, 300.0]))
@settings(max_examples=40, deadline=None)
def test_codes_are_half_a_step_off_at_most(seed: int, bits: int, bias: float) -> None:
    torch.manual_seed(seed)
    counts = torch.tensor([SIZE, 1, 5])
    keys = torch.randn(HEADS, 3, SIZE, WIDTH) + bias * torch.randn(WIDTH)
    codes = quantize_keys(spoiled(keys, counts), counts, bits)
    there = torch.arange(SIZE) < counts[:, None]
    span = keys.masked_fill(~there[..., None], float("nan"))
    widest = (span.nan_to_num(nan=-1e9).amax(2) - span.nan_to_num(nan=1e9).amin(2))[:, :, None]
    error = (dequantize(codes, bits, torch.float32) - keys).abs().masked_fill(~there[..., None], 0)
    assert (error <= widest / (2**bits - 1) / 2 + 1e-6 * (1 + keys.abs())).all()
    values = torch.randn(HEADS, 3, SIZE, WIDTH)
    error = (dequantize(quantize_values(values, bits), bits, torch.float32) - values).abs()
    assert (error <= (values.amax(3) - values.amin(3))[..., None] / (2**bits - 1) / 2 + 1e-6).all()


def test_equal_numbers_are_kept_exactly() -> None:
    keys = torch.full((1, 1, SIZE, WIDTH), -7.25)
    assert torch.equal(dequantize(quantize_keys(keys, torch.tensor([SIZE]), 4), 4, torch.float32), keys)
    assert torch.equal(dequantize(quantize_values(keys, 4), 4, torch.float32), keys)


@pytest.mark.parametrize(("device", "dtype"), KINDS)
@pytest.mark.parametrize("bits", [8, 4])
def test_kernels_equal_their_twins(device: str, dtype: torch.dtype, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = torch.tensor([48, 1, 20])
    keys = spoiled(torch.randn(3, 3, 48, 80), counts).to(device, dtype)
    found: list[list[Codes]] = []
    for backend in ("torch", "triton"):
        monkeypatch.setenv("LSERVE_KERNELS", backend)
        found.append([quantize_keys(keys, counts.to(device), bits), quantize_values(keys, bits)])
    for twin, kernel in zip(*found, strict=True):
        assert torch.equal(twin.step, kernel.step)
        assert torch.equal(twin.low, kernel.low)
        # A quotient on the border of two codes may round either way.
        off = (dequantize(twin, bits, torch.float32) - dequantize(kernel, bits, torch.float32)).abs()
        assert (off <= twin.step * 1.001).all()
        assert (twin.codes != kernel.codes).float().mean() < 1e-3


def written(layout: PageLayout, slots: list[int], open_of: Tensor, open_pages: dict[int, int]) -> Written:
    plan = Written.plan(slots, layout, torch.device("cpu"), open_pages)
    open_of[plan.pages] = -1
    open_of[plan.pages[plan.open[0]]] = plan.open[1]
    return plan


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("step", [1, 3, 16, 40])
def test_pages_read_as_what_was_written(bits: int, step: int) -> None:
    """A tail that grows by `step` tokens: full pages within their codes' error, the open page exactly."""
    layout = PageLayout(SIZE, WIDTH, torch.float32, bits=bits)
    plain = PageLayout(SIZE, WIDTH, torch.float32)
    open_of = torch.full((6,), -1)
    pages = QuantizedPages.allocate(layout, None, HEADS, 6, 2, open_of, torch.device("cpu"))
    exact = PlainPages.allocate(plain, HEADS, 6, torch.device("cpu"))
    table = [4, 1, 2]
    for first in range(0, 40, step):
        tokens = range(first, min(40, first + step))
        slots = [table[t // SIZE] * SIZE + t % SIZE for t in tokens]
        keys, values = torch.randn(2, HEADS, len(slots), WIDTH)
        pages.write(written(layout, slots, open_of, dict.fromkeys(table, 1)), keys, values)
        exact.write(Written.plan(slots, plain, torch.device("cpu")), keys, values)
    wanted = torch.tensor([table])
    for found, true in zip(pages.gather(wanted), exact.gather(wanted), strict=True):
        assert torch.equal(found[:, 0, 32:40], true[:, 0, 32:40])
        assert not torch.equal(found[:, 0, :32], true[:, 0, :32])
        torch.testing.assert_close(found[:, 0, :32], true[:, 0, :32], rtol=0, atol=8 / (2**bits - 1) / 2)
    chosen = torch.tensor([[[2, 4]], [[1, 2]]])
    for found, true in zip(pages.gather(chosen), exact.gather(chosen), strict=True):
        torch.testing.assert_close(found[..., :8, :], true[..., :8, :], rtol=0, atol=8 / (2**bits - 1) / 2)
    assert torch.equal(pages.read(torch.tensor(table))[0], pages.gather(wanted)[0][:, 0])


def test_layouts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="8 or 4 bits"):
        PageLayout(64, 8, torch.float32, bits=3)
    with pytest.raises(ValueError, match="width 7"):
        PageLayout(64, 7, torch.float32, bits=4)


@pytest.mark.parametrize(("bits", "share"), [(8, 0.60), (4, 0.40)])
def test_pages_of_few_bits_are_small(bits: int, share: float) -> None:
    sixteen = PageLayout(64, 128, torch.bfloat16).bytes_per_page(8)
    assert PageLayout(64, 128, torch.bfloat16, bits=bits).bytes_per_page(8) <= share * sixteen
