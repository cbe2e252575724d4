"""A chunk under the Λ mask, against the mask written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lserve_kernels import band_mask, causal_attention, streaming_attention
from tests.helpers.oracles import assert_matches

HEADS, GROUP, WIDTH = 2, 3, 16


def lambda_attention(
    query: Tensor, key: Tensor, value: Tensor, start: int, sink: int, recent: int, softcap: float | None
) -> Tensor:
    """`[H, G, T, D]` queries at `start …` over all keys `[H, start + T, D]` from position 0 on."""
    position = torch.arange(start, start + query.shape[2])[:, None]
    keys = torch.arange(key.shape[1])
    seen = (keys <= position) & ((keys < sink) | (position - keys < recent))
    scores = query @ key[:, None].transpose(-1, -2) * 0.25
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value[:, None]


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize(("sink", "recent"), [(0, 1), (0, 20), (5, 1), (16, 64), (64, 100), (3, 500), (400, 7)])
@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 63), (0, 300), (10, 128), (77, 111), (300, 129)])
def test_streaming_chunk_is_exact_per_token(
    start: int, length: int, sink: int, recent: int, softcap: float | None
) -> None:
    query = torch.randn(HEADS, GROUP, length, WIDTH)
    key, value = (torch.randn(HEADS, start + length, WIDTH) for _ in range(2))
    past = max(0, start - max(sink, start - recent + 1))
    num_sink = min(sink, start + length)
    mask = band_mask(start, length, past, num_sink, sink, recent, GROUP, query)
    found = streaming_attention(
        query,
        key[:, start - past :],
        value[:, start - past :],
        key[:, :num_sink],
        value[:, :num_sink],
        mask,
        scale=0.25,
        softcap=softcap,
    )
    exact = lambda_attention(query.double(), key.double(), value.double(), start, sink, recent, softcap)
    assert_matches(found.out, exact, lambda_attention(query, key, value, start, sink, recent, softcap), factor=4.0)


def test_masks_grow_with_the_chunk_not_with_its_square() -> None:
    like = torch.empty(0)
    small, large = (band_mask(0, n, 0, 16, 16, 64, GROUP, like) for n in (1024, 4096))
    assert large.band.numel() == 4 * small.band.numel()


@pytest.mark.parametrize("length", [1, 63, 300])
def test_wide_windows_are_dense(length: int) -> None:
    query = torch.randn(HEADS, GROUP, length, WIDTH)
    key, value = (torch.randn(HEADS, length, WIDTH) for _ in range(2))
    dense = causal_attention(query, key, value, scale=0.25)
    mask = band_mask(0, length, 0, 0, 0, length, GROUP, query)
    streamed = streaming_attention(query, key, value, key[:, :0], value[:, :0], mask, scale=0.25)
    torch.testing.assert_close(streamed.out, dense.out)
    torch.testing.assert_close(streamed.lse, dense.lse)
