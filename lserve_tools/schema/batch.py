"""Lines of a batch, their results, and the summaries of run and build-cache."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

BATCH_ALIASES = {"custom_id": "id", "prompt": "question", "input": "question", "document": "documents"}


class BatchLine(BaseModel):
    """One line of `run`'s input in its short form; `BATCH_ALIASES` name other spellings of its keys.

    Args:
        id: of the line, read apart from the rest: a number is taken too.
        documents: names or globs; None is the whole cache, an empty list none at all.
        context: text given in the line itself, read after the documents.
        system: another system text than the cache's.
        answer: what a right answer holds, any one of them.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    id: str | None = None
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
        resume_key: digests of the run and of the prompt, by which a later run knows that this answer is its own.
    """

    documents: list[str] = []
    tokens: TokenAccount = TokenAccount()
    note: str | None = None
    answer_found: bool | None = None
    resume_key: str = ""


class LineFailure(BaseModel):
    """Why a line has no answer."""

    code: str
    message: str


class SimpleResultLine(BaseModel):
    """One line of `run`'s output with `--format simple`: either `answer` or `error`."""

    model_config = ConfigDict(extra="forbid")

    id: str
    answer: str | None = None
    finish_reason: str | None = None
    completion_tokens: int = 0
    documents: list[str] = []
    tokens: TokenAccount = TokenAccount()
    note: str | None = None
    answer_found: bool | None = None
    resume_key: str = ""
    error: LineFailure | None = None


class RunSummary(BaseModel):
    """What a run did, or a dry run would do; `run --json` prints it.

    Args:
        answered: in this run; `kept` ones were in the file already.
        bad_lines: lines that could not be read as a request; they are among the failed ones.
        unanswered: lines that an interruption left; the next run answers them.
        other_prefix: lines answered without the cache, since their prompts begin otherwise.
        answers_expected, answers_found: lines with an `answer`, and how many of them got it; kept ones count.
        prompt_tokens, completion_tokens, tokens: of lines answered in this run.
        longest_prompt: in tokens, with its answer; `kv_bytes` is what the KV of it takes in the model's dtype.
        checked: lines answered again by the full model without cache; `check_same` of them are equal, and
            `check_same_tokens` of `check_tokens` of their tokens are, up to each answer's first difference.
        seconds: of answering, without loading the model.
        peak_rss_bytes: largest resident memory of the process.
    """

    output: str
    model: str
    cache: str | None
    dry_run: bool = False
    interrupted: bool = False
    lines: int
    answered: int = 0
    kept: int = 0
    failed: int = 0
    bad_lines: int = 0
    unanswered: int = 0
    other_prefix: int = 0
    answers_expected: int = 0
    answers_found: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens: TokenAccount = TokenAccount()
    longest_prompt: int = 0
    kv_bytes: int = 0
    checked: int = 0
    check_same: int = 0
    check_tokens: int = 0
    check_same_tokens: int = 0
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
