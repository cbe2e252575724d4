"""The stream of chunks that a build writes, cut into shards; the index learns of a shard when it is sealed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lserve_tools.cache.frames import LAYOUT
from lserve_tools.cache.geometry import CacheGeometry
from lserve_tools.cache.index import Index
from lserve_tools.cache.records import StoredShard
from lserve_tools.cache.shard import SUFFIX, ShardWriter, frame_name, writing
from lserve_tools.cache.windows import ChunkWindow
from lserve_tools.schema import ShardChunk, ShardContents, ShardDocument


class ShardStream:
    """Shards in the order in which they are written.

    Args:
        folder: of shards.
        index: of the cache.
        geometry: of its KV.
        root_key: of the cache.
        max_bytes: of a shard, unless one chunk alone is larger.
        seal_bytes: from which a shard ends with a document.
    """

    def __init__(
        self, folder: Path, index: Index, geometry: CacheGeometry, root_key: bytes, max_bytes: int, seal_bytes: int
    ) -> None:
        self._folder, self._index, self._geometry, self._root_key = folder, index, geometry, root_key
        self._max_bytes, self._seal_bytes = max_bytes, seal_bytes
        self._next = 1 + max((int(path.name.partition("-")[0]) for path in folder.glob(f"[0-9]*-*{SUFFIX}")), default=0)
        self._shard: ShardWriter | None = None
        self._open_chunk: ShardChunk | None = None
        self._clear()

    def stored(self, key: bytes, token_ids: Sequence[int]) -> ChunkWindow | None:
        """What streaming heads keep of a chunk that is stored already, here or in sealed shards."""
        for chunk, ids in zip(reversed(self._chunks), reversed(self._ids), strict=True):
            if chunk.prefix_key == key.hex() and tuple(ids) == tuple(token_ids):
                return ChunkWindow(chunk.streaming_ranges, chunk.has_tail)
        record = self._index.find(key, token_ids)
        return ChunkWindow(record.streaming_ranges, record.has_tail) if record else None

    def begin_chunk(self, chunk: ShardChunk, token_ids: Sequence[int], num_bytes: int) -> None:
        """Begin a chunk of `num_bytes` before compression."""
        if self._chunks and self._num_bytes + num_bytes > self._max_bytes:
            self.seal()
        self._open_chunk = chunk
        self._first = self._num_bytes
        self._ids.append(token_ids)
        self._add(frame_name(len(self._chunks), None), np.asarray(token_ids, dtype="<u4").tobytes())

    def add_layer(self, layer: int, frame: bytes) -> None:
        """Write a layer of the chunk."""
        self._add(frame_name(len(self._chunks), layer), frame)

    def end_chunk(self) -> None:
        """End the chunk, all layers of which are there."""
        if self._open_chunk is not None:
            self._chunks.append(self._open_chunk)
            self._sizes.append(self._num_bytes - self._first)
            self._open_chunk = None

    def drop_chunk(self) -> None:
        """Forget the chunk in hand."""
        if self._open_chunk is not None and self._shard is not None:
            with writing(self._folder):
                self._shard.cut(self._first)
            self._ids.pop()
            self._open_chunk = None

    def end_document(self, document: ShardDocument, mtime_ns: int) -> None:
        """Enter a document, all chunks of which are stored."""
        self._documents.append(document)
        self._mtimes[document.path] = mtime_ns
        if self._num_bytes >= self._seal_bytes:
            self.seal()

    def seal(self) -> None:
        """Put the shard in hand in its place, and enter it in the index."""
        if not self._chunks and not self._documents:
            return
        with writing(self._folder):
            if self._shard is None:  # documents all of whose chunks were there
                self._shard = ShardWriter(self._folder, self._next)
            contents = self._contents()
            path, sha256 = self._shard.seal(contents)
            stored = StoredShard(path.name, sha256, contents, self._ids, self._sizes, path.stat().st_size)
        self._index.enter(stored, self._mtimes)
        self._shard = None
        self._next += 1
        self._clear()

    def close(self) -> None:
        """Forget what is not sealed."""
        if self._shard is not None:
            self._shard.discard()

    @property
    def _num_bytes(self) -> int:
        return self._shard.num_bytes if self._shard else 0

    def _add(self, name: str, data: bytes) -> None:
        with writing(self._folder):
            if self._shard is None:
                self._shard = ShardWriter(self._folder, self._next)
            self._shard.add(name, data)

    def _clear(self) -> None:
        self._chunks: list[ShardChunk] = []
        self._ids: list[Sequence[int]] = []
        self._sizes: list[int] = []
        self._documents: list[ShardDocument] = []
        self._mtimes: dict[str, int] = {}
        self._first = 0

    def _contents(self) -> ShardContents:
        geometry = self._geometry
        return ShardContents(
            root_key=self._root_key.hex(),
            codec=geometry.codec.name,
            dtype=str(geometry.dtype).removeprefix("torch."),
            head_dim=geometry.head_dim,
            retrieval_heads=tuple(map(len, geometry.retrieval)),
            streaming_heads=tuple(map(len, geometry.streaming)),
            layout=LAYOUT,
            chunks=tuple(self._chunks),
            documents=tuple(self._documents),
        )
