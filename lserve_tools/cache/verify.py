"""Checking every byte of a cache. Nothing is changed, and a build may be at work meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lserve_tools.cache.geometry import CacheGeometry
from lserve_tools.cache.index import INDEX, PREFIX_PATH, Index
from lserve_tools.cache.manifest import MANIFEST, read_manifest, roots
from lserve_tools.cache.mend import leftovers, read_chunk
from lserve_tools.cache.records import ChunkRecord
from lserve_tools.cache.shard import DAMAGED, SHARDS, SUFFIX, ShardReader
from lserve_tools.cache.store import describes
from lserve_tools.errors import CacheError, CorruptIndexError, CorruptShardError
from lserve_tools.schema import CacheFinding, CacheVerification, Manifest, ShardDocument

Advance = Callable[[int], object]
_REBUILD = "`lserve-tools cache verify --rebuild` drops it; then build-cache computes it again."
_REMAKE = "`lserve-tools cache verify --rebuild` makes it again from the shards."
PREFIX = "the prefix"
_NEXT = "The next build-cache tidies it up."


def shard_bytes(folder: Path) -> int:
    """Bytes of all shards: what a verification reads."""
    return sum(path.stat().st_size for path in shard_files(folder).values())


def shard_files(folder: Path) -> dict[str, Path]:
    """Shards of a folder by name, in the order in which they were written."""
    return {path.name: path for path in sorted((folder / SHARDS).glob(f"[0-9]*-*{SUFFIX}"))}


def verify(folder: Path, advance: Advance) -> CacheVerification:
    """Check manifest, index and shards against each other, and every frame against its checksum.

    Args:
        advance: called with the number of bytes that were read.

    Raises:
        CacheError: if there is no cache, or the system refuses to read it.
    """
    found = CacheVerification(cache=str(folder))
    try:
        manifest = read_manifest(folder)
    except CacheError as error:
        if not (folder / MANIFEST).is_file():
            raise
        found.damaged.append(
            CacheFinding(file=MANIFEST, problem=error.message.removeprefix(f"{folder / MANIFEST} "), cure=error.cure)
        )
        return found
    _Verification(folder, manifest, found, advance).run()
    return found


@dataclass(frozen=True)
class _Said:
    """What an index says, all of one moment.

    Args:
        shards: header digests by name; `headers` bytes of theirs.
        records, sizes: chunks of each shard and their bytes, by their place in it.
        documents: digests and sizes of the documents that each shard has entered.
        keys: of the chunks of every document.
    """

    shards: dict[str, str]
    headers: dict[str, int]
    records: dict[str, dict[int, ChunkRecord]]
    sizes: dict[str, dict[int, int]]
    documents: dict[str, dict[str, tuple[str, int]]]
    keys: dict[str, list[bytes]]

    @classmethod
    def read(cls, index: Index, root_key: bytes, document_root: bytes) -> _Said:
        """Read all of an index, checking what it can tell by itself.

        Raises:
            CorruptIndexError: if it is damaged.
        """
        with index.steady():
            index.check()
            for path in index.paths():
                index.document(path, document_root)
            index.document(PREFIX_PATH, root_key)
            shards = {name: sha256 for name, (sha256, _) in index.shards().items()}
            for document in index.sizes():
                if document.shard not in shards:
                    raise CorruptIndexError(index.path, f"does not know the shard of {document.path!r}")
            return cls(
                shards,
                index.headers(),
                {name: {r.number: r for r in index.chunks_of(name)} for name in shards},
                {name: index.chunk_bytes(name) for name in shards},
                {name: index.documents_of(name) for name in shards},
                index.keys(),
            )

    def differences(self, shard: ShardReader) -> Iterator[str]:
        """What the index says of a shard that the shard does not say."""
        name = shard.path.name
        frames = [shard.chunk_frames(number) for number in range(len(shard.contents.chunks))]
        written = [sum(map(shard.size, names)) for names in frames]
        for number, record in self.records[name].items():
            if not describes(shard, record) or written[number] != self.sizes[name][number]:
                yield f"something else of chunk {number}"
        if shard.complete and self.headers[name] != shard.path.stat().st_size - sum(written):
            yield "another size"
        entered = {d.path: d for d in shard.contents.documents}
        for path, (sha256, size) in self.documents[name].items():
            chunks = tuple(key.hex() for key in self.keys.get(path, []))
            if entered.get(path) != ShardDocument(path=path, sha256=sha256, size=size, chunks=chunks):
                yield f"something else of document {path!r}"


class _Verification:
    """One verification of a cache with a sound manifest."""

    def __init__(self, folder: Path, manifest: Manifest, found: CacheVerification, advance: Advance) -> None:
        self._folder, self._geometry, self._found, self._advance = folder, CacheGeometry(manifest), found, advance
        self._root_key, self._document_root = roots(manifest)
        self._said: _Said | None = None
        self._needing: dict[bytes, list[str]] = {}

    def run(self) -> None:
        """Check everything, adding to what was found."""
        try:
            with closing(Index(self._folder / INDEX)) as index:
                said = _Said.read(index, self._root_key, self._document_root)
            self._said = said
            self._found.documents = len(said.keys) - (PREFIX_PATH in said.keys)
            for path, keys in said.keys.items():
                for key in keys:
                    self._needing.setdefault(key, []).append(path or PREFIX)
        except CorruptIndexError as error:
            self._damage(INDEX, error.what, _REMAKE)
        for name in sorted({*shard_files(self._folder), *(self._said.shards if self._said else ())}):
            self._check(name)
        for file in leftovers(self._folder):
            self._note(str(file.relative_to(self._folder)), "was left half-written by a build that is at work or dead")
        for file in sorted((self._folder / SHARDS).glob(f"*{DAMAGED}")):
            self._note(f"{SHARDS}/{file.name}", "was left by a reader that met damage in this shard")

    def _check(self, name: str) -> None:
        """Check one shard; without an index against itself alone."""
        file, said = f"{SHARDS}/{name}", self._said
        records = said.records.get(name, {}) if said else {}
        sha256 = said.shards.get(name) if said else None
        try:
            with closing(ShardReader(self._folder / SHARDS / Path(name).name, sha256)) as shard:
                if shard.contents.root_key != self._root_key.hex():
                    raise CorruptShardError(shard.path, "its header", "it is of another cache")
                if said and name not in said.shards:
                    self._note(file, "is not in the index: a build is at work or dead")
                    return
                for problem in said.differences(shard) if said else ():
                    self._damage(INDEX, f"says {problem} of {name}", _REMAKE)
                self._found.shards += 1
                self._found.bytes += shard.path.stat().st_size
                self._read(file, shard, records)
        except CorruptShardError as error:
            if said and name not in said.shards:
                self._note(file, f"{error.where}: {error.reason}; the index does not have it")
            elif said is None or self._is_still_there(name):
                self._damage(file, error.reason, _REBUILD, error.where, self._documents(*records.values()))

    def _read(self, file: str, shard: ShardReader, records: dict[int, ChunkRecord]) -> None:
        """Read every frame of a shard."""
        if not shard.complete:
            self._damage(file, "it is shorter or longer than its header says", _REBUILD, "its end")
        for number in range(len(shard.contents.chunks)):
            needing = self._documents(records[number]) if number in records else ()
            self._found.chunks += bool(needing) or self._said is None
            try:
                read_chunk(shard, number, self._geometry)
                self._advance(sum(map(shard.size, shard.chunk_frames(number))))
            except CorruptShardError as error:
                if needing or self._said is None:
                    self._damage(file, error.reason, _REBUILD, error.where, needing)
                else:
                    cure = "`lserve-tools cache prune` drops it."
                    self._note(file, f"{error.where} is damaged; no document needs it", cure)

    def _is_still_there(self, name: str) -> bool:
        """Whether anything is still taken from a shard: a prune may have written it anew meanwhile."""
        try:
            with closing(Index(self._folder / INDEX)) as index:
                return bool(index.chunk_bytes(name) or index.documents_of(name))
        except CacheError:
            return True

    def _documents(self, *records: ChunkRecord) -> tuple[str, ...]:
        return tuple(sorted({path for r in records for path in self._needing.get(r.prefix_key, [])}))

    def _damage(
        self, file: str, problem: str, cure: str, place: str | None = None, documents: tuple[str, ...] = ()
    ) -> None:
        finding = CacheFinding(file=file, place=place, problem=problem, documents=documents, cure=cure)
        self._found.damaged.append(finding)

    def _note(self, file: str, problem: str, cure: str = _NEXT) -> None:
        self._found.notes.append(CacheFinding(file=file, problem=problem, cure=cure))
