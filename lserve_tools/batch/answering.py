"""Answers on their way from the engine to file and summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol

from tqdm import tqdm

from lserve_tools.batch.interrupt import finishing
from lserve_tools.batch.plan import PlannedLine
from lserve_tools.batch.reader import Batch
from lserve_tools.batch.writer import ResultWriter
from lserve_tools.engine.sequence import Completion, Request
from lserve_tools.errors import CapacityError
from lserve_tools.schema import ReadingAccount, RunSummary, TokenAccount

Talk = Callable[[str], None]


class Engine(Protocol):
    """What a run needs of `LLM`."""

    @property
    def warnings(self) -> list[str]: ...

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]: ...

    def stop(self) -> None: ...


class Keys(Protocol):
    """What tells an answer's maker; `ResumeKeys` is one."""

    def of(self, request: Request) -> str: ...


class Answering:
    """One run's results on their way to file and summary."""

    def __init__(self, summary: RunSummary, writer: ResultWriter, keys: Keys, talk: Talk) -> None:
        self._summary, self._writer, self._keys, self._talk = summary, writer, keys, talk

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

    def answer(self, engine: Engine, planned: list[PlannedLine], watched: Collection[str] = ()) -> list[Completion]:
        """Ask all planned lines and write each answer as it comes; a signal leaves those that have not begun.

        Args:
            watched: ids of lines whose completions are returned.
        """
        summary = self._summary
        lines = {p.question.id: p for p in planned}
        told = len(engine.warnings)
        seen: list[Completion] = []
        started = time.perf_counter()
        with (
            tqdm(total=len(planned), unit="line", desc="run", disable=None, leave=False) as bar,
            finishing(engine.stop, self._talk) as interrupted,
        ):
            for completion in engine.generate([p.request for p in planned]):
                self.warn(engine.warnings[told:])
                told = len(engine.warnings)
                self._take(lines.pop(completion.id), completion)
                if completion.id in watched:
                    seen.append(completion)
                bar.update()
            summary.interrupted = interrupted()
        summary.unanswered = len(lines)
        summary.seconds = time.perf_counter() - started
        summary.tokens_per_second = summary.completion_tokens / max(summary.seconds, 1e-9)
        return seen

    def _take(self, planned: PlannedLine, completion: Completion) -> None:
        if completion.error is not None:
            code = "context_too_long" if isinstance(completion.error, CapacityError) else "engine_error"
            self._fail(completion.id, code, f"{planned.place}: {completion.error}")
            return
        summary = self._summary
        tokens = TokenAccount(exact=completion.exact_tokens, computed=completion.computed_tokens)
        found = planned.question.answered_by(completion.text)
        account = ReadingAccount(
            documents=list(planned.documents),
            tokens=tokens,
            note=planned.note,
            answer_found=found,
            resume_key=self._keys.of(planned.request),
        )
        self._writer.write_answer(completion, account, raw=planned.question.raw)
        summary.answered += 1
        summary.prompt_tokens += completion.prompt_tokens
        summary.completion_tokens += len(completion.token_ids)
        summary.tokens.exact += tokens.exact
        summary.tokens.computed += tokens.computed
        count_found(summary, found)

    def _fail(self, line_id: str, code: str, message: str) -> None:
        self._writer.write_failure(line_id, code, message)
        self._summary.failed += 1
        self._talk(f"Error: {message}")


def count_found(summary: RunSummary, found: bool | None) -> None:
    """Count a line that expects an answer, and whether it got it."""
    summary.answers_expected += found is not None
    summary.answers_found += bool(found)
