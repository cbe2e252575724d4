"""`lserve-tools profile-heads`: find the heads that retrieve."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lserve_tools.cli.options import (
    Device,
    DType,
    Json,
    ModelName,
    Overwrite,
    Quiet,
    Revision,
    Seed,
    Sparsity,
    TrustRemoteCode,
    Verbose,
)
from lserve_tools.cli.output import Output

if TYPE_CHECKING:
    from lserve_tools.schema import ProfileSummary


def command(
    model: ModelName = None,
    revision: Revision = None,
    dtype: DType = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    corpus: Annotated[
        Path | None,
        typer.Option("--corpus", metavar="PATH", help="File or folder of text to plant facts in; else built-in prose."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps, of one prompt each.")] = 16,
    lr: Annotated[
        float | None,
        typer.Option(
            "--lr", min=1e-6, max=1, help="Largest learning rate of the gates; else one that suits the steps."
        ),
    ] = None,
    reg: Annotated[float, typer.Option("--reg", min=0, help="Weight of the mean gate in the loss.")] = 0.02,
    sink: Annotated[int, typer.Option("--sink", min=0, help="First tokens that streaming heads see.")] = 64,
    recent: Annotated[int, typer.Option("--recent", min=1, help="Last tokens that streaming heads see.")] = 256,
    min_length: Annotated[int, typer.Option("--min-length", min=1, help="Tokens of the shortest prompt.")] = 640,
    max_length: Annotated[int, typer.Option("--max-length", min=1, help="Tokens of the longest prompt.")] = 1024,
    sparsity: Sparsity = "auto",  # type: ignore[assignment]  # typer parses defaults too
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="By how much auto may raise the loss per answer token, in nats.")
    ] = 0.02,
    seed: Seed = 0,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the profile.")] = Path(
        ".lserve/heads"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted training.")] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Find out which KV heads retrieve from far back, so that the others may forget all but the first and last tokens.

    Facts are planted in a text and asked for. One gate per KV head is trained to stay open only where streaming
    would change the answers; the weights are left as they are. The profile is used by the next build-cache.
    """
    out = Output.start(as_json=as_json, quiet=quiet, verbose=verbose)
    from lserve_tools.heads.report import heat_map, histogram
    from lserve_tools.heads.search import SearchOptions, find_heads
    from lserve_tools.models.load import load_model, resolve_model

    options = SearchOptions(
        output=output,
        corpus=corpus,
        steps=steps,
        lr=lr,
        reg=reg,
        sink=sink,
        recent=recent,
        min_length=min_length,
        max_length=max_length,
        sparsity=sparsity,
        tolerance=tolerance,
        seed=seed,
        resume=resume,
        overwrite=overwrite,
    )
    options.check()
    source = resolve_model(model, revision=revision)
    loaded = load_model(source, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    profile, summary = find_heads(loaded, options, out.talk)
    for line in heat_map(profile):
        out.talk(line)
    out.detail(f"scores in each tenth from 0 to 1: {histogram(profile.scores)}")
    if not any(file.endswith(".png") for file in summary.files):
        out.talk("No pictures were drawn, since matplotlib is not installed: pip install 'lserve-tools[plot]'")
    out.result(summary, _rows(summary))
    named = "" if output == Path(".lserve/heads") else f" --heads {output}"
    out.talk(f"Next: lserve-tools build-cache DOCS{named}")


def _rows(summary: ProfileSummary) -> Iterable[tuple[str, str]]:
    """The summary for people."""
    windows = f"sink {summary.sink}, recent {summary.recent}"
    yield "streaming", f"{summary.streaming} of {summary.heads} KV heads ({summary.sparsity:.0%}); {windows}"
    gates = f"{summary.low_gates} gates below 0.2, {summary.high_gates} above 0.8"
    yield "training", f"loss {summary.first_loss:.4f} to {summary.last_loss:.4f}; {gates}"
    losses = f"{summary.dense.loss:.3f} with none streaming, {summary.chosen.loss:.3f} with these"
    yield "answer loss", losses
    right = f"{summary.dense.accuracy:.0%} with none streaming, {summary.chosen.accuracy:.0%} with these"
    yield "tokens right", right
    yield "took", f"{summary.training_seconds:.0f} s of training, {summary.evaluation_seconds:.0f} s of measuring"
    yield "profile", summary.profile
