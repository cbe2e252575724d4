"""Without streaming heads the engine gives transformers' own greedy tokens, however prompts are packed and cut."""

from __future__ import annotations

import pytest

from lserve_tools.engine.llm import LLM, EngineOptions
from lserve_tools.engine.sequence import Completion, Request
from tests.helpers.engine import Prompts, dense, loaded, tiny_model
from tests.helpers.oracles import assert_same_tokens
from tests.helpers.tiny import FAMILIES

NOISE = 1e-4  # logits of these models differ by less between differently shaped matrix products
MEMORY = 1 << 25


def answers(llm: LLM, requests: list[Request]) -> dict[str, Completion]:
    return {completion.id: completion for completion in llm.generate(requests)}


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batches_equal_transformers(family: str) -> None:
    model, requests = tiny_model(family), Prompts().mixed()
    wanted = {request.id: dense(model, request) for request in requests}
    for options in (
        EngineOptions(kv_memory=MEMORY),
        EngineOptions(kv_memory=MEMORY, max_num_batched_tokens=37, max_num_seqs=3, page_size=16),
    ):
        found = answers(LLM(loaded(model), options=options), requests)
        for request in requests:
            assert found[request.id].finish_reason == "length"
            assert_same_tokens(list(found[request.id].token_ids), wanted[request.id], NOISE)


def test_answers_are_varied_enough_to_tell_models_apart() -> None:
    tokens = [t for r in Prompts().mixed() for t in dense(tiny_model(), r).token_ids]
    assert len(set(tokens)) > len(tokens) // 4


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_one_by_one_is_the_same_as_together(family: str) -> None:
    model, requests = tiny_model(family), Prompts(3).mixed()
    together = answers(LLM(loaded(model), options=EngineOptions(kv_memory=MEMORY)), requests)
    alone = LLM(loaded(model), options=EngineOptions(kv_memory=MEMORY))
    for request in requests:
        wanted = dense(model, request)
        (completion,) = alone.generate([request])
        assert_same_tokens(list(completion.token_ids), wanted, NOISE)
        assert_same_tokens(list(together[request.id].token_ids), wanted, NOISE)


def test_sampled_answers_do_not_depend_on_the_batch() -> None:
    model, prompts = tiny_model(), Prompts(5)
    requests = [prompts.request(f"s{i}", (prompts.short,), 9, temperature=0.8, top_p=0.9) for i in range(5)]
    together = answers(LLM(loaded(model), options=EngineOptions(kv_memory=MEMORY, seed=7)), requests)
    one_by_one = LLM(loaded(model), options=EngineOptions(kv_memory=MEMORY, seed=7, max_num_seqs=1))
    other_seed = answers(LLM(loaded(model), options=EngineOptions(kv_memory=MEMORY, seed=8)), requests)
    for completion in one_by_one.generate(reversed(requests)):
        assert completion.token_ids == together[completion.id].token_ids
    assert any(other_seed[i].token_ids != together[i].token_ids for i in together)


def test_stop_strings_and_end_tokens_end_the_answer() -> None:
    model, prompts = tiny_model(), Prompts()
    request = prompts.request("a", (prompts.short,), 9, max_tokens=12)
    (free,) = LLM(loaded(model), options=EngineOptions(kv_memory=MEMORY)).generate([request])
    word = str(free.token_ids[5])
    stopped = prompts.request("a", (prompts.short,), 9, max_tokens=12, stop=(f" {word}",))
    stopped = Request("a", request.segments, request.suffix_ids, stopped.sampling)
    (completion,) = LLM(loaded(model), options=EngineOptions(kv_memory=MEMORY)).generate([stopped])
    first = free.token_ids.index(free.token_ids[5])
    assert completion.finish_reason == "stop"
    assert completion.text == " ".join(map(str, free.token_ids[: max(first, 1)]))
    model.generation_config.eos_token_id = [int(word)]
    (ended,) = LLM(loaded(model), options=EngineOptions(kv_memory=MEMORY)).generate([request])
    assert ended.finish_reason == "stop"
    assert ended.token_ids == free.token_ids[:first]
