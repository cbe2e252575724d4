"""How far an engine's next-token distributions are from another's, after the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lserve_tools.engine.llm import LLM
from lserve_tools.engine.sequence import Request
from lserve_tools.engine.sequence import Sequence as Running


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of next tokens.

    Args:
        tokens: that were compared.
        kl: mean Kullback-Leibler divergence from the reference, in nats.
        worst_kl: its largest value.
        top1: share of tokens whose likeliest one is the same.
    """

    tokens: int
    kl: float
    worst_kl: float
    top1: float


def answer_logits(
    llm: LLM, requests: Sequence[Request], answers: dict[str, Sequence[int]] | None = None
) -> dict[str, Tensor]:
    """Log-probabilities `[n, V]` (float32, CPU) of each request's next tokens.

    Args:
        answers: tokens to go along, by request id; None goes along the likeliest ones.
    """
    seen: dict[str, list[Tensor]] = {request.id: [] for request in requests}

    def choose(sequences: Sequence[Running], logits: Tensor) -> list[int]:
        chosen = logits.argmax(dim=-1).tolist()
        for row, sequence in enumerate(sequences):
            name, place = sequence.request.id, len(sequence.token_ids)
            seen[name].append(torch.log_softmax(logits[row].float(), dim=-1).cpu())
            if answers is not None:
                chosen[row] = answers[name][place]
        return chosen

    asked = list(requests)
    if answers is not None:
        asked = [replace(r, sampling=replace(r.sampling, max_tokens=len(answers[r.id]))) for r in requests]
    failed = [completion for completion in llm.generate(asked, choose) if completion.error is not None]
    if failed:
        raise failed[0].error or RuntimeError(failed[0].id)
    return {name: torch.stack(rows) for name, rows in seen.items()}


def compare(reference: dict[str, Tensor], other: dict[str, Tensor]) -> Agreement:
    """Agreement of `other` with `reference`, both as `answer_logits` gives them."""
    kl, same = [], []
    for name, expected in reference.items():
        found = other[name]
        kl.append((expected.exp() * (expected - found)).sum(-1))
        same.append(expected.argmax(-1) == found.argmax(-1))
    divergence, agreeing = torch.cat(kl), torch.cat(same)
    return Agreement(len(divergence), float(divergence.mean()), float(divergence.max()), float(agreeing.float().mean()))
