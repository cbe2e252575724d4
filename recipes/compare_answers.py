"""Are the engine's answers those of transformers? Greedy tokens of prompts of very different lengths, side by side.

Prompts are cut from a text at lengths from 5 tokens on. transformers' `generate` answers them one by one; the engine
computes everything itself (no cache, no sparsity) and answers them one by one, then all together. Leaves with 1 if an
answer differs anywhere but at a token that was a tie: where the two likeliest logits lie closer than two of
transformers' own ways of computing attention do. Ties are printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lserve_tools.bench.essays import write_essays
from lserve_tools.engine.llm import LLM, EngineOptions
from lserve_tools.engine.sampling import SamplingParams
from lserve_tools.engine.sequence import Request
from lserve_tools.models.attention import NAME
from lserve_tools.models.load import LoadedModel, load_model, resolve_model
from lserve_tools.text.tokenizer import encode


@dataclass(frozen=True)
class Tie:
    """How near a step was to choosing another token.

    Args:
        gap: between the two likeliest logits.
        noise: twice the largest difference of a logit between SDPA and eager attention.
    """

    gap: float
    noise: float

    @property
    def excused(self) -> bool:
        """Whether either token would be right."""
        return self.gap <= self.noise


def cut_prompts(loaded: LoadedModel, corpus: Path, count: int, most: int) -> list[list[int]]:
    """Prompts of 5 … `most` tokens, each length the same ratio above the one before, from different places."""
    ids = encode(loaded.tokenizer, corpus.read_text(encoding="utf-8"), plain=True)
    if len(ids) < most + count:
        sys.exit(f"error: {corpus} holds {len(ids):,} tokens, and {most + count:,} are needed. Name a longer text.")
    lengths = [round(5 * (most / 5) ** (i / max(1, count - 1))) for i in range(count)]
    starts = [(i * 997) % (len(ids) - most) for i in range(count)]
    return [list(ids[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


@torch.inference_mode()
def generate(loaded: LoadedModel, prompt: Sequence[int], tokens: int) -> list[int]:
    """transformers' greedy answer."""
    ids = torch.tensor([list(prompt)], device=loaded.device)
    model: Any = loaded.model
    how = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    return list(output[0, len(prompt) :].tolist())


@torch.inference_mode()
def next_logits(loaded: LoadedModel, tokens: Sequence[int], attention: str) -> Tensor:
    """transformers' logits `[V]` after `tokens`."""
    loaded.model.set_attn_implementation(attention)
    ids = torch.tensor([list(tokens)], device=loaded.device)
    model: Any = loaded.model
    logits: Tensor = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    return logits.float()


def find_tie(loaded: LoadedModel, tokens: Sequence[int]) -> Tie:
    """How close the two likeliest tokens after `tokens` lie, and how far two ways of computing them."""
    sdpa, eager = (next_logits(loaded, tokens, attention) for attention in ("sdpa", "eager"))
    first, second = sdpa.topk(2).values.tolist()
    return Tie(first - second, 2 * float((sdpa - eager).abs().max()))


def engine_answers(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int, *, together: bool) -> list[list[int]]:
    """The engine's greedy answers."""
    how = SamplingParams(max_tokens=tokens)
    requests = [Request(str(i), (), tuple(prompt), how) for i, prompt in enumerate(prompts)]
    batches = [requests] if together else [[request] for request in requests]
    found = {completion.id: list(completion.token_ids) for batch in batches for completion in llm.generate(batch)}
    return [found[request.id] for request in requests]


def differences(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], expected: Sequence[list[int]], found: Sequence[list[int]]
) -> Iterator[tuple[int, int, Tie]]:
    """(prompt, step, tie) wherever an answer first differs."""
    for number, (prompt, wanted, got) in enumerate(zip(prompts, expected, found, strict=True)):
        if len(got) != len(wanted):
            sys.exit(f"error: prompt {number}: {len(got)} tokens, not {len(wanted)}")
        step = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b), None)
        if step is not None:
            yield number, step, find_tie(loaded, [*prompt, *wanted[:step]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; 1 if an answer differs without excuse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="text file that prompts are cut from; else installed essays")
    parser.add_argument("--model", help="else LSERVE_MODEL")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--longest", type=int, default=6000, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    options = parser.parse_args(arguments)
    loaded = without_end(load_model(resolve_model(options.model), device=options.device, dtype="float32"))
    with tempfile.TemporaryDirectory() as folder:
        corpus = options.corpus or write_essays(Path(folder))
        prompts = cut_prompts(loaded, corpus, options.prompts, options.longest)
    print(f"{len(prompts)} prompts of {', '.join(str(len(p)) for p in prompts)} tokens, answers of {options.tokens}")
    loaded.model.set_attn_implementation("sdpa")
    expected = [generate(loaded, prompt, options.tokens) for prompt in prompts]
    failed = 0
    for name, together in (("one by one", False), ("together", True)):
        loaded.model.set_attn_implementation(NAME)
        llm = LLM(loaded, options=EngineOptions())
        found = engine_answers(llm, prompts, options.tokens, together=together)
        differing = list(differences(loaded, prompts, expected, found))
        print(f"{name}: {len(prompts) - len(differing)} of {len(prompts)} answers equal")
        for number, step, tie in differing:
            verdict = "a tie" if tie.excused else "WRONG"
            at = f"prompt of {len(prompts[number])} tokens differs at token {step}"
            print(f"  {at}: {verdict}, gap of the two likeliest {tie.gap:.2e}, noise {tie.noise:.2e}")
            failed += not tie.excused
    return 1 if failed else 0


def without_end(loaded: LoadedModel) -> LoadedModel:
    """The model without tokens that end an answer, so that all answers are of one length."""
    return replace(loaded, spec=replace(loaded.spec, eos_token_ids=()))


if __name__ == "__main__":
    sys.exit(main())
