"""Is the choice of a head profile better than chance?

Half of the KV heads stream: those with the lowest scores, then the other half, then random halves. For each the loss per
answer token is measured on prompts that share neither names nor text with the training. Leaves with 1 unless the
profile's own half has the lowest loss of all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lserve_tools.errors import LServeError
from lserve_tools.heads.corpus import load_corpus
from lserve_tools.heads.profile import HeadProfile, choose_retrieval
from lserve_tools.heads.quality import measure_quality
from lserve_tools.heads.synthetic import PromptMaker
from lserve_tools.models.load import load_model, resolve_model
from lserve_tools.text.prompts import render_prompt_format


def masks(profile: HeadProfile, randoms: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Names and masks: none streaming, the profile's half, the other half, random halves."""
    own = choose_retrieval(profile.scores, 0.5)
    yield "none", torch.ones_like(own)
    yield "profile", own
    yield "inverted", ~own
    generator = torch.Generator().manual_seed(seed)
    for number in range(1, randoms + 1):
        yield f"random {number}", choose_retrieval(torch.rand(own.shape, generator=generator), 0.5)


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="else $LSERVE_MODEL")
    parser.add_argument("--heads", type=Path, default=Path(".lserve/heads"), help="the head profile")
    parser.add_argument("--corpus", type=Path, help="text to plant facts in; else built-in prose")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="of a prompt, in tokens")
    parser.add_argument("--facts", type=int, default=6, help="asked for in each prompt")
    parser.add_argument("--random", type=int, default=20, help="random halves")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and random halves")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


def compare(options: argparse.Namespace) -> bool:
    """Print the loss of every mask; tell whether the profile's is the lowest."""
    profile = HeadProfile.load(options.heads)
    loaded = load_model(resolve_model(options.model), dtype=options.dtype, device=options.device)
    maker = PromptMaker(
        loaded.tokenizer,
        render_prompt_format(loaded.tokenizer),
        load_corpus(options.corpus),
        lengths=(options.length, options.length),
        facts=options.facts,
        seed=options.seed,
        held_out=True,
    )
    prompts = [maker.make(number) for number in range(options.prompts)]
    answers = sum(len(prompt.answers) for prompt in prompts)
    print(f"{len(prompts)} held-out prompts of {options.length} tokens, {answers} answer tokens, {loaded.device}")
    print(f"half of {profile.scores.numel()} KV heads streaming: sink {profile.sink}, recent {profile.recent}")
    print(f"{'streaming':<10}  {'loss':>7}  {'right':>6}")
    losses = {}
    started = time.perf_counter()
    for name, retrieval in masks(profile, options.random, options.seed):
        point = measure_quality(loaded, prompts, retrieval, sink=profile.sink, recent=profile.recent)
        losses[name] = point.loss
        print(f"{name:<10}  {point.loss:7.4f}  {point.accuracy:6.1%}", flush=True)
    del losses["none"]
    own = losses.pop("profile")
    best = min(losses, key=lambda name: losses[name])
    print(f"profile {own:.4f}, the best of {len(losses)} others {losses[best]:.4f} ({best})", end=", ")
    print(f"{time.perf_counter() - started:.0f} s")
    return own < losses[best]


if __name__ == "__main__":
    try:
        lowest = compare(parse())
    except LServeError as error:
        sys.exit(f"error: {error}")
    sys.exit(0 if lowest else "error: another half is better than the profile's.")
