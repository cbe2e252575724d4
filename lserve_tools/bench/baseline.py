"""What users of transformers do: every question from the start, or a prefill a document and a copy a question."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lserve_tools.models.load import LoadedModel


@dataclass(slots=True)
class Timed:
    """Answers of one contender.

    Args:
        seconds: for all questions together.
        first_token: seconds to the first token, a question.
        token_ids: greedy answers, a question.
    """

    seconds: float = 0.0
    first_token: list[float] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)


class _Stopwatch:
    """A streamer that notes when the first generated token comes; the prompt is put first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


class Transformers:
    """transformers' own generation with SDPA attention on the weights that the engine uses."""

    def __init__(self, loaded: LoadedModel, num_tokens: int) -> None:
        self._model: Any = loaded.model
        self._device, self._num_tokens = loaded.device, num_tokens
        # An end token is one like any other, as for the engine here: answers have equal lengths and nothing is masked.
        self._model.generation_config.eos_token_id = None
        parameters = inspect.signature(type(self._model).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # renamed in transformers 5

    def each_from_the_start(self, contexts: Sequence[Sequence[int]], suffixes: Sequence[Sequence[int]]) -> Timed:
        """Answer each question by a prompt of its own."""
        timed, began = Timed(), time.perf_counter()
        for context, suffix in zip(contexts, suffixes, strict=True):
            self._answer(timed, [*context, *suffix])
        timed.seconds = time.perf_counter() - began
        return timed

    def one_prefill_a_document(self, contexts: Sequence[Sequence[int]], suffixes: Sequence[Sequence[int]]) -> Timed:
        """Prefill each context once and answer its questions on copies of its cache."""
        timed, began = Timed(), time.perf_counter()
        caches: dict[tuple[int, ...], Any] = {}
        for context, suffix in zip(contexts, suffixes, strict=True):
            key = tuple(context)
            if key not in caches:
                caches = {key: self._prefill(context)}  # one document's cache is held at a time
            self._answer(timed, [*context, *suffix], **{self._cache_name: copy.deepcopy(caches[key])})
        timed.seconds = time.perf_counter() - began
        return timed

    @torch.inference_mode()
    def _prefill(self, context: Sequence[int]) -> Any:
        ids = torch.tensor([list(context)], device=self._device)
        output = self._model(ids, use_cache=True, logits_to_keep=1)
        return getattr(output, self._cache_name)

    @torch.inference_mode()
    def _answer(self, timed: Timed, prompt: list[int], **cache: Any) -> None:
        stopwatch, began = _Stopwatch(), time.perf_counter()
        ids = torch.tensor([prompt], device=self._device)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=self._num_tokens,
            streamer=stopwatch,
            **cache,
        )
        timed.first_token.append(stopwatch.times[1] - began)
        timed.token_ids.append(output[0, len(prompt) :].tolist())
