"""Runs the model over a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lserve_tools.engine.memory import KVMemory
from lserve_tools.engine.selection import Selector
from lserve_tools.engine.step import Capture, Step
from lserve_tools.engine.work import Work
from lserve_tools.models.attention import active_step
from lserve_tools.models.load import LoadedModel


class Runner:
    """Turns work into logits.

    Args:
        loaded: the model, its attention implementation `lserve`.
        memory: the KV pages.
        selector: how decoding rows choose what they read; None lets them read everything.
    """

    def __init__(self, loaded: LoadedModel, memory: KVMemory, selector: Selector | None = None) -> None:
        self._loaded, self._memory, self._selector = loaded, memory, selector
        self._like = torch.empty(0, dtype=loaded.dtype, device=loaded.device)

    @torch.inference_mode()
    def run(self, work: list[Work], wanted: Sequence[Work] = (), capture: Capture | None = None) -> Tensor:
        """Compute `work` and return the logits `[len(wanted), V]` after the last tokens of `wanted`."""
        step = Step(work, self._memory, self._loaded.spec.group_size, self._like, self._selector, capture)
        last_rows = torch.tensor([item.row + item.length - 1 for item in wanted], dtype=torch.int64)
        with active_step(step):
            output = self._loaded.model(
                input_ids=step.token_ids[None],
                position_ids=step.positions[None],
                use_cache=False,
                logits_to_keep=last_rows.to(self._like.device),
            )
        for item in step.work:
            item.streaming.slide(item.end)
        logits: Tensor = output.logits[0]
        return logits
