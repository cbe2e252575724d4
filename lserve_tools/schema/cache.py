"""Manifest and shards of a cache."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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

    @property
    def raw_bytes_per_token(self) -> int:
        """Bytes of a token's KV in the model's dtype with all heads."""
        bits = int("".join(c for c in self.dtype if c.isdigit()) or 0)
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bits // 8

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


class CachedDocument(BaseModel):
    """A document of a cache.

    Args:
        path: relative to the folder that was built.
        size: of its text, in bytes.
        bytes: of its chunks on disk; those that documents share count for each.
    """

    path: str
    size: int
    tokens: int
    chunks: int
    bytes: int


class CacheListing(BaseModel):
    """What `cache ls` prints."""

    cache: str
    documents: tuple[CachedDocument, ...]


class CacheReport(CacheStats):
    """What `cache stats` prints: sizes, and what the cache was built with; see `CacheStats` and `Manifest`.

    Args:
        kv_heads: of all layers; `streaming_heads` of them stream.
        index_bytes: of the index on disk.
        ratio: bytes that the stored tokens take in the model's dtype with all heads, to those on disk.
    """

    cache: str
    model: str
    revision: str | None
    dtype: str
    codec: str
    system: str | None
    prefix_tokens: int
    head_profile: str | None
    kv_heads: int
    streaming_heads: int
    sink: int
    recent: int
    streaming: Literal["window", "full"]
    shards: int
    index_bytes: int
    ratio: float


class CacheFinding(BaseModel):
    """One thing that is not as it should be.

    Args:
        file: of the cache; `place` in it, such as a frame.
        problem: what is wrong.
        documents: that cannot be read from the cache because of it.
        cure: what to do about it.
    """

    model_config = ConfigDict(frozen=True)

    file: str
    place: str | None = None
    problem: str
    documents: tuple[str, ...] = ()
    cure: str


class CacheVerification(BaseModel):
    """What `cache verify` found.

    Args:
        documents, chunks, shards: numbers of those that were checked; `bytes` that were read.
        damaged: what is damaged.
        notes: what is of no harm: left by a killed build, or needed by no document.
        rebuilt: the index was made again from the shards, and what was damaged is dropped.
        build_again: documents that were dropped with it.
    """

    cache: str
    documents: int = 0
    chunks: int = 0
    shards: int = 0
    bytes: int = 0
    damaged: list[CacheFinding] = []
    notes: list[CacheFinding] = []
    rebuilt: bool = False
    build_again: list[str] = []


class CachePruning(BaseModel):
    """What `cache prune` did, or would do.

    Args:
        dropped: paths of the documents.
        bytes_before, bytes_after: of the cache on disk; after a dry run it is at most that.
        documents: that are left.
    """

    cache: str
    dry_run: bool
    dropped: tuple[str, ...]
    documents: int
    bytes_before: int
    bytes_after: int
