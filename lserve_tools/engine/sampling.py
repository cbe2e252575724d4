"""Choosing the next token: a function of the logits and of (seed, request, step) only, the same in every batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is answered.

    Args:
        max_tokens: tokens of the answer at most.
        temperature: 0 takes the likeliest token.
        top_p: smallest mass of likeliest tokens that is drawn from.
        seed: of this request; None takes the engine's.
        stop: strings that end the answer and are left out of it.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must lie in 0 … 100, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        if "" in self.stop:
            raise ValueError("stop must not hold an empty string")


def uniform(seed: int, request: str, step: int) -> float:
    """A number in [0, 1) that depends on its arguments alone."""
    digest = hashlib.blake2b(f"{seed}\0{request}\0{step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / float(1 << 53)


def sample(logits: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> list[int]:
    """Choose one token a row.

    Args:
        logits: `[B, V]`, any float dtype.
        params: of each row.
        draws: a uniform number for each row, used where the temperature is above 0.
    """
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    for row, (param, draw) in enumerate(zip(params, draws, strict=True)):
        if param.temperature > 0.0:
            chosen[row] = _draw(logits[row], param, draw)
    return chosen


def _draw(logits: Tensor, params: SamplingParams, draw: float) -> int:
    """Invert the cumulative distribution of the top-p tokens at `draw`; equal logits go by token id."""
    ranked, tokens = torch.sort(logits.double() / params.temperature, descending=True, stable=True)
    mass = torch.softmax(ranked, dim=0).cumsum(0)
    kept = int(torch.searchsorted(mass, params.top_p)) + 1
    mass = mass[: min(kept, len(mass))]
    index = int(torch.searchsorted(mass, draw * float(mass[-1]), right=True))
    return int(tokens[min(index, len(mass) - 1)])


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the first stop string begins in `text`, or None."""
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    return min(found) if found else None
