"""Making the index of a cache again from its shards, without what is damaged."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

from lserve_tools.cache.database import delete_database
from lserve_tools.cache.geometry import CacheGeometry
from lserve_tools.cache.index import INDEX, Index
from lserve_tools.cache.lock import BuildLock
from lserve_tools.cache.manifest import MANIFEST, read_manifest, roots
from lserve_tools.cache.mend import open_mended
from lserve_tools.cache.shard import DAMAGED, ShardReader, writing
from lserve_tools.cache.verify import PREFIX, Advance, shard_files, verify
from lserve_tools.errors import CacheError, CorruptIndexError, CorruptShardError
from lserve_tools.schema import CacheVerification


def rebuild(folder: Path, advance: Advance) -> CacheVerification:
    """Verify a cache, then make its index again from its shards and drop what is damaged. Killed, it is done again.

    Args:
        advance: called with the number of bytes that were read.

    Raises:
        CacheError: if the manifest is damaged, a shard is of another cache, or the disk refuses.
    """
    manifest = read_manifest(folder)
    with BuildLock(folder), writing(folder):
        root_key, document_root = roots(manifest)
        _refuse_foreign(folder, root_key)
        found = verify(folder, advance)
        before = _paths(folder)
        for finding in found.damaged:
            if finding.file != INDEX:
                (folder / finding.file).with_suffix(DAMAGED).touch()
        delete_database(folder / INDEX)
        with closing(open_mended(folder, CacheGeometry(manifest), root_key, document_root)) as index:
            after = set(index.paths())
    found.rebuilt, found.documents = True, len(after)
    found.build_again = sorted((before | {d for f in found.damaged for d in f.documents}) - after - {PREFIX})
    return found


def _refuse_foreign(folder: Path, root_key: bytes) -> None:
    """Make sure that no shard is of another cache: the next build would delete it."""
    for path in shard_files(folder).values():
        with suppress(CorruptShardError), closing(ShardReader(path)) as shard:
            if shard.contents.root_key != root_key.hex():
                cure = f"Put the right {MANIFEST} back, or move that shard away."
                raise CacheError(f"{path} is of another cache than {MANIFEST} says.", cure=cure)


def _paths(folder: Path) -> set[str]:
    """Paths of all documents, as far as the index can tell."""
    try:
        with closing(Index(folder / INDEX)) as index:
            return set(index.paths())
    except CorruptIndexError:
        return set()
