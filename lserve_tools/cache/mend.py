"""Before a build: finish what a killed build left, and forget what is damaged so that it is built again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from lserve_tools.cache.compact import compact
from lserve_tools.cache.database import delete_database
from lserve_tools.cache.geometry import CacheGeometry
from lserve_tools.cache.index import INDEX, PREFIX_PATH, Index
from lserve_tools.cache.records import StoredShard
from lserve_tools.cache.shard import DAMAGED, SHARDS, SUFFIX, TEMPORARY, ShardReader
from lserve_tools.cache.store import describes
from lserve_tools.errors import CorruptIndexError, CorruptShardError

logger = logging.getLogger(__name__)


def open_mended(folder: Path, geometry: CacheGeometry, root_key: bytes, document_root: bytes) -> Index:
    """The index of a cache whose lock is held, made to agree with its shards.

    Args:
        root_key: of the cache; shards of another one are deleted.
        document_root: key that documents follow.
    """
    shards = folder / SHARDS
    for stale in leftovers(folder):
        stale.unlink()
    index = _open(folder / INDEX)
    if not _sound(index, shards, root_key, document_root):
        logger.warning("%s is damaged; it is made again from the shards.", index.path)
        index.close()
        index = _remake(folder / INDEX)
    for path in sorted(shards.glob(f"[0-9]*-*{SUFFIX}")):
        if index.shard_sha256(path.name) is None:
            _adopt(index, path, root_key)
    for marker in sorted(shards.glob(f"*{DAMAGED}")):
        _verify(index, marker.with_suffix(SUFFIX), geometry)
        marker.unlink(missing_ok=True)
    index.drop_chunks([])
    return index


def leftovers(folder: Path) -> list[Path]:
    """Files that a killed build left half-written."""
    return sorted([*folder.glob(f"*{TEMPORARY}"), *(folder / SHARDS).glob(f"*{TEMPORARY}")])


def read_chunk(shard: ShardReader, number: int, geometry: CacheGeometry) -> tuple[int, ...]:
    """Read every frame of a chunk; gives its token ids.

    Raises:
        CorruptShardError: for the first frame that is damaged.
    """
    chunk = shard.contents.chunks[number]
    names = shard.chunk_frames(number)
    ids = shard.read_ids(number)
    for layer, name in enumerate(names[1:]):
        shard.read(name, geometry.layout(layer, chunk.num_tokens, chunk.streaming_ranges).nbytes)
    return ids


def stored_shard(shard: ShardReader, token_ids: Sequence[Sequence[int] | None]) -> StoredShard:
    """A shard as it is entered again; chunks without token ids are left out.

    Raises:
        CorruptShardError: if its header lacks a frame.
    """
    frames = [shard.chunk_frames(number) for number in range(len(shard.contents.chunks))]
    sizes = [sum(map(shard.size, names)) for names in frames]
    return StoredShard(shard.path.name, shard.sha256, shard.contents, token_ids, sizes, shard.path.stat().st_size)


def _open(path: Path) -> Index:
    try:
        return Index(path, writable=True)
    except CorruptIndexError as error:
        logger.warning("%s It is made again from the shards.", error.message)
        return _remake(path)


def _remake(path: Path) -> Index:
    delete_database(path)
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
                if index.drop_shard(name):
                    logger.warning("%s What it held must be built again.", error.message)
                continue
            sound = all(describes(shard, record) for record in index.chunks_of(name))
            complete = shard.complete
            shard.close()
            if not sound:
                return False
            if not complete:
                (shards / name).with_suffix(DAMAGED).touch()
    except CorruptIndexError:
        return False
    return True


def _adopt(index: Index, path: Path, root_key: bytes) -> None:
    """Enter a sealed shard that the index does not know; one without a header of this cache is deleted."""
    try:
        shard = ShardReader(path)
    except CorruptShardError:
        path.unlink(missing_ok=True)
        return
    try:
        if shard.contents.root_key != root_key.hex():
            raise CorruptShardError(path, "its header", "it is of another cache")
        ids = [_ids(shard, number) for number in range(len(shard.contents.chunks))]
        index.enter(stored_shard(shard, ids), {})
        if not shard.complete:
            path.with_suffix(DAMAGED).touch()
    except CorruptShardError:
        path.unlink()
    finally:
        shard.close()


def _ids(shard: ShardReader, number: int) -> tuple[int, ...] | None:
    try:
        return shard.read_ids(number)
    except CorruptShardError as error:
        logger.warning("%s Its document must be built again.", error.message)
        return None


def _verify(index: Index, path: Path, geometry: CacheGeometry) -> None:
    """Read every frame of a shard in which damage was met, and write it anew without what is damaged."""
    records = index.chunks_of(path.name)
    try:
        shard = ShardReader(path)
    except CorruptShardError:
        index.drop_chunks([record.prefix_key for record in records])
        return
    damaged, complete = set(), shard.complete
    for record in records:
        try:
            read_chunk(shard, record.number, geometry)
        except CorruptShardError:
            damaged.add(record.prefix_key)
    shard.close()
    for document in index.drop_chunks(damaged):
        logger.warning("%s: its stored KV is damaged; it must be built again.", document or "the prefix")
    if damaged or not complete:
        kept = [record for record in records if record.prefix_key not in damaged]
        compact(path.parent.parent, index, path.name, kept, anyway=True)
