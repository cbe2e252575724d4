"""`index.sqlite`: which documents and chunks a cache holds, and in which shard each chunk lies.

It repeats what the shards say, for quick look-up; only the times of files are its own. The journal is a rollback
journal: a folder on a network or without leave to write can be read all the same.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lserve_tools.cache.keys import chain_keys, content_key
from lserve_tools.cache.records import ChunkRecord, DocumentEntry, StoredShard
from lserve_tools.errors import CacheError
from lserve_tools.schema import CACHE_FORMAT_VERSION

PREFIX_PATH = ""  # of the entry that holds the prefix; no document has it
_SCHEMA = """
CREATE TABLE shards (
    name TEXT PRIMARY KEY, sha256 TEXT NOT NULL, bytes INTEGER NOT NULL, chunk_bytes INTEGER NOT NULL
);
CREATE TABLE chunks (
    prefix_key BLOB PRIMARY KEY, content_key BLOB NOT NULL, token_ids BLOB NOT NULL, position INTEGER NOT NULL,
    rotated INTEGER NOT NULL, streaming_ranges TEXT NOT NULL, has_tail INTEGER NOT NULL,
    shard TEXT NOT NULL, number INTEGER NOT NULL, bytes INTEGER NOT NULL
);
CREATE INDEX chunks_by_content ON chunks (content_key);
CREATE INDEX chunks_by_shard ON chunks (shard);
CREATE TABLE documents (
    path TEXT PRIMARY KEY, sha256 TEXT NOT NULL, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL,
    shard TEXT NOT NULL
);
CREATE TABLE document_chunks (
    path TEXT NOT NULL, place INTEGER NOT NULL, prefix_key BLOB NOT NULL, PRIMARY KEY (path, place)
) WITHOUT ROWID;
CREATE INDEX document_chunks_by_key ON document_chunks (prefix_key);
"""
_RECORD = "prefix_key, content_key, token_ids, position, rotated, streaming_ranges, has_tail, shard, number"
_DEAD = "prefix_key NOT IN (SELECT prefix_key FROM document_chunks)"


class Index:
    """An open index.

    Args:
        path: its file.
        writable: it is made if it is not there; else it is only read.

    Raises:
        CacheError: here and later, if it cannot be read or is damaged.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path = path
        if not writable and not path.is_file():
            raise CacheError(f"{path} is not there.", cure="Run build-cache again: it makes it from the shards.")
        with self._reading():
            uri = f"{path.absolute().as_uri()}?mode={'rwc' if writable else 'ro'}"
            self._connection = sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None, check_same_thread=False)
            try:
                version = self._one("PRAGMA user_version")
                if writable and not version:
                    self._connection.executescript(
                        f"BEGIN; {_SCHEMA} PRAGMA user_version = {CACHE_FORMAT_VERSION}; COMMIT;"
                    )
                elif version != CACHE_FORMAT_VERSION:
                    raise ValueError(f"version {version}")
            except (sqlite3.Error, ValueError):
                self._connection.close()
                raise

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def check(self) -> None:
        """Read all of the file, and make sure that what SQLite derives from its rows agrees with them."""
        with self._reading():
            found = self._one("PRAGMA integrity_check(1)")
            if found != "ok":
                raise ValueError(found)

    def find(self, key: bytes, token_ids: Sequence[int] | None = None) -> ChunkRecord | None:
        """The chunk with this prefix key (and these tokens, if given), or None."""
        with self._reading():
            row = self._row(f"SELECT {_RECORD} FROM chunks WHERE prefix_key = ?", key)
            if row is None or (token_ids is not None and bytes(row[2]) != _pack_ids(token_ids)):
                return None
            return _record(row)

    def variants(self, content: bytes) -> list[ChunkRecord]:
        """All chunks with these tokens, after whatever."""
        with self._reading():
            query = f"SELECT {_RECORD} FROM chunks WHERE content_key = ? ORDER BY prefix_key"
            return [_record(row) for row in self._rows(query, content)]

    def document(self, path: str, previous: bytes | None = None) -> DocumentEntry | None:
        """The document at `path`, or None.

        Args:
            previous: the key that its first chunk follows; if given, all of its keys are made again and compared.
        """
        with self._reading():
            row = self._row("SELECT sha256, size, mtime_ns FROM documents WHERE path = ?", path)
            if row is None:
                return None
            query = "SELECT c.prefix_key, c.token_ids FROM document_chunks d LEFT JOIN chunks c USING (prefix_key)"
            chunks = list(self._rows(f"{query} WHERE d.path = ? ORDER BY d.place", path))
            ids = [_unpack_ids(ids) for _, ids in chunks]
            entry = DocumentEntry(
                path, str(row[0]), int(row[1]), int(row[2]), tuple(t for i in ids for t in i), tuple(map(len, ids))
            )
            if not chunks:
                raise ValueError(f"no chunks of {path}")
            if previous is not None and chain_keys(previous, entry.token_ids, entry.chunks) != [k for k, _ in chunks]:
                raise ValueError(f"keys of {path}")
            return entry

    def paths(self) -> list[str]:
        """Paths of all documents in order."""
        with self._reading():
            return [
                str(p) for (p,) in self._rows("SELECT path FROM documents WHERE path != ? ORDER BY path", PREFIX_PATH)
            ]

    def sha256(self, path: str) -> str | None:
        """Digest of a document's text, or None if it is not there."""
        with self._reading():
            row = self._row("SELECT sha256 FROM documents WHERE path = ?", path)
            return str(row[0]) if row else None

    def shards(self) -> dict[str, tuple[str, int]]:
        """Header digest and bytes of every shard by name."""
        with self._reading():
            return {
                str(n): (str(s), int(b))
                for n, s, b in self._rows("SELECT name, sha256, bytes FROM shards ORDER BY name")
            }

    def shard_sha256(self, name: str) -> str | None:
        """Header digest of a shard, or None if there is none of this name."""
        with self._reading():
            row = self._row("SELECT sha256 FROM shards WHERE name = ?", name)
            return str(row[0]) if row else None

    def chunks_of(self, shard: str) -> list[ChunkRecord]:
        """The chunks that are taken from a shard, in its order."""
        with self._reading():
            return [
                _record(r) for r in self._rows(f"SELECT {_RECORD} FROM chunks WHERE shard = ? ORDER BY number", shard)
            ]

    def totals(self) -> dict[str, int]:
        """Numbers of documents, chunks and tokens, and bytes."""
        living = f"FROM chunks WHERE NOT {_DEAD}"
        queries = {
            "documents": f"SELECT count(*) FROM documents WHERE path != '{PREFIX_PATH}'",
            "chunks": f"SELECT count(*) {living}",
            "tokens": "SELECT sum(length(token_ids)) / 4 FROM document_chunks JOIN chunks USING (prefix_key)"
            f" WHERE path != '{PREFIX_PATH}'",
            "stored_tokens": f"SELECT sum(length(token_ids)) / 4 {living}",
            "chunk_bytes": f"SELECT sum(bytes) {living}",
            "written_bytes": "SELECT sum(chunk_bytes) FROM shards",
            "bytes": "SELECT sum(bytes) FROM shards",
        }
        with self._reading():
            return {name: int(self._one(query) or 0) for name, query in queries.items()}

    def enter(self, shard: StoredShard, mtimes: Mapping[str, int]) -> None:
        """Enter a shard: its chunks and documents take the place of older ones."""
        with self._writing():
            values = (shard.name, shard.sha256, shard.num_bytes, sum(shard.chunk_bytes))
            self._connection.execute("INSERT OR REPLACE INTO shards VALUES (?, ?, ?, ?)", values)
            for number, chunk in enumerate(shard.contents.chunks):
                ids = _pack_ids(shard.token_ids[number])
                where = (shard.name, number, shard.chunk_bytes[number])
                ranges = json.dumps(chunk.streaming_ranges)
                how = (chunk.position, chunk.rotated, ranges, chunk.has_tail)
                row = (bytes.fromhex(chunk.prefix_key), bytes.fromhex(chunk.content_key), ids, *how, *where)
                self._connection.execute(f"INSERT OR REPLACE INTO chunks VALUES ({', '.join('?' * len(row))})", row)
            for document in shard.contents.documents:
                file = (document.path, document.sha256, document.size, mtimes.get(document.path, 0), shard.name)
                self._connection.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?, ?)", file)
                self._connection.execute("DELETE FROM document_chunks WHERE path = ?", (document.path,))
                places = [(document.path, i, bytes.fromhex(key)) for i, key in enumerate(document.chunks)]
                self._connection.executemany("INSERT INTO document_chunks VALUES (?, ?, ?)", places)

    def drop_documents(self, paths: Iterable[str]) -> None:
        """Take documents out; their chunks stay."""
        gone = [(path,) for path in paths]
        with self._writing():
            self._connection.executemany("DELETE FROM documents WHERE path = ?", gone)
            self._connection.executemany("DELETE FROM document_chunks WHERE path = ?", gone)

    def drop_chunks(self, keys: Iterable[bytes]) -> list[str]:
        """Take chunks out, and the documents that need them; returns the paths of these."""
        with self._writing():
            self._connection.executemany("DELETE FROM chunks WHERE prefix_key = ?", [(key,) for key in keys])
            missing = (
                "SELECT DISTINCT path FROM document_chunks WHERE prefix_key NOT IN (SELECT prefix_key FROM chunks)"
            )
            paths = [str(path) for (path,) in self._rows(missing)]
        self.drop_documents(paths)
        return paths

    def drop_shard(self, name: str) -> None:
        """Take out a shard with its chunks."""
        with self._writing():
            self._connection.execute("DELETE FROM chunks WHERE shard = ?", (name,))
            self._connection.execute("DELETE FROM shards WHERE name = ?", (name,))

    def drop_dead(self) -> list[str]:
        """Take out chunks that no document needs, and shards without any; returns the names of these."""
        with self._writing():
            self._connection.execute(f"DELETE FROM chunks WHERE {_DEAD}")
            empty = "FROM shards WHERE name NOT IN (SELECT shard FROM chunks UNION SELECT shard FROM documents)"
            names = [str(name) for (name,) in self._rows(f"SELECT name {empty}")]
            self._connection.execute(f"DELETE {empty}")
        return names

    def _rows(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        with closing(self._connection.execute(query, values)) as cursor:
            yield from cursor

    def _row(self, query: str, *values: object) -> tuple[Any, ...] | None:
        return next(iter(list(self._rows(query, *values))), None)

    def _one(self, query: str) -> Any:
        row = self._row(query)
        return row[0] if row else None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction: all of it or nothing."""
        with self._reading():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn what a damaged file leads to into an error that names it."""
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            cure = "Run build-cache again: it makes the index from the shards."
            raise CacheError(f"{self.path} is damaged or not an index ({error}).", cure=cure) from None


def _record(row: tuple[Any, ...]) -> ChunkRecord:
    ids = _unpack_ids(row[2])
    if content_key(ids) != row[1]:
        raise ValueError("tokens of a chunk")
    ranges = tuple((int(a), int(b)) for a, b in json.loads(row[5]))
    return ChunkRecord(
        row[0], row[1], len(ids), int(row[3]), bool(row[4]), ranges, bool(row[6]), str(row[7]), int(row[8])
    )


def _pack_ids(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<u4").tobytes()


def _unpack_ids(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, dtype="<u4").tolist())
