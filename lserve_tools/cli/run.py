"""`lserve-tools run`: answer the questions of a JSONL file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lserve_tools.batch.question import Question
from lserve_tools.batch.reader import Batch, read_batch
from lserve_tools.batch.writer import STDOUT, check_output, default_output
from lserve_tools.cli.options import (
    CacheFolder,
    Device,
    DryRun,
    DType,
    HeadsFolder,
    Json,
    KVCacheDType,
    KVMemory,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    ModelName,
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
    from lserve_tools.batch.writer import ResultFormat
    from lserve_tools.schema import RunSummary


def command(
    batch: Annotated[
        Path | None,
        typer.Argument(metavar="[BATCH.JSONL]", help="One question a line; `-` reads stdin.", show_default=False),
    ] = None,
    question: Annotated[str | None, typer.Option("--question", help="One question instead of a file.")] = None,
    documents: Annotated[
        list[str] | None, typer.Option("--documents", metavar="NAME", help="What --question is about; may be repeated.")
    ] = None,
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
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin the results anew; else the answers there are kept.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Do nothing if any line is bad.")] = False,
    dry_run: DryRun = False,
    retrieve: Annotated[
        Literal["none", "bm25"], typer.Option("--retrieve", help="How to choose among documents that do not all fit.")
    ] = "none",
    check: Annotated[
        int,
        typer.Option("--check", metavar="N", min=0, help="Answer N random lines by the full model too, and compare."),
    ] = 0,
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
    stop. Lines of OpenAI's batches are taken too; they name documents under body.lserve.documents.

    Bad lines become error lines of the output and the others are answered: exit code 1. Interrupted in any way, the
    same command goes on where it was.
    """
    out = Output.start(as_json=as_json, quiet=quiet, verbose=verbose)
    lines, destination, form = _what(batch, question, documents, output, result_format, as_json)
    check_output(destination)
    from lserve_tools.batch.run import RunOptions, run_batch
    from lserve_tools.batch.setup import ModelChoice
    from lserve_tools.engine.llm import EngineOptions
    from lserve_tools.engine.sampling import SamplingParams

    options = RunOptions(
        folder=batch.parent if batch else Path(),
        output=destination,
        cache=cache,
        use_cache=not no_cache,
        heads=heads,
        model=ModelChoice(model, revision, dtype, device, trust_remote_code),
        result_format=form,
        overwrite=overwrite,
        strict=strict,
        retrieve=retrieve,
        check=check,
        dry_run=dry_run,
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
    summary = run_batch(lines, options, out.talk, out.detail)
    _tell(summary, out, alone=question is not None)


def _tell(summary: RunSummary, out: Output, *, alone: bool) -> None:
    """Say what was done, and leave with the code that stands for it."""
    if out.as_json and (summary.dry_run or not alone):
        out.result(summary, [])
    else:
        for name, value in _rows(summary, alone=alone):
            out.talk(f"{name:<14}{value}")
    if summary.interrupted:
        out.talk("Interrupted. The same command goes on where this one stopped.")
        raise typer.Exit(130)
    if summary.failed:
        raise typer.Exit(1)


def _what(
    batch: Path | None,
    question: str | None,
    documents: list[str] | None,
    output: Path | None,
    form: ResultFormat,
    as_json: bool,
) -> tuple[Batch, Path, ResultFormat]:
    """What is asked, and where and how results are written."""
    if (batch is None) == (question is None):
        raise UsageError("there must be either a batch file or --question.", cure="Give one of them.")
    if batch is not None:
        if documents:
            raise UsageError("--documents goes with --question.", cure='In a file, a line names its "documents".')
        destination = output or default_output(batch)
        if as_json and destination == STDOUT:
            raise UsageError("--json and results both want stdout.", cure="Name a file with -o, or leave --json out.")
        return read_batch(batch), destination, form
    asked = Question("1", question or "", documents=tuple(documents) if documents else None)
    if not asked.text.strip():
        raise UsageError("--question: the question is empty.")
    if output is None and form == "openai":
        form = "simple" if as_json else "text"
    return Batch("--question", {0: asked}, []), output or STDOUT, form


def _rows(summary: RunSummary, *, alone: bool) -> Iterable[tuple[str, str]]:
    """The summary for people; short if one question was asked `alone`."""
    from lserve_tools.text.numbers import show_bytes

    if alone and summary.failed:
        return
    if not alone:
        yield "lines", _lines(summary)
    if summary.answers_expected:
        yield "answers right", f"{summary.answers_found} of {summary.answers_expected} hold what they should"
    if summary.other_prefix:
        yield "without cache", f"{summary.other_prefix} (another system text, or no template)"
    tokens = summary.tokens
    if summary.prompt_tokens:
        sources = f"{tokens.exact:,} exact from cache, {tokens.computed:,} computed"
        yield "prompt tokens", f"{summary.prompt_tokens:,}: {sources}"
    if summary.dry_run:
        yield "longest", f"{summary.longest_prompt:,} tokens with its answer, {show_bytes(summary.kv_bytes)} of KV"
        return
    if summary.answered:
        speed = f"{summary.seconds:.1f} s ({summary.tokens_per_second:.1f}/s)"
        yield "answer tokens", f"{summary.completion_tokens:,} in {speed}"
    if summary.checked:
        share = summary.check_same_tokens / max(1, summary.check_tokens)
        same = f"{summary.check_same} of {summary.checked} answers equal"
        yield "full model", f"{same}, {share:.1%} of their tokens up to the first difference"
    yield "peak memory", f"{summary.peak_rss_bytes / 1e6:,.0f} MB"
    if summary.warnings:
        yield "warnings", str(len(summary.warnings))
    if summary.output != str(STDOUT):
        yield "results", summary.output


def _lines(summary: RunSummary) -> str:
    """How many lines came to what."""
    counts = [(summary.answered, "answered"), (summary.failed, "failed")]
    if summary.dry_run:
        counts = [(summary.lines - summary.failed, "to answer"), (summary.failed, "bad")]
    counts += [(n, what) for n, what in ((summary.kept, "answered before"), (summary.unanswered, "left")) if n]
    return f"{summary.lines}: {', '.join(f'{n} {what}' for n, what in counts)}"
