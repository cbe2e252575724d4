"""Lines of a batch, their results, and the summaries of run and build-cache."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

BATCH_ALIASES = {"custom_id": "id", "prompt": "question", "input": "question", "document": "documents"}


class BatchLine(BaseModel):
    """One line of `run`'s input in its short form; `BATCH_ALIASES` name other spellings of its keys.

    Args:
        documents: names or globs; None is the whole cache, an empty list none at all.
        context: text given in the line itself, read after the documents.
        system: another system text than the cache's.
        answer: what a right answer holds, any one of them.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    id: str = Field(min_length=1)
    question: str
    documents: list[str] | None = None
    context: str | None = None
    system: str | None = None
    answer: list[str] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = None
    stop: list[str] | None = None


class TokenAccount(BaseModel):
    """Where the KV of a prompt's tokens came from; the four add up to the prompt.

    Args:
        exact: from the cache, at the place where it was computed.
        repaired: from the cache, moved, beside recomputed ones.
        recomputed: in the cache, but computed again.
        computed: not in the cache.
    """

    exact: int = 0
    repaired: int = 0
    recomputed: int = 0
    computed: int = 0


class ReadingAccount(BaseModel):
    """What one answer was read from, under `lserve` of a result.

    Args:
        documents: in the order of the prompt.
        note: what a reader of the answer should know.
        answer_found: whether the answer holds what the line expects; None if it expects nothing.
    """

    documents: list[str] = []
    tokens: TokenAccount = TokenAccount()
    note: str | None = None
    answer_found: bool | None = None


class PromptTokensDetails(BaseModel):
    """OpenAI's place for cache hits."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatMessage(BaseModel):
    """A message of a chat."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """The one choice of an answer."""

    index: Literal[0] = 0
    message: ChatMessage
    finish_reason: str


class ChatCompletion(BaseModel):
    """An answer as OpenAI's API gives it, with `lserve` added."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    lserve: ReadingAccount


class ResultResponse(BaseModel):
    """The response of an answered line."""

    status_code: Literal[200] = 200
    request_id: str
    body: ChatCompletion


class LineFailure(BaseModel):
    """Why a line has no answer."""

    code: str
    message: str


class ResultLine(BaseModel):
    """One line of `run`'s output as OpenAI's batches have it: either `response` or `error`."""

    id: str
    custom_id: str
    response: ResultResponse | None = None
    error: LineFailure | None = None


class SimpleResultLine(BaseModel):
    """One line of `run`'s output with `--format simple`: either `answer` or `error`."""

    id: str
    answer: str | None = None
    finish_reason: str | None = None
    completion_tokens: int = 0
    documents: list[str] = []
    tokens: TokenAccount = TokenAccount()
    note: str | None = None
    answer_found: bool | None = None
    error: LineFailure | None = None


class RunSummary(BaseModel):
    """What a run did; `run --json` prints it.

    Args:
        bad_lines: lines that could not be read as a request; they are among the failed ones.
        other_system: lines answered without the cache, since their system text is not the cache's.
        answers_expected, answers_found: lines with an `answer`, and how many of them got it.
        seconds: of answering, without loading the model.
        peak_rss_bytes: largest resident memory of the process.
    """

    output: str
    model: str
    cache: str | None
    lines: int
    answered: int = 0
    failed: int = 0
    bad_lines: int = 0
    other_system: int = 0
    answers_expected: int = 0
    answers_found: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens: TokenAccount = TokenAccount()
    load_seconds: float = 0.0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    peak_rss_bytes: int = 0
    warnings: list[str] = []


class LeftOut(BaseModel):
    """A file that is not in the cache, and why."""

    path: str
    reason: str


class BuildSummary(BaseModel):
    """What a build did; `build-cache --json` prints it.

    Args:
        documents: in the cache now.
        built, unchanged, pruned: of them, and what was dropped.
        chunks, tokens, bytes: of all documents in the cache; bytes are those of the shards.
        built_tokens, seconds, tokens_per_second: of what was computed now.
        ratio: bytes of this KV in the model's dtype, per byte on disk.
        skipped: files without text, and documents of no failure.
        failed: documents that should be in the cache and are not.
    """

    cache: str
    model: str
    codec: str
    head_profile: str | None = None
    dry_run: bool = False
    documents: int = 0
    built: int = 0
    unchanged: int = 0
    pruned: int = 0
    chunks: int = 0
    tokens: int = 0
    built_tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    bytes: int = 0
    bytes_per_token: float = 0.0
    ratio: float = 0.0
    estimated_bytes: int = 0
    estimated_seconds: float | None = None
    skipped: list[LeftOut] = []
    failed: list[LeftOut] = []
