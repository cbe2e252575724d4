"""`lserve-tools build-cache`: read documents once and keep their KV on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lserve_tools.cli.options import (
    Device,
    DryRun,
    DType,
    HeadsFolder,
    Json,
    ModelName,
    Overwrite,
    Quiet,
    Revision,
    TrustRemoteCode,
    Verbose,
)
from lserve_tools.cli.output import Output
from lserve_tools.text.documents import find_documents

if TYPE_CHECKING:
    from lserve_tools.schema import BuildSummary


def command(
    docs: Annotated[Path, typer.Argument(metavar="DOCS", help="Folder of documents, or one file.")],
    model: ModelName = None,
    revision: Revision = None,
    dtype: DType = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    heads: HeadsFolder = None,
    codec: Annotated[
        Literal["exact", "int8"], typer.Option("--codec", help="How KV is stored; exact is the model's dtype.")
    ] = "int8",
    streaming_heads: Annotated[
        Literal["window", "full"],
        typer.Option("--streaming-heads", help="What streaming heads keep: their windows only, or every token."),
    ] = "window",
    system: Annotated[
        str | None, typer.Option("--system", help="System text of all prompts; else the model's.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the cache.")] = Path(
        ".lserve/cache"
    ),
    prune: Annotated[bool, typer.Option("--prune", help="Drop documents that are no longer there.")] = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Read every document below DOCS and keep its KV in a cache for `run`.

    Documents are UTF-8 text files: txt, md, code. Hidden files are left out; binary and empty ones are skipped and
    listed. A text file that cannot be decoded, or a document longer than the model's context, is listed too, the others
    are built, and the exit code is 1. A second build computes only what has changed.
    """
    out = Output.start(as_json=as_json, quiet=quiet, verbose=verbose)
    documents, errors = find_documents(docs, exclude=[output])
    from lserve_tools.batch.build import BuildOptions, build_cache
    from lserve_tools.batch.setup import ModelChoice

    options = BuildOptions(
        output=output,
        model=ModelChoice(model, revision, dtype, device, trust_remote_code),
        heads=heads,
        codec=codec,
        streaming_heads=streaming_heads,
        system=system,
        prune=prune,
        overwrite=overwrite,
        dry_run=dry_run,
    )
    summary = build_cache(documents, errors, options, out.talk)
    out.result(summary, _rows(summary))
    if summary.failed:
        raise typer.Exit(1)


def _rows(summary: BuildSummary) -> Iterable[tuple[str, str]]:
    """The summary for people."""
    from lserve_tools.batch.estimate import show_bytes, show_seconds

    done = f"{summary.built} built, {summary.unchanged} unchanged, {summary.pruned} dropped"
    if summary.dry_run:
        yield "documents", f"{summary.built} to build, {summary.unchanged} unchanged, {summary.pruned} to drop"
        return
    yield "documents", f"{summary.documents}: {done}"
    if summary.skipped or summary.failed:
        yield "left out", f"{len(summary.skipped)} skipped, {len(summary.failed)} failed"
    yield "tokens", f"{summary.tokens:,} in {summary.chunks:,} chunks"
    if summary.built:
        took = show_seconds(summary.seconds)
        yield "computed", f"{summary.built_tokens:,} tokens in {took} ({summary.tokens_per_second:,.0f}/s)"
    size = f"{show_bytes(summary.bytes)}, {summary.bytes_per_token:,.0f} bytes/token"
    yield "on disk", f"{size}, {summary.ratio:.2f} x smaller than in memory"
    yield "cache", summary.cache
