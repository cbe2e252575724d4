"""Everything that touches disk or wire, as pydantic models; nothing else reads or writes JSON by hand."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# --- Batch -------------------------------------------------------------------------------------------------------

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


# --- Cache -------------------------------------------------------------------------------------------------------

CACHE_FORMAT_VERSION = 1


class Manifest(BaseModel):
    """`manifest.json` of a cache: all that its KV depends on, and how it is stored.

    Args:
        model: the model as it was named, to load it again; `revision` of it.
        model_fingerprint, tokenizer_fingerprint: digests of their files.
        dtype: in which KV was computed, such as `bfloat16`.
        weight_quantization: how weights are quantized, or None.
        rope: identity of the rotary embedding.
        codec: how KV is stored.
        system: the system text that was asked for; None is the chat template's own.
        prefix_text, prefix_ids: all before the first document, as text and as tokens.
        head_profile: id of the head profile, or None.
        head_mask: `[num_layers][num_kv_heads]`, True for a retrieval head; None if all are.
        sink, recent: windows of streaming heads, in tokens; 0 without them.
        streaming: what is stored of streaming heads: their windows, or every token.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    format_version: int = CACHE_FORMAT_VERSION
    model: str
    revision: str | None = None
    model_fingerprint: str
    tokenizer_fingerprint: str
    dtype: str
    weight_quantization: str | None = None
    rope: str
    num_layers: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    codec: str
    system: str | None = None
    prefix_text: str
    prefix_ids: tuple[int, ...]
    head_profile: str | None = None
    head_mask: tuple[tuple[bool, ...], ...] | None = None
    sink: int = Field(default=0, ge=0)
    recent: int = Field(default=0, ge=0)
    streaming: Literal["window", "full"] = "window"

    @model_validator(mode="after")
    def _mask_fits(self) -> Manifest:
        if self.head_mask is not None and [len(row) for row in self.head_mask] != [self.num_kv_heads] * self.num_layers:
            raise ValueError(f"head_mask must be {self.num_layers} × {self.num_kv_heads}")
        return self


class ShardChunk(BaseModel):
    """One chunk of a shard; its frames are `<chunk>/ids` and `<chunk>/<layer>/kv`, `<chunk>` being its place here.

    Args:
        prefix_key, content_key: in hex.
        position: of its first token when it was computed.
        rotated: keys are as attention saw them; else before RoPE.
        streaming_ranges: tokens that streaming heads kept, counted from the chunk's first, ascending.
        has_tail: streaming heads kept all that a token after this chunk can see of the document.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefix_key: str
    content_key: str
    num_tokens: int = Field(ge=1)
    position: int = Field(ge=0)
    rotated: bool
    streaming_ranges: tuple[tuple[int, int], ...]
    has_tail: bool


class ShardDocument(BaseModel):
    """A document that was completed in a shard; it holds no time, so that equal documents make equal shards.

    Args:
        path: relative to the folder that was built; empty for the prefix.
        sha256: of its text; `size` in bytes.
        chunks: prefix keys of its chunks in order, in hex; some may lie in earlier shards.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    sha256: str
    size: int
    chunks: tuple[str, ...]


class ShardContents(BaseModel):
    """What a shard holds, in its header under `lserve`: with the frames, all that the index knows of it.

    Args:
        root_key: of the cache, in hex.
        dtype, codec, head_dim: of its KV.
        retrieval_heads, streaming_heads: KV heads of each kind in each layer.
        layout: of a frame, in words.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int = CACHE_FORMAT_VERSION
    root_key: str
    codec: str
    dtype: str
    head_dim: int
    retrieval_heads: tuple[int, ...]
    streaming_heads: tuple[int, ...]
    layout: str
    chunks: tuple[ShardChunk, ...]
    documents: tuple[ShardDocument, ...]


class CacheStats(BaseModel):
    """Size of a cache.

    Args:
        chunks, stored_tokens: different chunks that documents and prefix are made of, and their tokens.
        tokens: of all documents.
        bytes: of all shards; `dead_bytes` of them belong to no document any more.
        bytes_per_token: bytes of living chunks per stored token.
        raw_bytes: what the stored tokens take in the model's dtype with all heads.
    """

    documents: int
    chunks: int
    tokens: int
    stored_tokens: int
    bytes: int
    dead_bytes: int
    bytes_per_token: float
    raw_bytes: int


# --- Head profile ------------------------------------------------------------------------------------------------


class StreamingWindows(BaseModel):
    """`config.json` of a head profile, in DuoAttention's words; that tool writes more keys, which are kept.

    Args:
        sink_size, recent_size: windows of streaming heads, in tokens.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    sink_size: int = Field(ge=0)
    recent_size: int = Field(ge=1)


