"""Answering a batch file: read all of it, plan all of it, then load the model and write each answer as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil
from tqdm import tqdm

from lserve_tools.batch.plan import PlannedLine, Planner, answer_found
from lserve_tools.batch.reader import Batch
from lserve_tools.batch.setup import ModelChoice, open_setup
from lserve_tools.batch.writer import ResultFormat, ResultWriter
from lserve_tools.engine.llm import EngineOptions
from lserve_tools.engine.sampling import SamplingParams
from lserve_tools.engine.sequence import Completion, Request
from lserve_tools.errors import CapacityError, LServeError
from lserve_tools.schema import ReadingAccount, RunSummary, TokenAccount

Talk = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `run` is told.

    Args:
        folder: of the batch file; without a cache, documents are looked for in it.
        output: the file of results.
        cache: folder of the cache.
        use_cache: whether KV is taken from it.
        heads: a head profile, or None for the cache's.
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
    sampling: SamplingParams = field(default_factory=SamplingParams)
    engine: EngineOptions = field(default_factory=EngineOptions)


class Engine(Protocol):
    """What a run needs of `LLM`."""

    @property
    def warnings(self) -> list[str]: ...

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]: ...


def run_batch(batch: Batch, options: RunOptions, talk: Talk) -> RunSummary:
    """Answer every line of a batch.

    Args:
        talk: takes one line of what a user should know while it runs.

    Raises:
        UsageError: if nothing can be started with these options; nothing was written then.
    """
    output = options.output
    setup = open_setup(options.model, options.cache, options.heads, options.use_cache, folder=options.folder)
    cached = setup.source is not None
    planner = Planner(setup.library, setup.tokenizer, setup.prompt, options.sampling, cached=cached)
    planned = planner.plan(batch)
    summary = RunSummary(
        output=str(output),
        model=setup.model.name,
        cache=str(options.cache) if cached else None,
        lines=len(planned) + len(batch.bad),
    )
    started = time.perf_counter()
    engine = setup.load_engine(options.engine) if planned else None
    summary.load_seconds = time.perf_counter() - started
    form = options.result_format
    with ResultWriter(output, model=setup.model.name, result_format=form, overwrite=options.overwrite) as writer:
        answering = Answering(summary, writer, talk)
        answering.warn(planner.warnings)
        answering.fail_all(batch)
        if engine is not None:
            answering.answer(engine, planned)
    summary.peak_rss_bytes = peak_rss_bytes()
    return summary


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Answering:
    """One run's results on their way to file and summary."""

    def __init__(self, summary: RunSummary, writer: ResultWriter, talk: Talk) -> None:
        self._summary, self._writer, self._talk = summary, writer, talk

    def warn(self, warnings: Iterable[str]) -> None:
        """Say and keep each warning."""
        for warning in warnings:
            self._summary.warnings.append(warning)
            self._talk(f"Warning: {warning}")

    def fail_all(self, batch: Batch) -> None:
        """Write the lines that cannot be asked."""
        for bad in batch.bad:
            self._fail(bad.id, bad.code, bad.message)
        self._summary.bad_lines = len(batch.bad)

    def answer(self, engine: Engine, planned: list[PlannedLine]) -> None:
        """Ask all planned lines and write each answer as it comes."""
        lines = {p.line.id: p for p in planned}
        other = self._summary.other_system = sum(p.other_system for p in planned)
        if other:
            self.warn([f"lines with another system text than the cache's, computed without it: {other}."])
        told = len(engine.warnings)
        started = time.perf_counter()
        with tqdm(total=len(planned), unit="line", desc="run", disable=None, leave=False) as bar:
            for completion in engine.generate([p.request for p in planned]):
                self.warn(engine.warnings[told:])
                told = len(engine.warnings)
                self._take(lines[completion.id], completion)
                bar.update()
        self._summary.seconds = time.perf_counter() - started
        self._summary.tokens_per_second = self._summary.completion_tokens / max(self._summary.seconds, 1e-9)

    def _take(self, planned: PlannedLine, completion: Completion) -> None:
        if completion.error is not None:
            self._fail(completion.id, *_describe(planned, completion.error))
            return
        summary = self._summary
        tokens = TokenAccount(exact=completion.exact_tokens, computed=completion.computed_tokens)
        found = answer_found(planned.line, completion.text)
        account = ReadingAccount(
            documents=list(planned.documents), tokens=tokens, note=planned.note, answer_found=found
        )
        self._writer.write_answer(completion, account)
        summary.answered += 1
        summary.prompt_tokens += completion.prompt_tokens
        summary.completion_tokens += len(completion.token_ids)
        summary.tokens.exact += tokens.exact
        summary.tokens.computed += tokens.computed
        summary.answers_expected += found is not None
        summary.answers_found += bool(found)

    def _fail(self, line_id: str, code: str, message: str) -> None:
        self._writer.write_failure(line_id, code, message)
        self._summary.failed += 1
        self._talk(f"Error: {message}")


def _describe(planned: PlannedLine, error: LServeError) -> tuple[str, str]:
    """Code and message of a line that the engine refused."""
    if not isinstance(error, CapacityError):
        return "engine_error", f"{planned.place}: {error}"
    if planned.whole:
        what = f"the whole cache (documents: {len(planned.documents)}) {error.message}"
        return "context_too_long", f'{planned.place}: {what} Name some of them with "documents".'
    return "context_too_long", f"{planned.place}: the prompt {error}"
