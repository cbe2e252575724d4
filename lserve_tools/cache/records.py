"""What the index says of chunks, documents and shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lserve_tools.cache.windows import Ranges
from lserve_tools.schema import ShardContents


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A stored chunk.

    Args:
        prefix_key, content_key: see `cache.keys`.
        position: of its first token when it was computed.
        rotated: keys are as attention saw them at `position`; else before RoPE.
        streaming_ranges: tokens that streaming heads kept, counted from the chunk's first, ascending.
        has_tail: a later token may be computed right after this chunk: streaming heads kept all that it can see of
            the document, here and in the chunks before.
        shard: name of its file; `number` is its place in it.
    """

    prefix_key: bytes
    content_key: bytes
    num_tokens: int
    position: int
    rotated: bool
    streaming_ranges: Ranges
    has_tail: bool
    shard: str
    number: int


@dataclass(frozen=True, slots=True)
class DocumentEntry:
    """A document of the cache.

    Args:
        path: relative to the folder that was built.
        sha256: of its text; `size` in bytes.
        mtime_ns: of its file when it was built; 0 if that is not known.
        token_ids: all of its tokens; `chunks` are the lengths of its chunks.
    """

    path: str
    sha256: str
    size: int
    mtime_ns: int
    token_ids: tuple[int, ...]
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DocumentSize:
    """How large a document is.

    Args:
        shard: that it was completed in.
        size: of its text, in bytes.
        chunks, tokens: numbers of them.
        num_bytes: of its chunks on disk; those that documents share count for each.
    """

    path: str
    shard: str
    size: int
    chunks: int
    tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A sealed shard as it is entered.

    Args:
        token_ids: of each of its chunks; None for a damaged one, which is left out.
        chunk_bytes: on disk, of each of its chunks.
        num_bytes: of the file.
    """

    name: str
    sha256: str
    contents: ShardContents
    token_ids: Sequence[Sequence[int] | None]
    chunk_bytes: Sequence[int]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What `prune` did, or would do.

    Args:
        documents: paths that were dropped.
        before, after: bytes of the cache on disk; what would be left is told from above.
    """

    documents: tuple[str, ...]
    before: int
    after: int
