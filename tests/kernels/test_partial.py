"""Attention in parts, against one softmax in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lserve_kernels import NOTHING, Partial, attend, merge, merge_into
from lserve_kernels.partial import _attend_plain, _attend_split
from tests.helpers.oracles import assert_matches

SCALE = 0.3


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    scores = q @ k.transpose(-1, -2) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores if bias is None else scores + bias).softmax(-1) @ v


def tensors(heads: int, rows: int, length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(1, heads, n, width).to(dtype) for n in (rows, length, length))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "length", "width"), [(1, 1, 16), (3, 63, 60), (40, 1024, 64), (7, 4096, 100)])
def test_attend_equals_softmax(rows: int, length: int, width: int, dtype: torch.dtype) -> None:
    q, k, v = tensors(3, rows, length, width, dtype)
    exact = softmax_attention(q.double(), k.double(), v.double())
    assert_matches(attend(q, k, v, SCALE).out, exact, softmax_attention(q, k, v))


@pytest.mark.parametrize("pieces", [2, 8])
@pytest.mark.parametrize("per_row", [False, True])
def test_split_keys_give_the_same(pieces: int, per_row: bool) -> None:
    q, k, v = tensors(2, 5, 1024, 32, torch.float32)
    bias = torch.zeros(1, 1, 5 if per_row else 1, 1024)
    bias[..., 100:700] = NOTHING  # wider than a piece: some pieces are wholly hidden
    whole = _attend_plain(q, k, v, SCALE, bias)
    split = _attend_split(q, k, v, SCALE, bias, pieces)
    torch.testing.assert_close(split.out, whole.out)
    torch.testing.assert_close(split.lse, whole.lse)


def test_hidden_rows_weigh_nothing() -> None:
    q, k, v = tensors(2, 4, 65, 16, torch.float32)
    bias = torch.zeros(1, 1, 4, 65)
    bias[:, :, 1] = NOTHING
    part, rest = attend(q, k, v, SCALE, bias), attend(q, k[:, :, :9], v[:, :, :9], SCALE)
    total = Partial(rest.out.clone(), rest.lse.clone())
    merge_into(total, part)
    torch.testing.assert_close(total.out[:, :, 1], rest.out[:, :, 1])
    assert not torch.allclose(total.out[:, :, 0], rest.out[:, :, 0])


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_parts_join_to_the_whole(softcap: float | None) -> None:
    q, k, v = tensors(2, 6, 300, 24, torch.float32)
    cuts = [(0, 1), (1, 130), (130, 300)]
    parts = [attend(q, k[:, :, a:b], v[:, :, a:b], SCALE, softcap=softcap) for a, b in cuts]
    joined = merge(Partial(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts])), 0)
    exact = softmax_attention(q.double(), k.double(), v.double(), softcap=softcap)
    assert_matches(joined.out, exact, softmax_attention(q, k, v, softcap=softcap))
    total = Partial(torch.zeros_like(q), torch.full(q.shape[:3], NOTHING))
    for part in parts:
        merge_into(total, part)
    assert_matches(total.out, exact, softmax_attention(q, k, v, softcap=softcap))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("length", [1, 2, 63, 257])
def test_causal_sees_no_future(length: int, softcap: float | None) -> None:
    q, k, v = tensors(2, length, length, 16, torch.float32)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    bias = torch.zeros(length, length).masked_fill(future, float("-inf"))
    exact = softmax_attention(q.double(), k.double(), v.double(), bias.double(), softcap)
    found = attend(q, k, v, SCALE, causal=True, softcap=softcap).out
    assert_matches(found, exact, softmax_attention(q, k, v, bias, softcap))
