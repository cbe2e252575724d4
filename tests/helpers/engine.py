"""Tiny random models as the engine takes them, built in memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from lserve_tools.engine.sampling import SamplingParams
from lserve_tools.engine.sequence import Request
from lserve_tools.models import attention
from lserve_tools.models.load import LoadedModel, ModelSource
from lserve_tools.models.spec import ModelSpec
from lserve_tools.text.segments import Segment
from tests.helpers.oracles import Greedy, Windows, attention_of, greedy, lambda_oracle

VOCABULARY = 160
WINDOW = 70


class NumberTokenizer:
    """Writes token ids as numbers: all that the engine asks of a tokenizer."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, token_ids))


def tiny_model(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A random model of `family`: 4 layers, 6 query heads, 2 KV heads of width 8, no end token."""
    settings = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "sliding_window": WINDOW,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "initializer_range": 0.2,
    }
    if family == "gpt_neox":
        del settings["head_dim"], settings["num_key_value_heads"]
    attention.register()
    torch.manual_seed(1)
    config = CONFIG_MAPPING[family](**{**settings, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    model.eval().requires_grad_(False)
    return cast(PreTrainedModel, model)


def loaded(model: PreTrainedModel) -> LoadedModel:
    """`model` as `load_model` would return it."""
    return LoadedModel(
        model=model,
        tokenizer=NumberTokenizer(),  # type: ignore[arg-type]
        spec=ModelSpec.observe(model),
        source=ModelSource("tiny", Path()),
        fingerprint="tiny",
        tokenizer_fingerprint="numbers",
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


class Prompts:
    """Random prompts over two documents and a prefix."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.prefix = Segment.of("prefix", self.ids(7))
        self.short = Segment("short", self.ids(150), (100, 50))
        self.long = Segment("long", self.ids(333), (100, 64, 169))

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(3, VOCABULARY) for _ in range(count))

    def request(
        self, name: str, documents: tuple[Segment, ...], suffix: int, max_tokens: int = 12, **how: Any
    ) -> Request:
        params = SamplingParams(max_tokens=max_tokens, **how)
        return Request(name, (self.prefix, *documents), self.ids(suffix), params)

    def mixed(self, max_tokens: int = 12) -> list[Request]:
        """Ragged requests: no, one and two documents; suffixes of 1 … 130 tokens; contexts shared and not."""
        shapes: list[tuple[tuple[Segment, ...], int]] = [
            ((self.short,), 5),
            ((self.long,), 17),
            ((self.short,), 1),
            ((self.short, self.long), 64),
            ((), 65),
            ((self.long,), 130),
        ]
        return [self.request(f"r{i}", *shape, max_tokens) for i, shape in enumerate(shapes)]


def prompt_ids(request: Request) -> list[int]:
    """The whole prompt as one list."""
    return [t for s in request.segments for t in s.token_ids] + list(request.suffix_ids)


def dense(model: PreTrainedModel, request: Request) -> Greedy:
    """What transformers' eager attention answers, without a cache."""
    with attention_of(model, "eager"):
        return greedy(model, prompt_ids(request), request.sampling.max_tokens)


def streamed(model: PreTrainedModel, request: Request, windows: Windows) -> Greedy:
    """What the Λ mask written out answers."""
    with lambda_oracle(model, windows):
        return greedy(model, prompt_ids(request), request.sampling.max_tokens)
