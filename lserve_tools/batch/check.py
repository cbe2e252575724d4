"""`--check N`: some lines answered once more by the full model, without cache, streaming heads or selection."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from lserve_tools.batch.plan import PlannedLine
from lserve_tools.engine.llm import LLM, EngineOptions
from lserve_tools.engine.sequence import Completion
from lserve_tools.models.load import LoadedModel
from lserve_tools.schema import RunSummary


def choose_checked(planned: Sequence[PlannedLine], count: int, seed: int) -> dict[str, PlannedLine]:
    """Random lines to check, by id."""
    chosen = random.Random(seed).sample(list(planned), min(count, len(planned)))
    return {p.question.id: p for p in chosen}


def check(
    loaded: LoadedModel,
    options: EngineOptions,
    checked: dict[str, PlannedLine],
    answers: Sequence[Completion],
    summary: RunSummary,
) -> None:
    """Answer `checked` lines densely and count what agrees with `answers`, into `summary`."""
    dense = LLM(loaded, options=replace(options, kv_cache_dtype="auto", token_budget=None))
    expected = {c.id: c for c in dense.generate([checked[answer.id].request for answer in answers])}
    for answer in answers:
        other = expected[answer.id]
        if answer.error is not None or other.error is not None:
            continue
        summary.checked += 1
        summary.check_same += answer.token_ids == other.token_ids
        summary.check_tokens += max(len(answer.token_ids), len(other.token_ids))
        summary.check_same_tokens += leading(answer.token_ids, other.token_ids)


def leading(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two answers share before they first differ."""
    pairs = list(zip(first, second, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
