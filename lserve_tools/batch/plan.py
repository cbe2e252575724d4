"""Turning the lines of a batch into prompts of token ids, before the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lserve_tools.batch.library import Library
from lserve_tools.batch.question import Question
from lserve_tools.batch.reader import Batch
from lserve_tools.batch.retrieve import Retriever
from lserve_tools.engine.sampling import SamplingParams
from lserve_tools.engine.sequence import Request
from lserve_tools.errors import CapacityError, DocumentError, ModelError, RetrievalError
from lserve_tools.text.prompts import PromptFormat, document_segment, raw_prompt_format, render_prompt_format
from lserve_tools.text.segments import Segment
from lserve_tools.text.tokenizer import Tokenizer

CONTEXT = "context"
_OVERRIDES = ("max_tokens", "temperature", "top_p", "seed")
_CODES = {
    DocumentError: "unknown_document",
    ModelError: "unsupported",
    CapacityError: "context_too_long",
    RetrievalError: "nothing_retrieved",
}


@dataclass(frozen=True, slots=True)
class PlannedLine:
    """A line that can be asked.

    Args:
        place: such as `batch.jsonl:17`.
        documents: what is read, in order.
        other_prefix: the prompt begins unlike the cache's (another system text, or no template): nothing fits it.
        note: what a reader of the answer should know.
    """

    place: str
    question: Question
    request: Request
    documents: tuple[str, ...]
    other_prefix: bool
    note: str | None


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a planner is told besides the lines.

    Args:
        sampling: for what a line leaves open.
        cached: whether KV of documents is reused.
        models: names by which a line may ask for the model; none takes any.
        max_model_len: longest prompt plus answer, in tokens.
    """

    sampling: SamplingParams
    cached: bool = False
    models: tuple[str, ...] = ()
    max_model_len: int = 2**31 - 1


class Planner:
    """Assembles prompts.

    Args:
        library: the documents that lines may name.
        prompt: the form of prompts whose line asks for no other.
        retriever: chooses among documents that do not fit together; without one they are an error.
    """

    def __init__(
        self,
        library: Library,
        tokenizer: Tokenizer,
        prompt: PromptFormat,
        options: PlanOptions,
        retriever: Retriever | None = None,
    ) -> None:
        self._library, self._tokenizer, self._options, self._retriever = library, tokenizer, options, retriever
        self._own = prompt
        self._raw = raw_prompt_format(tokenizer)
        self._formats: dict[str | None, PromptFormat] = {None: prompt, prompt.system: prompt}

    @property
    def warnings(self) -> list[str]:
        """What a user should know of all prompts."""
        if not any(f.system_in_user for f in self._formats.values()):
            return []
        return ["the model's chat template takes no system role: the system text stands before the documents instead."]

    def plan(self, batch: Batch) -> list[PlannedLine]:
        """Plan every good line; one that cannot be asked joins the bad ones."""
        planned: list[PlannedLine] = []
        for number, question in list(batch.lines.items()):
            try:
                planned.append(self._plan_line(batch.place(number), question))
            except (DocumentError, ModelError, CapacityError, RetrievalError) as error:
                batch.fail(number, _CODES[type(error)], str(error))
        batch.bad.sort(key=lambda bad: bad.number)
        return planned

    def _plan_line(self, place: str, question: Question) -> PlannedLine:
        self._check_model(question)
        prompt = self._raw if question.raw else self._format(question.system)
        sampling = self._sample(question)
        suffix = prompt.suffix_ids(question.text, question.earlier)
        documents = self._library.find(question.documents) if question.names_nothing or question.documents else []
        own = [document_segment(self._tokenizer, CONTEXT, question.context)] if question.context else []
        room = self._options.max_model_len - len(prompt.prefix_ids) - len(suffix) - sum(len(s.token_ids) for s in own)
        chosen = self._fit(question, documents, room, sampling.max_tokens)
        read = [*chosen, *own]
        segments = [s for s in (prompt.prefix_segment(), *read) if s.token_ids]
        fits = prompt.prefix_ids == self._own.prefix_ids
        return PlannedLine(
            place=place,
            question=question,
            request=Request(question.id, tuple(segments), suffix, sampling),
            documents=tuple(s.name for s in read),
            other_prefix=self._options.cached and bool(read) and not fits,
            note=self._note(fits, len(read), len(chosen), len(documents)),
        )

    def _check_model(self, question: Question) -> None:
        known = self._options.models
        if question.model is not None and known and question.model not in known:
            raise ModelError(
                f"the line asks for the model {question.model!r}, and this run's is {known[0]!r}.",
                cure="Leave body.model out, or name that one.",
            )

    def _fit(self, question: Question, documents: list[Segment], room: int, max_tokens: int) -> list[Segment]:
        """The documents, or those of them that are retrieved if all of them are too many.

        Args:
            room: tokens for documents and answer.
        """
        needed = sum(len(s.token_ids) for s in documents)
        if needed < room:  # an answer of one token at least
            return documents
        if self._retriever is not None and len(documents) > 1:
            return self._retriever.choose(question.text, documents, room - max_tokens)
        most = self._options.max_model_len
        what = f"the whole cache (documents: {len(documents)})" if question.names_nothing else "the prompt"
        cure = 'Name some of them with "documents", or let --retrieve bm25 choose them for each question.'
        if len(documents) < 2:
            cure = "Name a shorter document, or use a model of longer context."
        raise CapacityError(most - room + needed + 1, most, "context", who=what, cure=cure)

    def _format(self, system: str | None) -> PromptFormat:
        if system not in self._formats:
            self._formats[system] = render_prompt_format(self._tokenizer, system)
        return self._formats[system]

    def _sample(self, question: Question) -> SamplingParams:
        given = {name: getattr(question, name) for name in _OVERRIDES if getattr(question, name) is not None}
        own = self._options.sampling
        return replace(own, **given, stop=question.stop or own.stop)

    def _note(self, fits: bool, read: int, chosen: int, named: int) -> str | None:
        """What the answer's reader should know, from the numbers of documents read, chosen and named."""
        notes = []
        if chosen < named:
            notes.append(f"Of {named} documents, {chosen} were chosen by BM25, best first.")
        if self._options.cached and read and not fits:
            notes.append("The prompt does not begin as the cache's do: nothing of the cache is reused.")
        elif self._options.cached and read > 1:
            notes.append(f"Of {read} documents only the first is reused from the cache; those after it are computed.")
        return " ".join(notes) or None
