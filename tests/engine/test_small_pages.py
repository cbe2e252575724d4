"""Pages of 8 and 4 bits in the engine: close to dense, biased keys or not, and nothing is lost on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lserve_kernels import PageLayout, QuantizedPages, Written
from lserve_tools.engine.llm import LLM, EngineOptions, KVCacheDtype
from lserve_tools.models.rope import Rope
from tests.helpers.engine import Prompts, dense, loaded, tiny_model


def agreement(model: PreTrainedModel, rounds: int = 1, max_tokens: int = 8, **options: Any) -> float:
    """Share of greedy tokens that are dense attention's, up to the first difference in each answer."""
    prompts = Prompts()
    drawn = [request for _ in range(rounds) for request in prompts.mixed(max_tokens)]
    requests = [replace(request, id=str(i)) for i, request in enumerate(drawn)]
    settings = EngineOptions(kv_memory=1 << 24, **options)
    found = {c.id: list(c.token_ids) for c in LLM(loaded(model), options=settings).generate(requests)}
    same = 0
    for request in requests:
        wanted = dense(model, request).token_ids
        pairs = zip(found[request.id], wanted, strict=True)
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(wanted))
    return same / (max_tokens * len(requests))


def biased(scale: float) -> PreTrainedModel:
    """A model whose key projections have large biases, as Qwen2's have."""
    model = tiny_model("qwen2", use_sliding_window=False)
    for layer in model.model.layers:
        torch.manual_seed(5)
        layer.self_attn.k_proj.bias.copy_(scale * torch.randn(layer.self_attn.k_proj.bias.shape))
    return model


@pytest.mark.parametrize(
    ("dtype", "bias", "least"),
    [("auto", 20.0, 1.0), ("int8", 0.0, 0.95), ("int8", 20.0, 0.85), ("int4", 0.0, 0.7), ("int4", 20.0, 0.4)],
)
def test_small_pages_answer_nearly_as_dense(dtype: KVCacheDtype, bias: float, least: float) -> None:
    """First tokens; a large bias makes a random model's attention sharp, so it forgives less than without."""
    assert agreement(biased(bias), rounds=10, max_tokens=1, kv_cache_dtype=dtype) >= least


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["qwen2", "gpt_neox"])
def test_biased_keys_lose_no_more_than_others(family: str, bits: int) -> None:
    """With the rotation inside a page taken out a bias costs nothing; without, the bits go to its waves."""
    rope = Rope(tiny_model(family))
    keys = torch.randn(2, 192, 8)
    plain, large = (key_error(rope, keys + bias * torch.randn(8), bits, local=True) for bias in (0.0, 50.0))
    assert large <= 1.05 * plain
    assert key_error(rope, keys + 50 * torch.randn(8), bits, local=False) > 5 * plain


def key_error(rope: Rope, keys: Tensor, bits: int, *, local: bool) -> float:
    """Mean error of keys `[2, 192, 8]` rotated to 100 … 291, in pages with or without the rotation inside them."""
    layout = PageLayout(64, 8, torch.float32, bits=bits)
    offsets = rope.at(1, torch.arange(64)) if local else None
    closed = torch.full((3,), -1)
    pages = QuantizedPages.allocate(layout, offsets, 2, 3, 0, closed, torch.device("cpu"))
    standing = rope.at(1, torch.arange(100, 292))
    slots = list(range(192))
    pages.write(Written.plan(slots, layout, torch.device("cpu")), keys, torch.zeros_like(keys), standing)
    return float((pages.read(torch.arange(3))[0] - standing.rotate(keys)).abs().mean())


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
