"""Does a head profile choose well? Loss of answers under its mask, the inverted mask, and masks chosen at random.

Prints the loss with no head streaming, with the lower-scored half of the heads streaming, with the other half
streaming instead, and with 20 halves drawn from a seed. Leaves with 1 unless the profile's half has the lowest loss
of the 22.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lserve_tools.heads.corpus import load_corpus
from lserve_tools.heads.profile import HeadProfile, choose_retrieval
from lserve_tools.heads.quality import measure_quality
from lserve_tools.heads.synthetic import Prompt, PromptMaker
from lserve_tools.models.load import LoadedModel, load_model, resolve_model
from lserve_tools.text.prompts import render_prompt_format


def held_out_prompts(loaded: LoadedModel, profile: HeadProfile, count: int, length: int | None) -> list[Prompt]:
    """Prompts with names and text that the gates were not trained on.

    Args:
        length: of each in tokens; None takes lengths as in training.
    """
    if profile.record is None:
        sys.exit("error: the profile does not say what it was trained on. Make one with profile-heads.")
    data = profile.record.settings.data
    corpus = load_corpus(None if data.corpus == "built-in" else Path(data.corpus))
    lengths = (data.min_length, data.max_length) if length is None else (length, length)
    form = render_prompt_format(loaded.tokenizer)
    seed = profile.record.settings.seed + 1  # other prompts than those that chose the sparsity
    maker = PromptMaker(loaded.tokenizer, form, corpus, lengths=lengths, facts=data.facts, seed=seed, held_out=True)
    return [maker.make(number) for number in range(count)]


def masks(profile: HeadProfile, randoms: int) -> Iterator[tuple[str, Tensor]]:
    """All masks by name; in each but the first, half of the KV heads stream."""
    half = choose_retrieval(profile.scores, 0.5)
    yield "none streaming", torch.ones_like(half)
    yield "profile", half
    yield "inverted", ~half
    generator = torch.Generator().manual_seed(0)
    for number in range(1, randoms + 1):
        yield f"random {number}", choose_retrieval(torch.rand(half.shape, generator=generator), 0.5)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, nargs="?", default=Path(".lserve/heads"), help="folder of the profile")
    parser.add_argument("--model", help="else LSERVE_MODEL")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts to measure on")
    parser.add_argument("--length", type=int, help="tokens of a prompt; else as in training")
    parser.add_argument("--randoms", type=int, default=20, help="random masks to compare with")
    options = parser.parse_args()
    profile = HeadProfile.load(options.profile)
    loaded = load_model(resolve_model(options.model), device=options.device)
    if profile.model_fingerprint != loaded.fingerprint:
        sys.exit(f"error: {options.profile} was made for another model.")
    prompts = held_out_prompts(loaded, profile, options.prompts, options.length)
    tokens = sum(len(prompt.answers) for prompt in prompts)
    print(f"{len(prompts)} prompts, {tokens} answer tokens, sink {profile.sink}, recent {profile.recent}")
    losses: dict[str, float] = {}
    for name, retrieval in masks(profile, options.randoms):
        found = measure_quality(loaded, prompts, retrieval, sink=profile.sink, recent=profile.recent)
        losses[name] = found.loss
        print(f"{name:<15} loss {found.loss:.4f}  tokens right {found.accuracy:.1%}", flush=True)
    del losses["none streaming"]
    best = min(losses, key=lambda name: losses[name])
    if best != "profile":
        sys.exit(f"error: mask {best!r} has a lower loss than the profile's.")
    others = sorted(loss for name, loss in losses.items() if name != "profile")
    print(f"the profile's loss is {losses['profile']:.4f}; the next best of {len(others)} is {others[0]:.4f}")


if __name__ == "__main__":
    main()
