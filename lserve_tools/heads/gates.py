"""Attention for finding out which heads retrieve: full, streaming, or a mixture of both weighted by a gate per KV head.

It is registered apart from the engine's attention, because gates need gradients. A teacher pass runs the model as it
is and keeps each layer's attention output; a student pass mixes that output with streaming attention over its own
queries, keys and values, so that nothing quadratic is ever differentiated. A masked pass lets whole heads stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from lserve_kernels.block_sparse_prefill.reference import causal_attention
from lserve_tools.heads.streaming import StreamingMask, streaming_attention
from lserve_tools.models.attention import AttentionCall, register
from lserve_tools.models.spec import ModelSpec

NAME = "lserve_gates"


class GatePass(Protocol):
    """Answers the attention calls of one forward pass, `[B, H, T, D]` in, with `[B, Hq, T, Dv]`."""

    def attend(self, call: AttentionCall) -> Tensor: ...


@dataclass(slots=True)
class TeacherPass:
    """The model as it is; `outputs` keeps what each layer's attention gave, by layer."""

    outputs: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> Tensor:
        self.outputs[call.layer] = full_attention(call)
        return self.outputs[call.layer]


@dataclass(slots=True)
class StudentPass:
    """Each KV head gives `gate · teacher's full output + (1 − gate) · its own streaming output`.

    Args:
        gates: `[num_layers, num_kv_heads]`, those that gradients go to.
        gated: per layer, whether its heads have gates; a layer with a window of its own has none.
        teacher: outputs of the teacher pass over the same tokens.
        sink, recent: windows of streaming heads, in tokens.
    """

    gates: Tensor
    gated: tuple[bool, ...]
    teacher: dict[int, Tensor]
    sink: int
    recent: int

    def attend(self, call: AttentionCall) -> Tensor:
        if not self.gated[call.layer]:
            return full_attention(call)
        streaming = _stream(call, self.sink, self.recent)
        group = call.query.shape[1] // call.key.shape[1]
        gate = self.gates[call.layer].to(streaming.dtype).repeat_interleave(group)[:, None, None]
        return torch.lerp(streaming, self.teacher[call.layer].to(streaming.device), gate)


@dataclass(slots=True)
class MaskedPass:
    """Some KV heads stream, the others attend to everything, as in the engine.

    Args:
        retrieval: `[num_layers, num_kv_heads]` bool, on the CPU.
        gated: as in `StudentPass`.
    """

    retrieval: Tensor
    gated: tuple[bool, ...]
    sink: int
    recent: int

    def attend(self, call: AttentionCall) -> Tensor:
        retrieval = self.retrieval[call.layer]
        if not self.gated[call.layer] or bool(retrieval.all()):
            return full_attention(call)
        if not retrieval.any():
            return _stream(call, self.sink, self.recent)
        out = call.query.new_empty(*call.query.shape[:-1], call.value.shape[-1])
        grouped = out.unflatten(1, (call.key.shape[1], -1))
        for index, streams in ((retrieval.nonzero()[:, 0], False), ((~retrieval).nonzero()[:, 0], True)):
            index = index.to(out.device)
            part = _kv_heads(call, index)
            answer = _stream(part, self.sink, self.recent) if streams else full_attention(part)
            grouped[:, index] = answer.unflatten(1, (len(index), -1))
        return out


def full_attention(call: AttentionCall) -> Tensor:
    """What the model itself computes: causal attention, inside the layer's own window if it has one."""
    batch, heads, length, _ = call.query.shape
    if call.window is not None and call.window < length:
        return _stream(call, 0, call.window)
    kv_heads = call.key.shape[1]
    query = call.query.unflatten(1, (kv_heads, -1)).flatten(0, 1)  # [B * Hkv, G, T, D]
    key, value = call.key.flatten(0, 1), call.value.flatten(0, 1)
    if call.softcap is not None:
        out = causal_attention(query, key, value, scale=call.scale, softcap=call.softcap).out
    else:
        keys, values = (x[:, None].expand(-1, query.shape[1], -1, -1) for x in (key, value))
        out = functional.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=call.scale)
    return out.reshape(batch, heads, length, -1)


def gated_layers(spec: ModelSpec) -> tuple[bool, ...]:
    """Per layer, whether its heads can be made to stream: not if a window of its own already does that."""
    return tuple(window is None or window >= spec.max_positions for window in spec.windows)


@contextmanager
def gate_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let the model call this attention inside the block; `answering` says who answers."""
    register(NAME, _attention)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def answering(gate_pass: GatePass) -> Iterator[None]:
    """Let `gate_pass` answer the attention calls of forward passes inside the block."""
    token = _active.set(gate_pass)
    try:
        yield
    finally:
        _active.reset(token)


_active: ContextVar[GatePass | None] = ContextVar("lserve_gate_pass", default=None)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Answer one layer: `[B, H, T, D]` in, `[B, T, Hq, Dv]` out."""
    gate_pass = _active.get()
    if gate_pass is None:
        raise RuntimeError(f"attention {NAME!r} was called outside of answering()")
    call = AttentionCall.of(module, query, key, value, **kwargs)
    return gate_pass.attend(call).transpose(1, 2), None


def _stream(call: AttentionCall, sink: int, recent: int) -> Tensor:
    mask = StreamingMask.build(call.query.shape[2], sink, recent, call.query.dtype, call.query.device)
    return streaming_attention(call.query, call.key, call.value, mask, scale=call.scale, softcap=call.softcap)


def _kv_heads(call: AttentionCall, index: Tensor) -> AttentionCall:
    """The call for some of its KV heads and their query heads."""
    query = call.query.unflatten(1, (call.key.shape[1], -1))[:, index].flatten(1, 2)
    return replace(call, query=query, key=call.key[:, index], value=call.value[:, index])
