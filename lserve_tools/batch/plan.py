"""Turning the lines of a batch into prompts of token ids, before the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lserve_tools.batch.library import Library
from lserve_tools.batch.reader import Batch
from lserve_tools.engine.sampling import SamplingParams
from lserve_tools.engine.sequence import Request
from lserve_tools.errors import DocumentError
from lserve_tools.schema import BatchLine
from lserve_tools.text.prompts import PromptFormat, document_segment, render_prompt_format
from lserve_tools.text.segments import Segment
from lserve_tools.text.tokenizer import Tokenizer

CONTEXT = "context"


@dataclass(frozen=True, slots=True)
class PlannedLine:
    """A line that can be asked.

    Args:
        place: such as `batch.jsonl:17`.
        documents: what is read, in order.
        other_system: the line has another system text than the cache, so nothing of the cache fits it.
        whole: all documents are read because the line names none.
        note: what a reader of the answer should know.
    """

    place: str
    line: BatchLine
    request: Request
    documents: tuple[str, ...]
    other_system: bool
    whole: bool
    note: str | None


class Planner:
    """Assembles prompts.

    Args:
        library: the documents that lines may name.
        prompt: the form of prompts whose line asks for no other system text.
        sampling: for what a line leaves open.
        cached: whether KV of documents is reused.
    """

    def __init__(
        self, library: Library, tokenizer: Tokenizer, prompt: PromptFormat, sampling: SamplingParams, *, cached: bool
    ) -> None:
        self._library, self._tokenizer, self._sampling, self._cached = library, tokenizer, sampling, cached
        self._own = prompt
        self._formats: dict[str | None, PromptFormat] = {None: prompt, prompt.system: prompt}

    @property
    def warnings(self) -> list[str]:
        """What a user should know of all prompts."""
        if not any(f.system_in_user for f in self._formats.values()):
            return []
        return ["the model's chat template takes no system role: the system text stands before the documents instead."]

    def plan(self, batch: Batch) -> list[PlannedLine]:
        """Plan every good line; one that names an unknown document joins the bad ones."""
        planned: list[PlannedLine] = []
        for number, line in list(batch.lines.items()):
            try:
                planned.append(self._plan_line(f"{batch.name}:{number}", line))
            except DocumentError as error:
                batch.fail(number, "unknown_document", str(error))
        return planned

    def _plan_line(self, place: str, line: BatchLine) -> PlannedLine:
        whole = line.documents is None and line.context is None
        documents = self._library.find(line.documents) if whole or line.documents else []
        if line.context:
            documents = [*documents, document_segment(self._tokenizer, CONTEXT, line.context)]
        prompt = self._format(line.system)
        segments = [s for s in (prompt.prefix_segment(), *documents) if s.token_ids]
        return PlannedLine(
            place=place,
            line=line,
            request=Request(line.id, tuple(segments), prompt.suffix_ids(line.question), self._sample(line)),
            documents=tuple(s.name for s in documents),
            other_system=self._cached and prompt is not self._own,
            whole=whole and bool(documents),
            note=self._note(prompt, documents),
        )

    def _format(self, system: str | None) -> PromptFormat:
        if system not in self._formats:
            self._formats[system] = render_prompt_format(self._tokenizer, system)
        return self._formats[system]

    def _sample(self, line: BatchLine) -> SamplingParams:
        given = {
            name: getattr(line, name)
            for name in ("max_tokens", "temperature", "top_p", "seed")
            if getattr(line, name) is not None
        }
        return replace(self._sampling, **given, stop=tuple(line.stop or self._sampling.stop))

    def _note(self, prompt: PromptFormat, documents: list[Segment]) -> str | None:
        if not self._cached or not documents:
            return None
        if prompt is not self._own:
            return "The line's system text is not the cache's: nothing of the cache is reused."
        if len(documents) > 1:
            return (
                f"Of {len(documents)} documents only the first is reused from the cache; those after it are computed."
            )
        return None


def answer_found(line: BatchLine, text: str) -> bool | None:
    """Whether an answer holds one of those that the line expects, letter case aside; None if it expects none."""
    if line.answer is None:
        return None
    return any(expected.casefold() in text.casefold() for expected in line.answer)
