"""`lserve-tools run`: answer the questions of a JSONL file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lserve_tools.batch.reader import read_batch
from lserve_tools.batch.writer import check_output, default_output
from lserve_tools.cli.options import (
    CacheFolder,
    Device,
    DType,
    HeadsFolder,
    Json,
    KVCacheDType,
    KVMemory,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    ModelName,
    Overwrite,
    Quiet,
    ReuseInterval,
    Revision,
    Seed,
    TokenBudget,
    TrustRemoteCode,
    Verbose,
)
from lserve_tools.cli.output import Output
from lserve_tools.errors import UsageError

if TYPE_CHECKING:
    from lserve_tools.schema import RunSummary


def command(
    batch: Annotated[Path, typer.Argument(metavar="BATCH.JSONL", help="One question a line.")],
    cache: CacheFolder = Path(".lserve/cache"),
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Compute the KV of all documents here.")] = False,
    heads: HeadsFolder = None,
    model: ModelName = None,
    revision: Revision = None,
    dtype: DType = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Results, `-` for stdout; else BATCH.results.jsonl."),
    ] = None,
    result_format: Annotated[
        Literal["openai", "simple"], typer.Option("--format", help="Lines as OpenAI's batches have them, or flat.")
    ] = "openai",
    overwrite: Overwrite = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of an answer, at most.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, max=100, help="0 takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", min=1e-6, max=1, help="Mass of tokens drawn from.")] = 1.0,
    seed: Seed = 0,
    max_num_seqs: MaxNumSeqs = 64,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    max_model_len: MaxModelLen = None,
    kv_memory: KVMemory = None,
    kv_cache_dtype: KVCacheDType = "auto",
    token_budget: TokenBudget = None,
    reuse_interval: ReuseInterval = 4,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Answer every line of a batch file, reading documents from the cache.

    A line is an object: {"id": "1", "question": "…", "documents": ["a.md", "code/*.py"]}. Documents are named by path
    relative to the folder that build-cache read, or by glob; a line that names none reads all of them, and
    "documents": [] none. With --no-cache and no cache, paths are relative to the batch file's folder.
    Further keys: context (text of its own), system, answer (checked and counted), max_tokens, temperature, top_p, seed,
    stop.

    Bad lines become error lines of the output and the others are answered: exit code 1.
    """
    out = Output.start(as_json=as_json, quiet=quiet, verbose=verbose)
    if as_json and str(output) == "-":
        raise UsageError("--json and -o - both want stdout.", cure="Give one of them.")
    lines = read_batch(batch)
    destination = output or default_output(batch)
    check_output(destination, overwrite)
    from lserve_tools.batch.run import RunOptions, run_batch
    from lserve_tools.batch.setup import ModelChoice
    from lserve_tools.engine.llm import EngineOptions
    from lserve_tools.engine.sampling import SamplingParams

    options = RunOptions(
        folder=batch.parent,
        output=destination,
        cache=cache,
        use_cache=not no_cache,
        heads=heads,
        model=ModelChoice(model, revision, dtype, device, trust_remote_code),
        result_format=result_format,
        overwrite=overwrite,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p),
        engine=EngineOptions(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            kv_memory=kv_memory,
            kv_cache_dtype=kv_cache_dtype,
            token_budget=token_budget,
            reuse_interval=reuse_interval,
            seed=seed,
        ),
    )
    summary = run_batch(lines, options, out.talk)
    if as_json:
        out.result(summary, [])
    else:
        for line in _table(summary):
            out.talk(line)
    if summary.failed:
        raise typer.Exit(1)


def _table(summary: RunSummary) -> list[str]:
    """The summary in lines for people."""
    tokens = summary.tokens
    rows = [
        ("lines", f"{summary.lines}: {summary.answered} answered, {summary.failed} failed"),
        (
            "prompt tokens",
            f"{summary.prompt_tokens:,}: {tokens.exact:,} exact from cache, {tokens.computed:,} computed",
        ),
        (
            "answer tokens",
            f"{summary.completion_tokens:,} in {summary.seconds:.1f} s ({summary.tokens_per_second:.1f}/s)",
        ),
        ("peak memory", f"{summary.peak_rss_bytes / 1e6:,.0f} MB"),
        ("results", summary.output),
    ]
    if summary.answers_expected:
        rows.insert(
            1, ("answers right", f"{summary.answers_found} of {summary.answers_expected} hold what they should")
        )
    if summary.other_system:
        rows.insert(1, ("without cache", f"{summary.other_system} (another system text)"))
    if summary.warnings:
        rows.append(("warnings", str(len(summary.warnings))))
    return [f"{name:<14}{value}" for name, value in rows]