class ProfileData(BaseModel):
    """What the gates were trained on: passkeys planted in a corpus.

    Args:
        corpus: as it was named, or `built-in`; `corpus_sha256` of its text.
        min_length, max_length: of prompts, in tokens.
        facts: planted in each prompt.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    corpus: str
    corpus_sha256: str
    min_length: int = Field(ge=1)
    max_length: int = Field(ge=1)
    facts: int = Field(ge=1)


class GateSettings(BaseModel):
    """All that the scores of a model depend on; a resumed run must have the same.

    Args:
        method: how scores are found; `gates` trains one gate per KV head.
        lr: largest learning rate; it rises from a tenth over the first fifth of the steps and falls over the last.
        reg: weight of the mean gate beside the distillation loss.
        sink, recent: windows of streaming heads, in tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model_fingerprint: str
    method: Literal["gates"] = "gates"
    data: ProfileData
    seed: int
    steps: int = Field(ge=1)
    lr: float = Field(gt=0)
    reg: float = Field(ge=0)
    sink: int = Field(ge=0)
    recent: int = Field(ge=1)


class LossPoint(BaseModel):
    """One step of training.

    Args:
        distillation: squared distance of the answer tokens' hidden states from the full model's, relative to the
            square of these.
        mean_gate: over all KV heads, before the step.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    distillation: float
    mean_gate: float


class QualityPoint(BaseModel):
    """How well answers are predicted with some heads streaming, on prompts that were not trained on.

    Args:
        sparsity: fraction of KV heads that stream.
        loss: cross-entropy per answer token, in nats.
        accuracy: fraction of answer tokens that are the likeliest.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sparsity: float
    loss: float
    accuracy: float


class ProfileRecord(BaseModel):
    """`profile.json` of a head profile: how it was made, what it costs, and which heads were chosen.

    Args:
        model: as it was named; `revision` of it.
        loss_curve: of the training.
        quality_curve: by rising sparsity, the first with none.
        chosen_by: `auto` is the largest sparsity whose loss is at most `tolerance` above that of none.
        mask: `[num_layers][num_kv_heads]`, True for a retrieval head.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    tool_version: str
    model: str
    revision: str | None = None
    settings: GateSettings
    loss_curve: tuple[LossPoint, ...] = ()
    quality_curve: tuple[QualityPoint, ...] = ()
    chosen_by: Literal["auto", "user"]
    tolerance: float
    sparsity: float = Field(ge=0, le=1)
    mask: tuple[tuple[bool, ...], ...]


class ProfileSummary(BaseModel):
    """What `profile-heads` found; its `--json` prints it.

    Args:
        heads: KV heads of the model; `streaming` of them stream.
        dense, chosen: quality with no head streaming, and with those.
        training_seconds, evaluation_seconds: of wall clock.
        files: that were written.
    """

    profile: str
    profile_id: str
    model: str
    heads: int
    streaming: int
    sparsity: float
    sink: int
    recent: int
    dense: QualityPoint
    chosen: QualityPoint
    training_seconds: float
    evaluation_seconds: float
    files: list[str]


# Bench -------------------------------------------------------------------------------------------------------------


class BenchContender(BaseModel):
    """One way of answering the questions; seconds, and bytes of resident memory at most.

    `seconds` is for the whole batch, `first_token_seconds` the median over single questions, `token_ids` the answers.
    """

    name: str
    seconds: float
    first_token_seconds: float
    peak_bytes: int | None
    token_ids: list[list[int]]


class BenchQa(BaseModel):
    """What `bench qa` measured; `contenders` are transformers in two ways, then this engine."""

    model: str
    dtype: str
    threads: int
    prompt_tokens: float
    questions: int
    contenders: list[BenchContender]
    build_seconds: float
    bytes_on_disk: int
    one_question_seconds: float
    sixteen_questions_seconds: float
