"""What results are held to: transformers' own attention, and the Λ mask written out as a matrix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface


@dataclass(frozen=True)
class Windows:
    """Heads of a model by kind, as the oracle takes them."""

    retrieval: Tensor
    sink: int
    recent: int


@dataclass(frozen=True)
class Greedy:
    """Greedy tokens and, for each, how far its logit lay above the second best."""

    token_ids: list[int]
    gaps: list[float]


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run `model` with another attention implementation inside the block."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def lambda_oracle(model: PreTrainedModel, windows: Windows) -> Iterator[None]:
    """Run `model` with the Λ mask of `windows` built as a full matrix for every head."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        group, length = query.shape[1] // key.shape[1], query.shape[2]
        position = torch.arange(length)
        behind = position[:, None] - position
        near = (position < windows.sink) | (behind < windows.recent)
        seen = (behind >= 0) & (windows.retrieval[module.layer_idx][:, None, None] | near)
        scores = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * scaling
        scores = scores.masked_fill(~seen.repeat_interleave(group, 0), float("-inf"))
        return (scores.softmax(-1) @ value.repeat_interleave(group, 1)).transpose(1, 2), None

    AttentionInterface.register("lambda_oracle", attention)
    AttentionMaskInterface.register("lambda_oracle", lambda *a, **k: None)
    with attention_of(model, "lambda_oracle"):
        yield


@torch.inference_mode()
def greedy(model: PreTrainedModel, token_ids: list[int], count: int) -> Greedy:
    """Continue `token_ids` by `count` tokens, recomputing everything at each."""
    ids, gaps = list(token_ids), []
    for _ in range(count):
        logits = model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
        best = logits.topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return Greedy(ids[len(token_ids) :], gaps)


def assert_same_tokens(found: list[int], wanted: Greedy, noise: float) -> None:
    """Tokens are equal up to the first place where the two best logits lie within `noise`."""
    for place, (a, b) in enumerate(zip(found, wanted.token_ids, strict=True)):
        if a != b:
            assert wanted.gaps[place] < noise, f"token {place} is {a}, not {b}; the gap is {wanted.gaps[place]}"
            return


def assert_matches(found: Tensor, exact: Tensor, eager: Tensor, factor: float = 2.0) -> None:
    """`found` is at most `factor` times as far from `exact` (fp64) as plain torch in the same dtype is."""
    allowed = factor * (eager.double() - exact).abs().max() + torch.finfo(eager.dtype).eps * exact.abs().max()
    error = (found.double() - exact).abs()
    worst = torch.unravel_index(error.argmax(), error.shape)
    assert error.max() <= allowed, f"error {error.max():.3g} > {allowed:.3g} at {[int(i) for i in worst]}"
