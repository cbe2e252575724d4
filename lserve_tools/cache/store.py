"""Reading a cache: which documents it has, and the KV of their chunks."""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from lserve_tools.cache.frames import ChunkLayer, Room
from lserve_tools.cache.geometry import CacheGeometry
from lserve_tools.cache.index import INDEX, PREFIX_PATH, Index
from lserve_tools.cache.inventory import measure
from lserve_tools.cache.manifest import read_manifest, roots
from lserve_tools.cache.records import ChunkRecord, DocumentEntry
from lserve_tools.cache.shard import DAMAGED, SHARDS, ShardReader, frame_name
from lserve_tools.errors import CacheMismatchError, CorruptShardError
from lserve_tools.schema import CacheStats, Manifest

_AHEAD = 4  # layers that are read and decoded while one is used
_MAX_OPEN = 64  # shards
_SHOWN = 12  # characters of a fingerprint


class CacheStore:
    """An open cache. Several may read one folder while a build adds to it.

    Args:
        folder: of the cache.
        manifest: of it.
        index: of it.
        dtype: of decoded KV.
    """

    def __init__(self, folder: Path, manifest: Manifest, index: Index, dtype: torch.dtype | None) -> None:
        self.folder, self.manifest = folder, manifest
        self._index = index
        self._geometry = CacheGeometry(manifest)
        self._dtype = dtype or (self._geometry.dtype if self._geometry.codec.lossless else torch.float32)
        self.root_key, self.document_root = roots(manifest)  # the latter is what documents follow that stand first
        self._shards: OrderedDict[str, ShardReader] = OrderedDict()
        self._pool = ThreadPoolExecutor(min(_AHEAD, os.cpu_count() or 1), thread_name_prefix="shards")

    @classmethod
    def open(cls, folder: str | Path, *, dtype: torch.dtype | None = None) -> CacheStore:
        """Open the cache in a folder.

        Args:
            dtype: of decoded KV; None is the model's for a codec without loss, else float32.

        Raises:
            CacheError: if there is none, or it is damaged.
            CacheMismatchError: if it is of another format.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        return cls(folder, manifest, Index(folder / INDEX), dtype)

    def close(self) -> None:
        """Close all files."""
        self._pool.shutdown()
        self._index.close()
        while self._shards:
            self._shards.popitem()[1].close()

    def documents(self) -> list[DocumentEntry]:
        """All documents by path.

        Raises:
            CacheError: if the index is damaged.
        """
        found = (self.document(path) for path in self._index.paths())
        return [entry for entry in found if entry is not None]

    def document(self, path: str) -> DocumentEntry | None:
        """The document at `path`, or None. Its tokens are checked against the keys of its chunks."""
        return self._index.document(path, self.document_root) if path != PREFIX_PATH else None

    def find(self, prefix_key: bytes, token_ids: Sequence[int]) -> ChunkRecord | None:
        """The chunk with this key and these tokens, or None."""
        return self._index.find(prefix_key, token_ids)

    def variants(self, content_key: bytes) -> list[ChunkRecord]:
        """All chunks with these tokens, whatever they were computed after."""
        return self._index.variants(content_key)

    def load(self, record: ChunkRecord) -> Iterator[ChunkLayer]:
        """The layers of a chunk in order; each may be overwritten by the next.

        Raises:
            CorruptShardError: if bytes are not those that were written; the next build mends the shard.
        """
        try:
            yield from self._layers(self._current(record))
        except CorruptShardError:
            with suppress(OSError):  # a folder that cannot be written to
                (self.folder / SHARDS / record.shard).with_suffix(DAMAGED).touch()
            raise

    def check(self, *, model: str | None = None, **wanted: str | int | None) -> None:
        """Make sure that the cache fits, comparing fields of the manifest by name.

        Args:
            model: what the model of `model_fingerprint` is called; it is shown, not compared.
            wanted: fields of the manifest; `dtype` counts only for a codec without loss.

        Raises:
            CacheMismatchError: for the first field that has another value.
        """
        for field, value in wanted.items():
            cached = getattr(self.manifest, field)
            if cached == value or (field == "dtype" and not self._geometry.codec.lossless):
                continue
            before, now = ("none" if x is None else str(x) for x in (cached, value))
            if field.endswith("_fingerprint"):
                before, now = before[:_SHOWN], now[:_SHOWN]
            if field == "model_fingerprint":
                before, now = f"{self.manifest.model} ({before})", f"{model} ({now})" if model else now
            name = field.removesuffix("_fingerprint").replace("_", " ")
            cure = "Use what it was built with, or build another cache with `lserve-tools build-cache DOCS -o FOLDER`."
            raise CacheMismatchError(name, before, now, cure=cure)

    def stats(self) -> CacheStats:
        """Numbers and sizes."""
        return measure(self._index, self.manifest)

    def _current(self, record: ChunkRecord) -> ChunkRecord:
        """The same chunk where it lies now: a prune may have written its shard anew."""
        if record.shard in self._shards:
            return record
        now = self._index.find(record.prefix_key)
        return now if now and replace(record, shard=now.shard, number=now.number) == now else record

    def _layers(self, record: ChunkRecord) -> Iterator[ChunkLayer]:
        shard = self._shard(record)
        count = self._geometry.num_layers
        layouts = [self._geometry.layout(i, record.num_tokens, record.streaming_ranges) for i in range(count)]
        most = max(layout.nbytes for layout in layouts)
        # A desk is free again when the layer after its own is asked for.
        desks = [(np.empty(most, dtype=np.uint8), Room(self._dtype)) for _ in range(min(_AHEAD + 1, count))]

        def read(layer: int) -> ChunkLayer:
            buffer, room = desks[layer % len(desks)]
            frame = buffer[: layouts[layer].nbytes]
            shard.read_into(frame_name(record.number, layer), frame)
            return layouts[layer].decode(torch.from_numpy(frame), room)

        pending = deque(self._pool.submit(read, layer) for layer in range(min(_AHEAD, count)))
        try:
            for layer in range(_AHEAD, count + _AHEAD):
                if layer < count:
                    pending.append(self._pool.submit(read, layer))
                yield pending.popleft().result()
        finally:
            wait(pending)

    def _shard(self, record: ChunkRecord) -> ShardReader:
        """The open shard of a chunk, which must be as the index has it."""
        name = record.shard
        if name not in self._shards:
            sha256 = self._index.shard_sha256(name)
            if sha256 is None:
                raise CorruptShardError(self.folder / SHARDS / name, "the shard", "the index does not have it")
            self._shards[name] = ShardReader(self.folder / SHARDS / Path(name).name, sha256)
            if len(self._shards) > _MAX_OPEN:
                self._shards.popitem(last=False)  # it closes when nothing reads from it any more
        self._shards.move_to_end(name)
        shard = self._shards[name]
        if shard.contents.root_key != self.root_key.hex() or not describes(shard, record):
            raise CorruptShardError(shard.path, f"chunk {record.number}", "the index has it differently")
        return shard


def describes(shard: ShardReader, record: ChunkRecord) -> bool:
    """Whether a shard has a chunk as it stands in the index."""
    if not 0 <= record.number < len(shard.contents.chunks):
        return False
    chunk = shard.contents.chunks[record.number]
    return (
        bytes.fromhex(chunk.prefix_key) == record.prefix_key
        and bytes.fromhex(chunk.content_key) == record.content_key
        and (chunk.num_tokens, chunk.position) == (record.num_tokens, record.position)
        and (chunk.rotated, chunk.has_tail) == (record.rotated, record.has_tail)
        and chunk.streaming_ranges == record.streaming_ranges
    )
