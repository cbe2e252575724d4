"""Writing shards anew without what is not needed. Killed at any moment, nothing is lost and nothing comes back.

A copy has the number of its shard, so that numbers tell in which order documents were built. It is sealed and entered
before the old file is deleted, and the old file is deleted before the index forgets it: a shard that the index does not
know is entered by the next build.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lserve_tools.cache.index import Index, shard_number
from lserve_tools.cache.records import ChunkRecord, StoredShard
from lserve_tools.cache.shard import DAMAGED, SHARDS, ShardReader, ShardWriter, frame_name, sync_folder, writing
from lserve_tools.errors import CorruptShardError
from lserve_tools.schema import ShardDocument


def compact(folder: Path, index: Index, name: str, kept: Sequence[ChunkRecord], *, anyway: bool = False) -> None:
    """Write a shard anew with some of its chunks, and with those of its documents that the index takes from it.

    Args:
        folder: of the cache, whose lock is held.
        kept: what the index has of the shard; nothing is written for a shard of which nothing is kept.
        anyway: even if all of it is kept.

    Raises:
        CorruptShardError: if what is kept cannot be read; the shard stays as it is, for the next build to mend.
        CacheError: if the disk is full.
    """
    path = folder / SHARDS / name
    shard = ShardReader(path)
    try:
        documents = _documents(index, shard)
        if not anyway and len(kept) == len(shard.contents.chunks) and len(documents) == len(shard.contents.documents):
            return
        copy = _copy(folder / SHARDS, shard, kept, documents) if kept or documents else None
    except CorruptShardError:
        path.with_suffix(DAMAGED).touch()
        raise
    finally:
        shard.close()
    index.replace(name, copy)
    if copy is not None and copy.name == name:  # it has taken the old one's place already
        return
    with writing(folder):
        path.unlink()
        path.with_suffix(DAMAGED).unlink(missing_ok=True)
        sync_folder(path.parent)
    index.drop_shard(name)


def _documents(index: Index, shard: ShardReader) -> list[ShardDocument]:
    """The documents that the index takes from a shard; of one that was completed twice there, the later."""
    entered = index.documents_of(shard.path.name)
    return list({d.path: d for d in shard.contents.documents if d.path in entered}.values())


def _copy(
    folder: Path, shard: ShardReader, kept: Sequence[ChunkRecord], documents: Sequence[ShardDocument]
) -> StoredShard:
    """Copy some chunks of a shard to one of the same number, frames as they are."""
    chunks = [shard.contents.chunks[record.number] for record in kept]
    contents = shard.contents.model_copy(update={"chunks": tuple(chunks), "documents": tuple(documents)})
    ids, sizes = [], []
    with writing(folder):
        writer = ShardWriter(folder, shard_number(shard.path.name))
        try:
            for place, record in enumerate(kept):
                first = writer.num_bytes
                ids.append(shard.read_ids(record.number))
                for layer, name in enumerate(shard.chunk_frames(record.number), start=-1):
                    writer.add_frame(frame_name(place, None if layer < 0 else layer), shard.frame(name))
                sizes.append(writer.num_bytes - first)
            path, sha256 = writer.seal(contents)
        except BaseException:
            writer.discard()
            raise
        return StoredShard(path.name, sha256, contents, ids, sizes, path.stat().st_size)
