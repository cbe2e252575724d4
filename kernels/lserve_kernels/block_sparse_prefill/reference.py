"""Attention of a chunk to itself (dense heads) and of a chunk under the Λ mask (streaming heads): plain torch.

A streaming head at position p sees keys at q < sink or p − q < recent, per token and its own included. The band is cut
into blocks of queries that each see `recent` keys before them, so the work and every mask grow with the chunk, not with
its square.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lserve_kernels.partial import Partial, attend, hidden, merge_into

_BLOCK = 128  # queries that share one stretch of the band


@dataclass(frozen=True, slots=True)
class BandMask:
    """Biases of one chunk under one pair of windows; made once a step and used by all layers.

    Args:
        past: keys before the chunk that the band reads, in tokens.
        front: empty keys put before them so that blocks are of one size.
        band: `[1, blocks, group * _BLOCK, width]`.
        sink: `[1, 1, group * T, S]`, or None if no sink key is seen.
    """

    past: int
    front: int
    band: Tensor
    sink: Tensor | None


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, softcap: float | None = None
) -> Partial:
    """Attend a chunk to itself, causally.

    Args:
        query: `[H, G, T, D]`.
        key, value: `[H, T, D]`.
    Returns:
        Output `[H, G, T, D]` and log-sum-exp `[H, G, T]`.
    """
    heads, group, length, width = query.shape
    keys, values = (x[:, None].expand(heads, group, length, width) for x in (key, value))
    return attend(query, keys, values, scale, causal=True, softcap=softcap)


def band_mask(
    start: int, length: int, past: int, num_sink: int, sink: int, recent: int, group: int, like: Tensor
) -> BandMask:
    """Build the biases for a chunk at positions `start … start + length − 1`.

    Args:
        past: tokens before the chunk whose keys are handed over, the last ones; at most `recent − 1`.
        num_sink: sink keys handed over: positions `0 … num_sink − 1`.
        group: query heads a KV head.
        like: gives dtype and device.
    """
    blocks, before = -(-length // _BLOCK), recent - 1
    hide, device = hidden(like.dtype), like.device
    # key j of block b stands at start + b * BLOCK - before + j; query i at start + b * BLOCK + i
    key = torch.arange(before + _BLOCK, device=device) - before
    query = torch.arange(_BLOCK, device=device)[:, None]
    seen = (key <= query) & (query - key < recent)
    position = start + _BLOCK * torch.arange(blocks, device=device)[:, None] + key
    there = (position >= max(start - past, sink)) & (position < start + length)
    band = torch.zeros(blocks, _BLOCK, before + _BLOCK, dtype=like.dtype, device=device)
    band.masked_fill_(~(seen & there[:, None]), hide)
    sink_bias = None
    if num_sink:
        positions = torch.arange(start, start + length, device=device)[:, None]
        sink_bias = torch.zeros(length, num_sink, dtype=like.dtype, device=device)
        sink_bias.masked_fill_(torch.arange(num_sink, device=device) > positions, hide)
        sink_bias = sink_bias.repeat(group, 1)[None, None]
    return BandMask(past, before - past, band.repeat(1, group, 1)[None], sink_bias)


def streaming_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    mask: BandMask,
    *,
    scale: float,
    softcap: float | None = None,
) -> Partial:
    """Attend a chunk under the Λ mask.

    Args:
        query: `[H, G, T, D]`.
        key, value: `[H, past + T, D]`: the last `mask.past` tokens before the chunk, then the chunk.
        sink_key, sink_value: `[H, S, D]`, positions 0 … S − 1.
        mask: from `band_mask` for this chunk.
    Returns:
        Output `[H, G, T, D]` and log-sum-exp `[H, G, T]`.
    """
    _, group, length, _ = query.shape
    blocks = mask.band.shape[1]
    padding = blocks * _BLOCK - length
    spans = [
        torch.nn.functional.pad(x, (0, 0, mask.front, padding)).unfold(1, mask.band.shape[-1], _BLOCK).transpose(2, 3)
        for x in (key, value)
    ]  # [H, blocks, width, D]: overlapping views of one buffer
    padded = torch.nn.functional.pad(query, (0, 0, 0, padding)).unflatten(2, (blocks, _BLOCK))
    part = attend(padded.transpose(1, 2).flatten(2, 3), spans[0], spans[1], scale, mask.band, softcap=softcap)
    out = part.out.unflatten(2, (group, _BLOCK)).transpose(1, 2).flatten(2, 3)[:, :, :length].contiguous()
    lse = part.lse.unflatten(2, (group, _BLOCK)).transpose(1, 2).flatten(2, 3)[:, :, :length].contiguous()
    total = Partial(out, lse)
    if mask.sink is not None:
        sinks = attend(query.flatten(1, 2)[None], sink_key[None], sink_value[None], scale, mask.sink, softcap=softcap)
        merge_into(
            total, Partial(sinks.out[0].unflatten(1, (group, length)), sinks.lse[0].unflatten(1, (group, length)))
        )
    return total
