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
