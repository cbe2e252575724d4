"""The one attention function that every transformers model calls, and the step that answers it.

transformers hands each layer's queries, keys and values (after RoPE) to the function registered as `lserve`. Some
families do not forward extra keyword arguments, so what a step needs to know travels in a context variable that the
runner sets around the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from lserve_tools.errors import ModelError

NAME = "lserve"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks for: attention of `T` tokens. A batch may stand before the heads.

    Args:
        layer: index of the layer.
        query: `[Hq, T, D]` after RoPE, the model's dtype.
        key: `[Hkv, T, D]` after RoPE.
        value: `[Hkv, T, Dv]`.
        scale: factor of the scores.
        window: tokens that a query sees, itself included, or None for all.
        softcap: bound of the scores, applied as `softcap * tanh(score / softcap)`, or None.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float | None

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> AttentionCall:
        """Read what transformers hands to an attention function.

        Raises:
            ModelError: if the layer asks for something that cannot be answered.
        """
        if s_aux is not None:
            raise ModelError(f"{type(module).__name__} uses attention sinks as extra logits, which cannot be run here.")
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise ModelError(f"{type(module).__name__} does not tell its layer index; this model cannot be run.")
        scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
        return cls(int(layer), query, key, value, scale, sliding_window, softcap)


class AttentionStep(Protocol):
    """Answers the attention calls of one forward pass."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output, `[T, Hq, Dv]`."""
        ...


_active: ContextVar[AttentionStep | None] = ContextVar("lserve_attention_step", default=None)


@contextmanager
def active_step(step: AttentionStep) -> Iterator[None]:
    """Let `step` answer the attention calls of the forward passes inside the block."""
    token = _active.set(step)
    try:
        yield
    finally:
        _active.reset(token)


def register(name: str = NAME, attention: Callable[..., tuple[Tensor, None]] | None = None) -> None:
    """Register an attention function with transformers, with a mask builder that never builds a mask.

    Args:
        attention: takes what transformers hands over; None registers the engine's.
    """
    AttentionInterface.register(name, attention or _attention)
    AttentionMaskInterface.register(name, _no_mask)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    return None


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Answer one layer: `[1, H, T, D]` in, `[1, T, Hq, Dv]` out."""
    step = _active.get()
    if step is None:
        raise RuntimeError("attention 'lserve' was called outside of active_step(); use LLM, or another attention")
    call = AttentionCall.of(module, query[0], key[0], value[0], **kwargs)
    return step.attend(call)[None], None
