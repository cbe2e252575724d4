"""The engine as its users see it: requests in, completions out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lserve_kernels import PageLayout, use_triton
from lserve_tools.engine.contexts import ContextNode, ContextTree
from lserve_tools.engine.layers import StreamingWindows, split_heads, windows_of
from lserve_tools.engine.memory import KVMemory, default_budget
from lserve_tools.engine.runner import Runner
from lserve_tools.engine.sampling import find_stop, sample, uniform
from lserve_tools.engine.scheduler import Scheduler, node_work
from lserve_tools.engine.selection import LOGICAL_SIZE, Selector
from lserve_tools.engine.sequence import Completion, Request
from lserve_tools.engine.sequence import Sequence as Running
from lserve_tools.engine.source import ChunkSource
from lserve_tools.env import KERNELS
from lserve_tools.errors import CapacityError, LServeError, UsageError
from lserve_tools.heads.profile import HeadProfile
from lserve_tools.models.load import LoadedModel
from lserve_tools.models.rope import Rope
from lserve_tools.text.segments import Segment

KVCacheDtype = Literal["auto", "int8", "int4"]
_BITS: dict[KVCacheDtype, int | None] = {"auto": None, "int8": 8, "int4": 4}
ChunkCapture = Callable[[int, int, int, Tensor, Tensor], None]
TokenChooser = Callable[[Sequence[Running], Tensor], list[int]]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How much the engine does at a time.

    Args:
        max_num_seqs: sequences that are answered at a time.
        max_num_batched_tokens: tokens that one step computes.
        max_model_len: longest prompt plus answer, in tokens; None takes the model's.
        kv_memory: bytes for KV pages; None takes half of the memory that is free.
        kv_cache_dtype: numbers in pages: the model's dtype, or 8 or 4 bits of retrieval heads.
        page_size: tokens of a page.
        seed: of requests that bring none.
        token_budget: tokens that a retrieval head reads for each decoded one, in whole pages; None reads all.
        reuse_interval: decoded tokens that one choice of pages serves.
        logical_size: tokens whose keys share bounds, by which pages are chosen.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    kv_memory: int | None = None
    kv_cache_dtype: KVCacheDtype = "auto"
    page_size: int = 64
    seed: int = 0
    token_budget: int | None = None
    reuse_interval: int = 4
    logical_size: int = LOGICAL_SIZE

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "reuse_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.selector and self.selector.most < 2:
            raise ValueError(f"token_budget must hold two pages of {self.page_size} tokens, not {self.token_budget}")
        if self.selector and self.page_size % self.logical_size:
            raise ValueError(
                f"page_size must be a multiple of {self.logical_size} for a token_budget, not {self.page_size}"
            )

    @property
    def selector(self) -> Selector | None:
        """How pages are chosen, if they are."""
        if self.token_budget is None:
            return None
        return Selector(self.token_budget // self.page_size, self.reuse_interval)


class LLM:
    """Answers batches of requests, sharing what their prompts have in common.

    Args:
        loaded: the model.
        options: how much is done at a time.
        profile: which heads stream; None lets all of them retrieve.
        source: stored chunk KV; None computes everything.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        options: EngineOptions | None = None,
        profile: HeadProfile | None = None,
        source: ChunkSource[Any] | None = None,
    ) -> None:
        try:
            use_triton(torch.empty(0, device=loaded.device))
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"{error}.", cure=f"Unset {KERNELS.name}.") from None
        self._loaded = loaded
        self._stopped = False
        self._options = options or EngineOptions()
        spec = loaded.spec
        self.max_model_len = min(self._options.max_model_len or spec.max_positions, spec.max_positions)
        layers = split_heads(spec, profile, self.max_model_len, loaded.device)
        self.windows: StreamingWindows | None = windows_of(layers, profile, spec.num_kv_heads)
        selector = self._options.selector
        layout = PageLayout(
            self._options.page_size,
            spec.head_dim,
            loaded.dtype,
            _BITS[self._options.kv_cache_dtype],
            self._options.logical_size if selector else None,
        )
        budget = self._options.kv_memory or default_budget(loaded.device)
        sequences = self._options.max_num_seqs
        self.rope = Rope(loaded.model)
        self._memory = KVMemory(layers, self.windows, layout, budget, sequences, self.rope, loaded.device)
        self._tree = ContextTree(self._memory, source.root_key if source else b"")
        self._runner = Runner(loaded, self._memory, selector)
        self._scheduler = Scheduler(
            self._memory,
            self._tree,
            source,
            max_num_seqs=self._options.max_num_seqs,
            max_num_batched_tokens=self._options.max_num_batched_tokens,
        )

    @property
    def warnings(self) -> list[str]:
        """What went wrong without stopping a run, such as damaged chunks that were computed instead."""
        return self._scheduler.warnings

    @property
    def kv_tokens(self) -> int:
        """Tokens of which retrieval heads can hold KV at a time."""
        return self._memory.retrieval_pool.num_pages * self._options.page_size

    def generate(self, requests: Iterable[Request], choose: TokenChooser | None = None) -> Iterator[Completion]:
        """Answer `requests`, each as soon as it is done; one that cannot be answered gives an error completion.

        Args:
            choose: what the next tokens are, given sequences and logits `[B, V]`; None samples as the requests ask.
        """
        submitted = time.perf_counter()
        self._stopped = False
        sequences = []
        for request in requests:
            try:
                sequences.append(Running(request, self._room(request), submitted))
            except CapacityError as error:
                yield _failed(request, error)
        self._scheduler.add(sequences)
        while self._scheduler.waiting or self._scheduler.running:
            if self._stopped:
                self._scheduler.waiting.clear()
            for sequence, refusal in self._scheduler.admit():
                yield _failed(sequence.request, refusal)
            if self._scheduler.running:
                yield from self._step(choose or self._sample)

    def stop(self) -> None:
        """Let `generate` finish what it is answering and leave the rest; a signal handler may call this."""
        self._stopped = True

    def forget_contexts(self) -> None:
        """Drop all contexts from memory that no running sequence stands on."""
        self._tree.evict_unused()

    def prefill(self, segments: Sequence[Segment], capture: ChunkCapture) -> None:
        """Compute a context chunk by chunk and hand over what is new of it.

        Args:
            segments: the prefix first.
            capture: called with (index of the segment, index of the chunk, layer, keys `[Hkv, T, D]` after RoPE,
                values `[Hkv, T, D]`) for every chunk that was not in memory yet.

        Raises:
            CapacityError: if the context does not fit into memory.
        """
        path = self._scheduler.open_context(tuple(segments), ())
        if path is None:
            raise RuntimeError("prefill while sequences are running")
        try:
            indices = [i for i, segment in enumerate(segments) if segment.token_ids]
            for index, node in zip(indices, path, strict=True):
                self._fill(index, node, capture)
        finally:
            self._tree.release(path)

    def _fill(self, index: int, node: ContextNode, capture: ChunkCapture) -> None:
        while not node.filled:
            chunk = node.next_chunk()
            work = node_work(node, most=len(node.segment.token_ids))
            self._runner.run([work], capture=lambda layer, k, v, at=chunk: capture(index, at, layer, k, v))  # type: ignore[misc]
            node.num_filled += work.length

    def _room(self, request: Request) -> int:
        """Tokens that the answer may have: what was asked for, cut to what the model can still hold."""
        left = self.max_model_len - request.num_prompt_tokens
        if left < 1:
            raise CapacityError(
                request.num_prompt_tokens + 1, self.max_model_len, "context", cure="Name fewer or shorter documents."
            )
        return min(request.sampling.max_tokens, left)

    def _step(self, choose: TokenChooser) -> Iterator[Completion]:
        work = self._scheduler.next_work()
        answering = [
            (item, owner)
            for item, owner in work
            if isinstance(owner, Running) and item.first + item.length == len(owner.tail)
        ]
        logits = self._runner.run([item for item, _ in work], [item for item, _ in answering])
        for item, owner in work:
            owner.num_filled += item.length
        if answering:
            sequences = [owner for _, owner in answering]
            yield from self._advance(sequences, choose(sequences, logits))

    def _sample(self, sequences: Sequence[Running], logits: Tensor) -> list[int]:
        """The next token of each sequence, as its request asks."""
        params = [s.request.sampling for s in sequences]
        draws = [
            uniform(p.seed if p.seed is not None else self._options.seed, s.request.id, len(s.token_ids))
            for s, p in zip(sequences, params, strict=True)
        ]
        return sample(logits, params, draws)

    def _advance(self, sequences: Sequence[Running], tokens: Sequence[int]) -> Iterator[Completion]:
        """Give each sequence its next token and complete those that are done."""
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.add_token(token)
            completion = self._completed(sequence)
            if completion is not None:
                self._scheduler.finish(sequence)
                yield completion

    def _completed(self, sequence: Running) -> Completion | None:
        tokens = sequence.token_ids
        if tokens[-1] in self._loaded.spec.eos_token_ids:
            return sequence.complete(self._text(tokens[:-1]), tokens[:-1], "stop")
        stop = sequence.request.sampling.stop
        if stop:
            text = self._text(tokens)
            at = find_stop(text, stop)
            if at is not None:
                return sequence.complete(text[:at], tokens, "stop")
        if len(tokens) >= sequence.max_tokens:
            return sequence.complete(self._text(tokens), tokens, "length")
        return None

    def _text(self, tokens: list[int]) -> str:
        return str(self._loaded.tokenizer.decode(tokens, skip_special_tokens=True))


def _failed(request: Request, error: LServeError) -> Completion:
    return Completion(request.id, "", (), "error", request.num_prompt_tokens, error=error)
