"""What the engine must know of a model, observed by running it rather than read from its family's config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lserve_tools.errors import ModelError
from lserve_tools.models.attention import AttentionCall, active_step


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and limits of a decoder model.

    Args:
        windows: per layer, the tokens that its sliding window spans, or None for full attention.
        softcap: bound of attention scores, or None.
        max_positions: longest prompt plus answer, in tokens.
    """

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    windows: tuple[int | None, ...]
    softcap: float | None
    eos_token_ids: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_query_heads // self.num_kv_heads

    @classmethod
    def observe(cls, model: PreTrainedModel) -> ModelSpec:
        """Run one token through the model and read the spec off its attention calls.

        Raises:
            ModelError: if the model does not call the attention interface once per layer, or its layers differ in
                shape, or keys and values differ in width.
        """
        config = model.config.get_text_config()
        calls = observe_token(model, position=0)
        expected = int(config.num_hidden_layers)
        if sorted(calls) != list(range(expected)):
            raise ModelError(
                f"{config.model_type}: {len(calls)} of {expected} layers use transformers' attention interface;"
                " this engine runs models in which all do."
            )
        shapes = {(c.query.shape[0], c.key.shape[0], c.key.shape[-1], c.value.shape[-1]) for c in calls.values()}
        if len(shapes) > 1 or next(iter(shapes))[2] != next(iter(shapes))[3]:
            raise ModelError(
                f"{config.model_type}: layers of unequal head counts or widths {sorted(shapes)} cannot run."
            )
        first = calls[0]
        return cls(
            num_layers=expected,
            num_query_heads=first.query.shape[0],
            num_kv_heads=first.key.shape[0],
            head_dim=first.key.shape[-1],
            vocab_size=int(config.vocab_size),
            max_positions=max_positions(config),
            windows=tuple(calls[layer].window for layer in range(expected)),
            softcap=first.softcap,
            eos_token_ids=_eos_token_ids(model),
        )


def max_positions(config: Any) -> int:
    """Longest prompt plus answer, in tokens, that a decoder's config promises."""
    return int(getattr(config, "max_position_embeddings", 0) or 2**31 - 1)


def kv_numbers(config: Any) -> int:
    """Numbers that the KV of one token has in all layers, as a decoder's config has it."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * width)


@dataclass(slots=True)
class _Observer:
    """Answers attention for a single token (its own value) and keeps what each layer asked."""

    calls: dict[int, AttentionCall] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls[call.layer] = call
        return call.value.repeat_interleave(call.query.shape[0] // call.key.shape[0], dim=0).transpose(0, 1)


@torch.inference_mode()
def observe_token(model: PreTrainedModel, position: int) -> dict[int, AttentionCall]:
    """Run a single token at `position` and return each layer's attention call.

    A lone token attends to itself wherever it stands, so its hidden states are the same at every position and keys of
    two positions differ by their rotation alone.
    """
    observer = _Observer()
    with active_step(observer):
        ids = torch.tensor([[model.config.get_text_config().vocab_size // 2]], device=model.device)
        model(input_ids=ids, position_ids=torch.tensor([[position]], device=model.device), use_cache=False)
    return observer.calls


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    ids = generation.eos_token_id if generation is not None else None
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    if ids is None:
        return ()
    return (int(ids),) if isinstance(ids, int) else tuple(int(i) for i in ids)
