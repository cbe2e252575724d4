"""Streaming heads see exactly their two windows, in prefill and decode, and hold no more memory than those."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lserve_tools.engine.llm import LLM, EngineOptions
from tests.helpers.engine import Prompts, dense, loaded, streamed, tiny_model
from tests.helpers.oracles import Windows, assert_same_tokens

NOISE = 1e-4
MEMORY = 1 << 25
MASK = torch.tensor([[True, False], [False, False], [True, True], [False, True]])


def engine(model: Any, windows: Windows, **options: Any) -> LLM:
    return LLM(loaded(model), options=EngineOptions(kv_memory=MEMORY, **options), profile=windows)  # type: ignore[arg-type]


@pytest.mark.parametrize(("sink", "recent"), [(0, 1), (4, 16), (16, 64), (10, 200), (300, 30)])
@pytest.mark.parametrize("chunk", [2048, 50])
def test_streaming_heads_equal_the_mask_written_out(sink: int, recent: int, chunk: int) -> None:
    model, requests, windows = tiny_model(), Prompts().mixed(), Windows(MASK, sink, recent)
    llm = engine(model, windows, max_num_batched_tokens=chunk, page_size=16)
    found = {c.id: c for c in llm.generate(requests)}
    for request in requests:
        assert_same_tokens(list(found[request.id].token_ids), streamed(model, request, windows), NOISE)


def test_the_mask_matters() -> None:
    model, requests = tiny_model(), Prompts().mixed()
    narrow = [streamed(model, r, Windows(MASK, 4, 16)).token_ids for r in requests]
    assert narrow != [dense(model, r).token_ids for r in requests]


@pytest.mark.parametrize("chunk", [2048, 300, 31, 1])
@pytest.mark.parametrize("windows", [(0, 700), (64, 700), (700, 1)])
def test_wide_windows_are_dense_at_any_chunk_size(windows: tuple[int, int], chunk: int) -> None:
    model, requests = tiny_model(), Prompts().mixed()[2:4]
    llm = engine(model, Windows(torch.zeros(4, 2, dtype=torch.bool), *windows), max_num_batched_tokens=chunk)
    found = {c.id: c for c in llm.generate(requests)}
    for request in requests:
        assert_same_tokens(list(found[request.id].token_ids), dense(model, request), NOISE)


def test_memory_of_streaming_heads_does_not_grow_with_the_prompt() -> None:
    model, prompts = tiny_model(), Prompts()
    windows = Windows(torch.zeros(4, 2, dtype=torch.bool), 16, 32)
    llm = engine(model, windows, page_size=16, max_num_batched_tokens=64)
    used: list[int] = []
    for documents in ((prompts.short,), (prompts.short, prompts.long)):
        list(llm.generate([prompts.request("a", documents, 20, max_tokens=100)]))
        pool = llm._memory.streaming_pool
        used.append(pool.num_pages - pool.num_free)
    per_owner = 2 + 3  # pages of the sink, and of a window that starts anywhere in a page
    assert used[0] <= 2 * per_owner
    assert used[1] <= 3 * per_owner
    llm._tree.evict(llm._memory.retrieval_pool.num_pages, pool.num_pages)
    assert pool.num_free == pool.num_pages


def test_long_answers_slide_their_own_window() -> None:
    model, prompts = tiny_model(), Prompts()
    windows = Windows(MASK, 4, 20)
    request = prompts.request("a", (prompts.short,), 9, max_tokens=90)
    (completion,) = engine(model, windows, page_size=16).generate([request])
    assert_same_tokens(list(completion.token_ids), streamed(model, request, windows), NOISE)
