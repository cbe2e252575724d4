"""Contexts are computed once and shared; what does not fit is refused with numbers, and nothing leaks."""

from __future__ import annotations

import pytest

from lserve_tools.engine.llm import LLM, EngineOptions
from lserve_tools.engine.step import Step
from lserve_tools.engine.work import Work
from lserve_tools.errors import CapacityError
from lserve_tools.text.segments import Segment
from tests.helpers.engine import Prompts, dense, loaded, tiny_model
from tests.helpers.oracles import assert_same_tokens


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Packed rows of every forward pass."""
    counted: list[int] = []
    build = Step.__init__

    def counting(self: Step, *args: object, **kwargs: object) -> None:
        build(self, *args, **kwargs)  # type: ignore[arg-type]
        counted.append(self.num_rows)

    monkeypatch.setattr(Step, "__init__", counting)
    return counted


def test_a_shared_context_is_computed_once(rows: list[int]) -> None:
    model, prompts = tiny_model(), Prompts()
    requests = [prompts.request(f"q{i}", (prompts.long,), 10 + i, max_tokens=1) for i in range(4)]
    llm = LLM(loaded(model), options=EngineOptions(kv_memory=1 << 24))
    list(llm.generate(requests))
    assert sum(rows) == 7 + 333 + sum(10 + i for i in range(4))
    rows.clear()
    list(llm.generate([prompts.request("later", (prompts.long,), 10, max_tokens=1)]))
    assert sum(rows) == 10


def test_rows_over_shared_pages_are_attended_in_one_run() -> None:
    model, prompts = tiny_model(), Prompts()
    llm = LLM(loaded(model), options=EngineOptions(kv_memory=1 << 24))
    seen: list[list[tuple[int, int]]] = []
    shared_runs = Step._shared_runs

    def watching(self: Step, work: list[Work]) -> object:
        runs = shared_runs(self, work)
        seen.append([(run.last_row - run.first_row, len(run.pages)) for run in runs])
        return runs

    Step._shared_runs = watching  # type: ignore[method-assign,assignment]
    try:
        list(llm.generate([prompts.request(f"q{i}", (prompts.long,), 5, max_tokens=4) for i in range(6)]))
    finally:
        Step._shared_runs = shared_runs  # type: ignore[method-assign]
    assert seen[-1] == [(6, 1), (6, 2 + 1 + 3)]  # prefix and document, each once for all six


def test_small_memory_answers_everything_in_turn() -> None:
    model, requests = tiny_model(), Prompts().mixed()
    page = 2 * 4 * 2 * 8 * 64 * 4  # K and V, layers, KV heads, width, tokens, bytes
    llm = LLM(loaded(model), options=EngineOptions(kv_memory=14 * page))
    found = {c.id: c for c in llm.generate(requests)}
    for request in requests:
        assert_same_tokens(list(found[request.id].token_ids), dense(model, request), 1e-4)
    llm._tree.evict(14, 0)
    assert llm._memory.retrieval_pool.num_free == 14


def test_what_never_fits_is_refused_with_both_numbers() -> None:
    model, prompts = tiny_model(), Prompts()
    page = 2 * 4 * 2 * 8 * 64 * 4
    llm = LLM(loaded(model), options=EngineOptions(kv_memory=5 * page))
    fits, too_long = prompts.request("fits", (prompts.short,), 5), prompts.request("long", (prompts.long,), 5)
    found = {c.id: c for c in llm.generate([too_long, fits])}
    assert found["fits"].finish_reason == "length"
    error = found["long"].error
    assert isinstance(error, CapacityError)
    assert (error.needed, error.available) == ((1 + 6 + 1) * 64, 5 * 64)


def test_a_prompt_beyond_the_model_is_refused_and_a_long_answer_is_cut() -> None:
    model, prompts = tiny_model(max_position_embeddings=400), Prompts()
    llm = LLM(loaded(model), options=EngineOptions(kv_memory=1 << 24))
    cut = prompts.request("cut", (prompts.long,), 50, max_tokens=100)
    over = prompts.request("over", (prompts.long, prompts.short), 5)
    found = {c.id: c for c in llm.generate([cut, over])}
    assert len(found["cut"].token_ids) == 400 - 7 - 333 - 50
    assert isinstance(found["over"].error, CapacityError)
    assert "496" in str(found["over"].error)


def test_prefill_hands_over_every_new_chunk_once() -> None:
    model, prompts = tiny_model(), Prompts()
    llm = LLM(loaded(model), options=EngineOptions(kv_memory=1 << 24))
    seen: list[tuple[int, int, int, int]] = []
    for documents in ((prompts.short,), (prompts.long,)):
        llm.prefill([prompts.prefix, *documents], lambda s, c, layer, k, v: seen.append((s, c, layer, k.shape[1])))
    layers = range(4)
    assert seen[:4] == [(0, 0, layer, 7) for layer in layers]
    assert seen[4:] == [
        (1, chunk, layer, length)
        for document in (prompts.short, prompts.long)
        for chunk, length in enumerate(document.chunks)
        for layer in layers
    ]


def test_a_prompt_without_any_segment_is_answered() -> None:
    model, prompts = tiny_model(), Prompts()
    request = prompts.request("bare", (), 5)
    bare = type(request)("bare", (Segment.of("prefix", ()),), request.suffix_ids, request.sampling)
    (completion,) = LLM(loaded(model), options=EngineOptions(kv_memory=1 << 24)).generate([bare])
    assert_same_tokens(list(completion.token_ids), dense(model, bare), 1e-4)
