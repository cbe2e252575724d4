"""Streaming attention that can be differentiated: exact per token, in time and memory that grow with the length only.

A query at position p sees keys at q < sink or p − q < recent, its own included. Queries are cut into blocks; each
block sees the sink keys and one stretch of keys up to its own end, in a single softmax, so a sink key inside the
stretch is hidden there and counts once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

_BLOCK = 64  # queries that share one stretch of keys


@dataclass(frozen=True, slots=True)
class StreamingMask:
    """What each query of a prompt sees.

    Args:
        length: tokens of the prompt.
        sink: of them, those that all later tokens see.
        before: blocks of keys that a block of queries sees besides its own.
        bias: `[blocks, _BLOCK, sink + (before + 1) * _BLOCK]`, 0 or minus infinity.
    """

    length: int
    sink: int
    before: int
    bias: Tensor

    @classmethod
    @lru_cache(maxsize=4)  # all layers of a pass ask for the same one
    def build(cls, length: int, sink: int, recent: int, dtype: torch.dtype, device: torch.device) -> StreamingMask:
        """Make the mask for windows of `sink` and `recent` tokens."""
        with torch.inference_mode(False):  # it may be kept for a pass with gradients
            return cls._build(length, sink, recent, dtype, device)

    @classmethod
    def _build(cls, length: int, sink: int, recent: int, dtype: torch.dtype, device: torch.device) -> StreamingMask:
        sink, recent = min(sink, length), min(recent, length)
        blocks, before = -(-length // _BLOCK), -(-(recent - 1) // _BLOCK)
        start = _BLOCK * torch.arange(blocks, device=device)[:, None, None]
        query = start + torch.arange(_BLOCK, device=device)[:, None]
        key = start + torch.arange(-before * _BLOCK, _BLOCK, device=device)
        in_band = (key >= sink) & (key <= query) & (query - key < recent)
        in_sink = torch.arange(sink, device=device) <= query
        seen = torch.cat([in_sink, in_band], dim=-1)
        return cls(length, sink, before, torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf))


def streaming_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: StreamingMask, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Attend under the Λ mask.

    Args:
        query: `[B, Hq, T, D]`.
        key: `[B, Hkv, T, D]`.
        value: `[B, Hkv, T, Dv]`.
    Returns:
        `[B, Hq, T, Dv]`.
    """
    batch, heads, length, _ = query.shape
    group, (blocks, block, _) = heads // key.shape[1], mask.bias.shape
    grouped = query.unflatten(1, (key.shape[1], group)).flatten(0, 1)
    padded = functional.pad(grouped, (0, 0, 0, blocks * block - length)).unflatten(2, (blocks, block))
    queries = padded.transpose(1, 2).flatten(2, 3)  # [B * Hkv, blocks, G * block, D]
    keys, values = (_stretches(x.flatten(0, 1), mask) for x in (key, value))
    bias = mask.bias.repeat(1, group, 1)[None]
    if softcap is None:
        out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scale)
    else:
        scores = softcap * torch.tanh(scale / softcap * (queries @ keys.transpose(2, 3)))
        out = torch.matmul(torch.softmax(scores + bias, dim=-1), values)
    out = out.unflatten(2, (group, block)).transpose(1, 2).flatten(2, 3)[:, :, :length]
    merged: Tensor = out.reshape(batch, heads, length, -1)
    return merged


def _stretches(x: Tensor, mask: StreamingMask) -> Tensor:
    """For each block of queries, the sink tokens and the stretch that ends with the block.

    Args:
        x: `[N, T, D]`.
    Returns:
        `[N, blocks, sink + (before + 1) * _BLOCK, D]`.
    """
    blocks = mask.bias.shape[0]
    padded = functional.pad(x, (0, 0, mask.before * _BLOCK, blocks * _BLOCK - mask.length))
    cut = padded.unflatten(1, (mask.before + blocks, _BLOCK))
    sink = x[:, None, : mask.sink].expand(-1, blocks, -1, -1)
    return torch.cat([sink, *(cut[:, first : first + blocks] for first in range(mask.before + 1))], dim=2)
