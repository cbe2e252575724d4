"""Answering a batch file: read all of it, plan all of it, then load the model and write each answer as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from lserve_tools.batch.answering import Answering, count_found
from lserve_tools.batch.check import check, choose_checked
from lserve_tools.batch.forecast import forecast
from lserve_tools.batch.plan import PlannedLine, Planner, PlanOptions
from lserve_tools.batch.reader import Batch
from lserve_tools.batch.resume import Finished, ResumeKeys, read_finished
from lserve_tools.batch.retrieve import Retriever
from lserve_tools.batch.setup import ModelChoice, Setup, open_setup
from lserve_tools.batch.writer import ResultFormat, ResultWriter
from lserve_tools.engine.llm import EngineOptions
from lserve_tools.engine.sampling import SamplingParams
from lserve_tools.errors import UsageError
from lserve_tools.schema import RunSummary

Talk = Callable[[str], None]
Retrieval = Literal["none", "bm25"]
_SHOWN = 5  # bad lines that --strict names


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `run` is told.

    Args:
        folder: of the batch file; without a cache, documents are looked for in it.
        output: the file of results.
        cache: folder of the cache.
        use_cache: whether KV is taken from it.
        heads: a head profile, or None for the cache's.
        overwrite: begin the file of results anew; else what it has of this run is kept.
        strict: refuse a batch with a line that cannot be asked.
        retrieve: what is done where documents do not fit into one prompt.
        check: lines that the full model answers once more.
        dry_run: plan all and answer nothing.
        sampling: for what a line leaves open.
    """

    folder: Path
    output: Path
    cache: Path
    use_cache: bool = True
    heads: Path | None = None
    model: ModelChoice = field(default_factory=ModelChoice)
    result_format: ResultFormat = "openai"
    overwrite: bool = False
    strict: bool = False
    retrieve: Retrieval = "none"
    check: int = 0
    dry_run: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)
    engine: EngineOptions = field(default_factory=EngineOptions)


def run_batch(batch: Batch, options: RunOptions, talk: Talk, detail: Talk = lambda _: None) -> RunSummary:
    """Answer every line of a batch.

    Args:
        talk: takes one line of what a user should know while it runs.
        detail: takes what only some want to know, such as prompts of a dry run.

    Raises:
        UsageError: if nothing can be started with these options; nothing was written then.
    """
    setup = open_setup(options.model, options.cache, options.heads, options.use_cache, folder=options.folder)
    planner = _planner(setup, options)
    planned = planner.plan(batch)
    warnings = planner.warnings
    if options.strict and batch.bad:
        raise _refusal(batch)
    summary = RunSummary(
        output=str(options.output),
        model=setup.model.name,
        cache=str(options.cache) if setup.source is not None else None,
        lines=len(planned) + len(batch.bad),
        other_prefix=sum(p.other_prefix for p in planned),
    )
    if summary.other_prefix:
        what = "lines that begin unlike the cache (another system text, or no template), computed without it"
        warnings = [*warnings, f"{what}: {summary.other_prefix}."]
    if options.dry_run:
        forecast(setup, batch, planned, warnings, summary, talk, detail)
        return summary
    return _run(batch, planned, warnings, setup, options, summary, talk, detail)


def _planner(setup: Setup, options: RunOptions) -> Planner:
    name, longest = setup.model.name, setup.choice.limits(setup.model).max_positions
    choice = PlanOptions(
        sampling=options.sampling,
        cached=setup.source is not None,
        models=tuple(dict.fromkeys([options.model.name or name, name, Path(name).name])),
        max_model_len=min(options.engine.max_model_len or longest, longest),
    )
    retriever = Retriever(setup.tokenizer) if options.retrieve == "bm25" else None
    return Planner(setup.library, setup.tokenizer, setup.prompt, choice, retriever)


def _run(
    batch: Batch,
    planned: list[PlannedLine],
    warnings: list[str],
    setup: Setup,
    options: RunOptions,
    summary: RunSummary,
    talk: Talk,
    detail: Talk,
) -> RunSummary:
    keys = ResumeKeys(setup, options.engine, options.sampling)
    finished = Finished({}, 0) if options.overwrite else _finished(batch, planned, keys, options, summary, talk)
    left = [p for p in planned if p.question.id not in finished.kept]
    started = time.perf_counter()
    loaded = setup.load() if left else None
    engine = setup.engine(loaded, options.engine) if loaded else None
    summary.load_seconds = time.perf_counter() - started
    if engine is not None:
        longest = max(p.request.num_prompt_tokens + p.request.sampling.max_tokens for p in left)
        detail(f"KV memory for {engine.kv_tokens:,} tokens; the longest prompt with its answer has {longest:,}.")
    old, form = [raw for raw, _ in finished.kept.values()], options.result_format
    with ResultWriter(options.output, model=setup.model.name, result_format=form, kept=old) as writer:
        answering = Answering(summary, writer, keys, talk)
        answering.warn(warnings)
        answering.fail_all(batch)
        if engine is not None and loaded is not None:
            checked = choose_checked(left, options.check, options.engine.seed)
            answers = answering.answer(engine, left, checked)
            del engine  # its pages make room for the full model's
            if checked and not summary.interrupted:
                check(loaded, options.engine, checked, answers, summary)
    summary.peak_rss_bytes = peak_rss_bytes()
    return summary


def _finished(
    batch: Batch, planned: list[PlannedLine], keys: ResumeKeys, options: RunOptions, summary: RunSummary, talk: Talk
) -> Finished:
    """What an earlier run has answered, counted."""
    known = {p.question.id for p in planned} | {bad.id for bad in batch.bad}
    finished = read_finished(options.output, planned, known, keys, options.result_format)
    summary.kept = len(finished.kept)
    for _, account in finished.kept.values():
        count_found(summary, account.answer_found)
    if finished.kept:
        talk(f"{options.output}: lines that are answered already and kept: {len(finished.kept)}.")
    if finished.outdated:
        talk(f"{options.output}: answers made anew, since line or documents have changed: {finished.outdated}.")
    return finished


def _refusal(batch: Batch) -> UsageError:
    shown = "; ".join(bad.message for bad in batch.bad[:_SHOWN])
    more = f"; and {len(batch.bad) - _SHOWN} more" if len(batch.bad) > _SHOWN else ""
    return UsageError(f"{len(batch.bad)} bad lines: {shown}{more}", cure="Mend them, or leave --strict out.")


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
