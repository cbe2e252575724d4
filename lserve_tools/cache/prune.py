"""Making a cache smaller: documents that are not wanted, and what no document needs, are taken out of it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path

from lserve_tools.cache.compact import compact
from lserve_tools.cache.index import INDEX, PREFIX_PATH, Index, shard_number
from lserve_tools.cache.lock import BuildLock
from lserve_tools.cache.manifest import MANIFEST, read_manifest, roots
from lserve_tools.cache.records import PruneReport
from lserve_tools.cache.shard import SHARDS, SUFFIX
from lserve_tools.errors import CacheError, UsageError
from lserve_tools.schema import CachePruning

logger = logging.getLogger(__name__)


def plan_prune(folder: Path, index: Index, gone: Collection[str] = (), max_bytes: int | None = None) -> PruneReport:
    """What a prune would do.

    Args:
        gone: paths of documents to drop.
        max_bytes: of the whole cache: so many more documents are dropped, those built first before the others.

    Raises:
        UsageError: if the cache cannot be so small.
    """
    left = _Left(index, folder)
    dropped = set(gone)
    before = cache_bytes(folder)
    for path in dropped:
        left.drop(path)
    ages = sorted(index.sizes(), key=lambda d: (shard_number(d.shard), d.path))
    for document in ages if max_bytes is not None else []:
        if max_bytes is None or left.num_bytes <= max_bytes:
            break
        if document.path != PREFIX_PATH and document.path not in dropped:
            left.drop(document.path)
            dropped.add(document.path)
    if max_bytes is not None and left.num_bytes > max_bytes:
        message = f"{folder} takes {left.num_bytes:,} bytes without any document, more than {max_bytes:,}."
        raise UsageError(message, cure="Give a larger --max-size.")
    return PruneReport(tuple(sorted(dropped)), before, min(before, left.num_bytes))


def prune(folder: Path, index: Index, gone: Sequence[str]) -> PruneReport:
    """Drop documents, and write every shard anew that holds what no document needs.

    Args:
        folder: of the cache, whose lock is held.
        index: of it, mended.
        gone: paths of the documents.

    Raises:
        CacheError: if a shard cannot be read or written; what was dropped until then stays dropped.
    """
    before = cache_bytes(folder)
    index.drop_documents(gone)  # first, so that no reader meets a document of which a part is gone
    living = index.living()
    kept = {name: [r for r in index.chunks_of(name) if r.prefix_key in living] for name in index.shards()}
    for name in sorted(kept, key=lambda name: (len(kept[name]), name)):  # those that only free room come first
        compact(folder, index, name, kept[name])
    try:
        index.shrink()
    except CacheError as error:
        logger.warning("%s The index keeps its size.", error.message)
    return PruneReport(tuple(gone), before, cache_bytes(folder))


def prune_folder(
    folder: Path, choose: Callable[[Sequence[str]], list[str]], max_bytes: int | None, *, dry_run: bool
) -> CachePruning:
    """Prune the cache in a folder; see `plan_prune`.

    Args:
        choose: gives those of all documents that are to be dropped.
        dry_run: tell what would be done, and do nothing.

    Raises:
        CacheError: if there is no cache, or it is damaged, or a build is at work.
    """
    manifest = read_manifest(folder)
    if dry_run:
        with closing(Index(folder / INDEX)) as index:
            paths = index.paths()
            done = plan_prune(folder, index, choose(paths), max_bytes)
    else:
        from lserve_tools.cache.geometry import CacheGeometry  # these import torch, which a dry run does without
        from lserve_tools.cache.mend import open_mended

        with BuildLock(folder), closing(open_mended(folder, CacheGeometry(manifest), *roots(manifest))) as index:
            paths = index.paths()
            plan = plan_prune(folder, index, choose(paths), max_bytes)
            done = prune(folder, index, plan.documents)
    return CachePruning(
        cache=str(folder),
        dry_run=dry_run,
        dropped=done.documents,
        documents=len(paths) - len(done.documents),
        bytes_before=done.before,
        bytes_after=done.after,
    )


def cache_bytes(folder: Path) -> int:
    """Bytes of manifest, index and shards on disk."""
    files = [folder / MANIFEST, folder / INDEX, *(folder / SHARDS).glob(f"*{SUFFIX}")]
    return sum(file.stat().st_size for file in files if file.exists())


class _Left:
    """What would be left of a cache: at most so many bytes."""

    def __init__(self, index: Index, folder: Path) -> None:
        self._living, self._keys, self._headers = index.living(), index.keys(), index.headers()
        self._entry = {d.path: d.shard for d in index.sizes()}
        self._users = Counter(key for keys in self._keys.values() for key in set(keys))
        self._held = Counter(shard for shard, _ in self._living.values()) + Counter(self._entry.values())
        self.num_bytes = sum(size for _, size in self._living.values())
        self.num_bytes += sum(size for name, size in self._headers.items() if self._held[name])
        self.num_bytes += sum((folder / name).stat().st_size for name in (MANIFEST, INDEX))

    def drop(self, path: str) -> None:
        """Leave out a document."""
        for key in set(self._keys[path]):
            self._users[key] -= 1
            if not self._users[key]:
                shard, size = self._living[key]
                self.num_bytes -= size
                self._let_go(shard)
        self._let_go(self._entry[path])

    def _let_go(self, shard: str) -> None:
        self._held[shard] -= 1
        if not self._held[shard]:
            self.num_bytes -= self._headers.get(shard, 0)
