"""Pages of 8 and 4 bits in the engine: close to dense, biased keys or not, and nothing is lost on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lserve_tools.engine.llm import LLM, EngineOptions, KVCacheDtype
from tests.helpers.engine import Prompts, dense, loaded, tiny_model


def agreement(model: PreTrainedModel, **options: Any) -> float:
    """Share of greedy tokens that are dense attention's, up to the first difference in each answer."""
    requests = Prompts().mixed(max_tokens=8)
    settings = EngineOptions(kv_memory=1 << 24, **options)
    found = {c.id: list(c.token_ids) for c in LLM(loaded(model), options=settings).generate(requests)}
    same = 0
    for request in requests:
        wanted = dense(model, request).token_ids
        pairs = zip(found[request.id], wanted, strict=True)
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(wanted))
    return same / sum(r.sampling.max_tokens for r in requests)


def biased(scale: float) -> PreTrainedModel:
    """A model whose key projections have large biases, as Qwen2's have."""
    model = tiny_model("qwen2", use_sliding_window=False)
    for layer in model.model.layers:
        torch.manual_seed(5)
        layer.self_attn.k_proj.bias.copy_(scale * torch.randn(layer.self_attn.k_proj.bias.shape))
    return model


@pytest.mark.parametrize(("dtype", "least"), [("auto", 1.0), ("int8", 0.9), ("int4", 0.4)])
@pytest.mark.parametrize("bias", [0.0, 20.0])
def test_small_pages_answer_nearly_as_dense(dtype: KVCacheDtype, least: float, bias: float) -> None:
    share = agreement(biased(bias), kv_cache_dtype=dtype)
    print(dtype, bias, share)
    assert share >= least


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("tokens", [2048, 100, 1])
def test_any_step_size_and_family(family: str, tokens: int) -> None:
    assert agreement(tiny_model(family), kv_cache_dtype="int8", max_num_batched_tokens=tokens) >= 0.85


def test_selection_reads_small_pages() -> None:
    assert agreement(tiny_model(), kv_cache_dtype="int8", token_budget=1024) >= 0.9
    assert 0 < agreement(tiny_model(), kv_cache_dtype="int8", token_budget=128) < 1


def test_open_pages_are_given_back() -> None:
    llm = LLM(loaded(tiny_model()), options=EngineOptions(kv_memory=1 << 24, kv_cache_dtype="int4", max_num_seqs=2))
    for _ in range(2):
        assert len(list(llm.generate(Prompts().mixed()))) == 6
    pool = llm._memory.open_pool
    assert (pool.num_pages, pool.num_free) == (2, 2)
