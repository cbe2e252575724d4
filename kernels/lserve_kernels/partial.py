"""Attention over a part of the keys, and how such parts are joined.

Softmax over a union of key sets is the mean of the parts' outputs weighted by their normalisers, so a query may attend
shared pages, its own pages and its own chunk separately. Parts carry their log-sum-exp in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NOTHING = -1e30  # log-sum-exp of an empty part: finite, so that no arithmetic on it gives NaN
_PLAIN_SCORES = 1 << 20  # scores of one head held at a time by the plain path
_SPLIT_TOKENS = 512  # smallest piece of keys that is worth a thread of its own


class Partial(NamedTuple):
    """Output `[..., R, D]` in the queries' dtype and log-sum-exp `[..., R]` in fp32 over some of the keys."""

    out: Tensor
    lse: Tensor


def hidden(dtype: torch.dtype) -> float:
    """Bias that hides a key: finite, so that a row which sees no key of a part gets weight 0 rather than NaN."""
    return NOTHING if dtype != torch.float16 else -6e4


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    softcap: float | None = None,
) -> Partial:
    """Attend `R` queries to `N` keys.

    Args:
        query: `[B, H, R, D]`.
        key, value: `[B, H, N, D]`, any strides of the outer dimensions (0 included).
        bias: added to the scores, broadcastable to `[B, H, R, N]`, the queries' dtype.
        causal: query i sees keys 0..i only (`R == N`).
    """
    if query.device.type != "cpu" or softcap is not None:
        return _attend_plain(query, key, value, scale, bias, causal=causal, softcap=softcap)
    splits = 1 if causal else _useful_splits(query, key)
    if splits > 1:
        return _attend_split(query, key, value, scale, bias, splits)
    return Partial(*_flash(query, key, value, is_causal=causal, attn_mask=bias, scale=scale))


def merge(parts: Partial, dim: int) -> Partial:
    """Join parts that are stacked along `dim` (of `lse`)."""
    lse = torch.logsumexp(parts.lse, dim)
    weight = torch.exp(parts.lse - lse.unsqueeze(dim)).unsqueeze(-1)
    return Partial((parts.out * weight).sum(dim).to(parts.out.dtype), lse)


def merge_into(total: Partial, part: Partial) -> None:
    """Join `part` into `total` in place; both `[..., R, D]` and `[..., R]`."""
    lse = torch.logaddexp(total.lse, part.lse)
    total.out.mul_(torch.exp(total.lse - lse).unsqueeze(-1)).add_(part.out * torch.exp(part.lse - lse).unsqueeze(-1))
    total.lse.copy_(lse)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _useful_splits(query: Tensor, key: Tensor) -> int:
    """Pieces to cut the keys into so that every thread has work when there are few queries."""
    batch, heads, rows, _ = query.shape
    length = key.shape[2]
    tasks = batch * heads * -(-rows // 32)
    if tasks >= 4 * torch.get_num_threads() or batch > 1:
        return 1
    pieces = min(-(-4 * torch.get_num_threads() // tasks), length // _SPLIT_TOKENS)
    while pieces > 1 and length % pieces:
        pieces -= 1
    return max(pieces, 1)


def _attend_split(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None, splits: int) -> Partial:
    """Attend pieces of the keys side by side: heads become the batch, pieces the heads."""
    _, heads, rows, width = query.shape
    pieces = (heads, splits, key.shape[2] // splits, width)
    if bias is not None:
        bias = bias[0].unflatten(-1, (splits, -1)).transpose(1, 2)
    parts = Partial(
        *_flash(
            query[0, :, None].expand(heads, splits, rows, width),
            key[0].unflatten(1, pieces[1:3]),
            value[0].unflatten(1, pieces[1:3]),
            attn_mask=bias,
            scale=scale,
        )
    )
    joined = merge(parts, dim=1)
    return Partial(joined.out[None], joined.lse[None])


def _attend_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    bias: Tensor | None,
    *,
    causal: bool = False,
    softcap: float | None = None,
) -> Partial:
    """The same in plain matrix products in fp32, for softcap, for devices other than the CPU, and as the oracle."""
    rows, length = query.shape[2], key.shape[2]
    keys, values = key.float().transpose(-1, -2), value.float()
    block = max(1, _PLAIN_SCORES // length)  # rows at a time, so that scores stay small
    parts = []
    for first in range(0, rows, block):
        last = min(rows, first + block)
        scores = torch.matmul(query[:, :, first:last].float() * scale, keys)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + (bias if bias.shape[2] == 1 else bias[:, :, first:last]).float()
        if causal:
            positions = torch.arange(length, device=scores.device)
            scores = scores.masked_fill(positions > positions[first:last, None], NOTHING)
        lse = torch.logsumexp(scores, dim=-1)
        parts.append((torch.matmul(torch.exp(scores - lse.unsqueeze(-1)), values).to(query.dtype), lse))
    return Partial(torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2))
