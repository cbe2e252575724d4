"""Codecs give back what went in: every bit of it, or to within half a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lserve_tools.errors import UsageError
from lserve_tools.quant.int8 import GROUP
from lserve_tools.quant.kv import CODECS, KVCodec, get_codec
from lserve_tools.quant.parts import PartSpec

SHAPES = [(1, 1, 8), (3, 63, 60), (2, 64, 64), (2, 65, 16), (0, 20, 8), (2, 0, 8), (1, 200, 1)]
EPS = torch.finfo(torch.float32).eps


def stored(parts: dict[str, Tensor], specs: dict[str, PartSpec]) -> dict[str, Tensor]:
    """Parts as they come back from a file: of the shapes and dtypes that were promised, in their own memory."""
    assert {n: (tuple(p.shape), p.dtype) for n, p in parts.items()} == {n: (s.shape, s.dtype) for n, s in specs.items()}
    return {name: part.contiguous().clone() for name, part in parts.items()}


def keys_there_and_back(codec: KVCodec, keys: Tensor, out: torch.dtype) -> Tensor:
    parts = stored(codec.encode_keys(keys), codec.key_parts(shape_of(keys), keys.dtype))
    return codec.decode_keys(parts, torch.empty(keys.shape, dtype=out))


def values_there_and_back(codec: KVCodec, values: Tensor, out: torch.dtype) -> Tensor:
    parts = stored(codec.encode_values(values), codec.value_parts(shape_of(values), values.dtype))
    return codec.decode_values(parts, torch.empty(values.shape, dtype=out))


def shape_of(x: Tensor) -> tuple[int, int, int]:
    return (x.shape[0], x.shape[1], x.shape[2])


def key_steps(keys: Tensor) -> Tensor:
    """A 255th of the range of each channel in its group of tokens, for every number of keys `[H, T, D]`."""
    groups = [g.double() for g in keys.split(GROUP, dim=1)]
    if not keys.numel():
        return keys.double()
    return torch.cat([(g.amax(1, keepdim=True) - g.amin(1, keepdim=True)).expand_as(g) for g in groups], dim=1) / 255


def value_steps(values: Tensor) -> Tensor:
    """A 255th of the range of each token, for every number of values `[H, T, D]`."""
    exact = values.double()
    return ((exact.amax(2, keepdim=True) - exact.amin(2, keepdim=True)) / 255).expand_as(exact)


def assert_within_half_a_step(got: Tensor, x: Tensor, steps: Tensor) -> None:
    """The error is half a step, and what float32 must round when it adds a centre and a multiple of a step."""
    if not x.numel():
        return
    rounding = 4 * EPS * x.double().abs().amax() + torch.finfo(torch.float32).tiny
    excess = (got.double() - x.double()).abs() - steps / 2 - rounding
    assert excess.max() <= 0, f"half a step is exceeded by {excess.max()} at {excess.argmax()}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_exact_gives_back_every_bit(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(bits)
    x = torch.randint(info.min, info.max, shape, dtype=bits).view(dtype)  # NaN, infinities and both zeros too
    codec = get_codec("exact")
    for there_and_back in (keys_there_and_back, values_there_and_back):
        got = there_and_back(codec, x, dtype)
        assert got.dtype == dtype
        assert torch.equal(got.view(bits), x.view(bits))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_is_right_to_half_a_step(shape: tuple[int, int, int]) -> None:
    codec = get_codec("int8")
    x = torch.randn(shape) * torch.rand(shape[2]) * 30 + torch.randn(shape[2]) * 100
    assert_within_half_a_step(keys_there_and_back(codec, x, torch.float32), x, key_steps(x))
    assert_within_half_a_step(values_there_and_back(codec, x, torch.float32), x, value_steps(x))


@settings(deadline=None, max_examples=150)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 150), st.integers(1, 9)),
    seed=st.integers(0, 2**32),
    spread=st.floats(-38, 38),
    centre=st.floats(-38, 38),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_int8_holds_whatever_a_number_may_be(
    shape: tuple[int, int, int], seed: int, spread: float, centre: float, dtype: torch.dtype
) -> None:
    """Numbers of any size around any centre, where float16 would overflow or vanish."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
    offset = torch.rand(shape[2], generator=generator, dtype=torch.float64) * 2 - 1
    x = (x * 10**spread + offset * 10**centre).to(dtype)
    codec = get_codec("int8")
    assert_within_half_a_step(keys_there_and_back(codec, x, torch.float32), x, key_steps(x))
    assert_within_half_a_step(values_there_and_back(codec, x, torch.float32), x, value_steps(x))


@pytest.mark.parametrize("number", [0.0, -3.7, 1e-30, 3e38])
def test_equal_numbers_come_back_as_they_are(number: float) -> None:
    x = torch.full((2, 70, 6), number)
    codec = get_codec("int8")
    assert torch.equal(keys_there_and_back(codec, x, torch.float32), x)
    assert torch.equal(values_there_and_back(codec, x, torch.float32), x)


def test_a_huge_channel_costs_the_others_nothing() -> None:
    """Some models have a key channel of hundreds beside others below one."""
    keys = torch.randn(2, 130, 8)
    keys[:, :, 3] += 900
    got = keys_there_and_back(get_codec("int8"), keys, torch.float32)
    others = [i for i in range(8) if i != 3]
    spread = keys[..., others].amax() - keys[..., others].amin()
    assert (got - keys)[..., others].abs().max() <= spread / 255 / 2 * (1 + 1e-3)


def test_groups_are_counted_from_the_first_token() -> None:
    """A group's numbers depend on no other group's, so that groups can coincide with pages."""
    codec = get_codec("int8")
    keys = torch.randn(2, 3 * GROUP + 5, 8)
    whole = keys_there_and_back(codec, keys, torch.float32)
    for start in range(0, keys.shape[1], GROUP):
        alone = keys_there_and_back(codec, keys[:, start : start + GROUP], torch.float32)
        assert torch.equal(alone, whole[:, start : start + GROUP])


def test_a_token_of_values_depends_on_no_other() -> None:
    codec = get_codec("int8")
    values = torch.randn(2, 40, 8)
    whole = values_there_and_back(codec, values, torch.float32)
    assert torch.equal(values_there_and_back(codec, values[:, 7:8], torch.float32), whole[:, 7:8])


@pytest.mark.parametrize("name", CODECS)
def test_numbers_come_in_the_dtype_that_is_asked_for(name: str) -> None:
    codec = get_codec(name)
    x = torch.randn(2, 70, 8)
    for dtype in (torch.float32, torch.bfloat16):
        for there_and_back in (keys_there_and_back, values_there_and_back):
            got = there_and_back(codec, x, dtype)
            assert got.dtype == dtype
            # Two roundings to `dtype` on the way at most, beside the codec's own error.
            assert (got.double() - x.double()).abs().max() < 0.05


def test_an_unknown_codec_names_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"no codec is named 'int3'\. Codecs are exact, int8"):
        get_codec("int3")
