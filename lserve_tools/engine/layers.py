"""Which heads of a layer are retrieval and which are streaming heads, and the windows of the latter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lserve_tools.errors import ProfileError
from lserve_tools.heads.profile import HeadProfile
from lserve_tools.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """KV heads of one layer by kind.

    Args:
        retrieval, streaming: indices of the KV heads, int64, ascending; together all of them.
        sink, recent: windows of the streaming heads, in tokens.
    """

    retrieval: Tensor
    streaming: Tensor
    sink: int
    recent: int


def split_heads(
    spec: ModelSpec, profile: HeadProfile | None, max_length: int, device: torch.device
) -> list[LayerHeads]:
    """Tell the kind of every KV head.

    A layer with a sliding window is a layer of streaming heads without sinks: it frees its memory the same way. A
    window that no prompt can exceed is full attention.

    Raises:
        ProfileError: if the profile is of another shape than the model.
    """
    shape = (spec.num_layers, spec.num_kv_heads)
    if profile is not None and tuple(profile.retrieval.shape) != shape:
        raise ProfileError(
            f"the head profile is for {' × '.join(map(str, profile.retrieval.shape))} layers × KV heads,"
            f" the model has {shape[0]} × {shape[1]}.",
            cure="Make one for this model with profile-heads.",
        )
    everything = torch.arange(spec.num_kv_heads, device=device)
    layers = []
    for layer, window in enumerate(spec.windows):
        if window is not None and window < max_length:
            layers.append(LayerHeads(everything[:0], everything, 0, window))
        elif profile is None:
            layers.append(LayerHeads(everything, everything[:0], 0, 0))
        else:
            retrieves = profile.retrieval[layer].to(device)
            layers.append(LayerHeads(everything[retrieves], everything[~retrieves], profile.sink, profile.recent))
    return layers


@dataclass(frozen=True, slots=True)
class StreamingWindows:
    """What a cache must know of streaming heads.

    Args:
        mask: per layer and KV head, True for a retrieval head.
        sink, recent: the widest windows of any layer, in tokens.
    """

    mask: tuple[tuple[bool, ...], ...]
    sink: int
    recent: int


def windows_of(layers: list[LayerHeads], profile: HeadProfile | None, num_kv_heads: int) -> StreamingWindows | None:
    """The windows of all layers together, or None if no head streams.

    Raises:
        ProfileError: if a head profile meets sliding windows that are wider than its own.
    """
    streaming = [heads for heads in layers if len(heads.streaming)]
    if not streaming:
        return None
    recent = max(heads.recent for heads in streaming)
    if profile is not None and recent > profile.recent:
        raise ProfileError(
            f"the model has sliding windows of {recent} tokens, the head profile a recent window of {profile.recent}.",
            cure=f"Make one with profile-heads --recent {recent}, or go without.",
        )
    retrieval = [heads.retrieval.tolist() for heads in layers]
    mask = tuple(tuple(head in kept for head in range(num_kv_heads)) for kept in retrieval)
    return StreamingWindows(mask, max(heads.sink for heads in streaming), recent)
