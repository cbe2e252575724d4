"""Before a build: finish what a killed build left, and forget what is damaged so that it is built again."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from lserve_tools.cache.geometry import CacheGeometry
from lserve_tools.cache.index import PREFIX_PATH, Index
from lserve_tools.cache.keys import content_key
from lserve_tools.cache.records import ChunkRecord, StoredShard
from lserve_tools.cache.shard import DAMAGED, SUFFIX, TEMPORARY, ShardReader, frame_name
from lserve_tools.cache.store import INDEX, SHARDS, describes
from lserve_tools.errors import CacheError, CorruptShardError
from lserve_tools.schema import ShardChunk

logger = logging.getLogger(__name__)
_ID_BYTES = 4


def open_mended(folder: Path, geometry: CacheGeometry, root_key: bytes, document_root: bytes) -> Index:
    """The index of a cache that nobody else writes to, made to agree with its shards.

    Args:
        root_key: of the cache; shards of another one are deleted.
        document_root: key that documents follow.
    """
    shards = folder / SHARDS
    for stale in [*folder.glob(f"*{TEMPORARY}"), *shards.glob(f"*{TEMPORARY}")]:
        stale.unlink()
    index = _open(folder / INDEX)
    if not _sound(index, shards, root_key, document_root):
        logger.warning("%s is damaged; it is made again from the shards.", index.path)
        index.close()
        index = _remake(folder / INDEX)
    for path in sorted(shards.glob(f"[0-9]*-*{SUFFIX}")):
        if index.shard_sha256(path.name) is None:
            _adopt(index, path, root_key)
    for marker in shards.glob(f"*{DAMAGED}"):
        _verify(index, marker.with_suffix(SUFFIX), geometry)
        marker.unlink()
    index.drop_chunks([])
    return index


def read_ids(shard: ShardReader, number: int, chunk: ShardChunk) -> tuple[int, ...]:
    """Token ids of a chunk, from its own frame.

    Raises:
        CorruptShardError: if they are not those of its key.
    """
    name = frame_name(number, None)
    ids = tuple(np.frombuffer(shard.read(name, _ID_BYTES * chunk.num_tokens), dtype="<u4").tolist())
    if content_key(ids).hex() != chunk.content_key:
        raise CorruptShardError(shard.path, f"frame {name}", "its tokens have another key")
    return ids


def _open(path: Path) -> Index:
    try:
        return Index(path, writable=True)
    except CacheError as error:
        logger.warning("%s It is made again from the shards.", error.message)
        return _remake(path)


def _remake(path: Path) -> Index:
    for old in (path, path.with_name(path.name + "-journal")):
        old.unlink(missing_ok=True)
    return Index(path, writable=True)


def _sound(index: Index, shards: Path, root_key: bytes, document_root: bytes) -> bool:
    """Whether the index is readable and says what the shards say; shards that are gone or damaged are taken out."""
    try:
        index.check()
        for path in index.paths():
            index.document(path, document_root)
        index.document(PREFIX_PATH, root_key)
        for name, (sha256, _) in index.shards().items():
            try:
                shard = ShardReader(shards / Path(name).name, sha256)
            except CorruptShardError as error:
                # Of a wrong digest the index may be the cause: then the name has the right one, and the shard stays.
                index.drop_shard(name)
                logger.warning("%s What it held is built again.", error.message)
                continue
            sound = all(describes(shard, record) for record in index.chunks_of(name))
            complete = shard.complete
            shard.close()
            if not sound:
                return False
            if not complete:
                (shards / name).with_suffix(DAMAGED).touch()
    except CacheError:
        return False
    return True


def _adopt(index: Index, path: Path, root_key: bytes) -> None:
    """Enter a sealed shard that the index does not know; one that is damaged or of another cache is deleted."""
    try:
        shard = ShardReader(path)
    except CorruptShardError:
        path.unlink(missing_ok=True)
        return
    try:
        contents = shard.contents
        if contents.root_key != root_key.hex():
            raise CorruptShardError(path, "its header", "it is of another cache")
        ids = [read_ids(shard, number, chunk) for number, chunk in enumerate(contents.chunks)]
        layers = range(len(contents.retrieval_heads))
        sizes = [
            shard.size(frame_name(number, None)) + sum(shard.size(frame_name(number, layer)) for layer in layers)
            for number in range(len(contents.chunks))
        ]
        stored = StoredShard(path.name, shard.sha256, contents, ids, sizes, path.stat().st_size)
        index.enter(stored, {})
        if not shard.complete:
            path.with_suffix(DAMAGED).touch()
    except CorruptShardError:
        path.unlink()
    finally:
        shard.close()


def _verify(index: Index, path: Path, geometry: CacheGeometry) -> None:
    """Read every frame of a shard in which a reader met damage, and forget the chunks whose frames are damaged."""
    records = index.chunks_of(path.name)
    try:
        shard = ShardReader(path)
    except CorruptShardError:
        index.drop_chunks([record.prefix_key for record in records])
        return
    damaged = [record.prefix_key for record in records if not _readable(shard, record, geometry)]
    shard.close()
    for path_of_document in index.drop_chunks(damaged):
        logger.warning("%s: its stored KV is damaged; it is built again.", path_of_document)


def _readable(shard: ShardReader, record: ChunkRecord, geometry: CacheGeometry) -> bool:
    try:
        read_ids(shard, record.number, shard.contents.chunks[record.number])
        for layer in range(geometry.num_layers):
            layout = geometry.layout(layer, record.num_tokens, record.streaming_ranges)
            shard.read(frame_name(record.number, layer), layout.nbytes)
    except CorruptShardError:
        return False
    return True
