"""`index.sqlite`: which documents and chunks a cache holds, and in which shard each chunk lies.

It repeats what the shards say, for quick look-up; only the times of files are its own. The journal is a rollback
journal: a folder on a network or without leave to write can be read all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lserve_tools.cache.database import Database
from lserve_tools.cache.keys import chain_keys, content_key
from lserve_tools.cache.records import ChunkRecord, DocumentEntry, DocumentSize, StoredShard
from lserve_tools.schema import CACHE_FORMAT_VERSION

INDEX = "index.sqlite"
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
_LIVING = "WHERE prefix_key IN (SELECT prefix_key FROM document_chunks)"


class Index(Database):
    """An open index.

    Args:
        path: its file.
        writable: it is made if it is not there; else it is only read.

    Raises:
        CorruptIndexError: here and later, if it is damaged or not there.
        CacheError: if the system refuses to read or write it.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        super().__init__(path, _SCHEMA, CACHE_FORMAT_VERSION, writable=writable)

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
        living = f"FROM chunks {_LIVING}"
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

    def sizes(self) -> list[DocumentSize]:
        """Sizes of all documents by path, the prefix among them."""
        query = (
            "SELECT path, d.shard, d.size, count(*), sum(length(token_ids)) / 4, sum(c.bytes) FROM documents d"
            " LEFT JOIN document_chunks USING (path) LEFT JOIN chunks c USING (prefix_key) GROUP BY path ORDER BY path"
        )
        with self._reading():
            return [DocumentSize(str(p), str(s), *map(int, rest)) for p, s, *rest in self._rows(query)]

    def living(self) -> dict[bytes, tuple[str, int]]:
        """Shard and bytes of every chunk that a document or the prefix needs."""
        with self._reading():
            return {
                k: (str(s), int(b)) for k, s, b in self._rows(f"SELECT prefix_key, shard, bytes FROM chunks {_LIVING}")
            }

    def keys(self) -> dict[str, list[bytes]]:
        """Prefix keys of the chunks of every document, in order."""
        found: dict[str, list[bytes]] = {}
        with self._reading():
            for path, key in self._rows("SELECT path, prefix_key FROM document_chunks ORDER BY path, place"):
                found.setdefault(str(path), []).append(key)
        return found

    def headers(self) -> dict[str, int]:
        """Bytes of every shard that are not of chunks."""
        with self._reading():
            return {str(n): int(b) for n, b in self._rows("SELECT name, bytes - chunk_bytes FROM shards")}

    def chunk_bytes(self, shard: str) -> dict[int, int]:
        """Bytes of the chunks that are taken from a shard, by their place in it."""
        with self._reading():
            return {int(n): int(b) for n, b in self._rows("SELECT number, bytes FROM chunks WHERE shard = ?", shard)}

    def documents_of(self, shard: str) -> dict[str, tuple[str, int]]:
        """Digest and size of the documents that a shard has entered, by path."""
        query = "SELECT path, sha256, size FROM documents WHERE shard = ?"
        with self._reading():
            return {str(p): (str(d), int(n)) for p, d, n in self._rows(query, shard)}

    def enter(self, shard: StoredShard, mtimes: Mapping[str, int]) -> None:
        """Enter a shard: its chunks and documents take the place of older ones, never of those of later shards."""
        with self._writing():
            self._enter(shard, mtimes)

    def replace(self, old: str, shard: StoredShard | None) -> None:
        """Let what a shard held be taken from its copy, which has its number; what the copy lacks is forgotten."""
        with self._writing():
            if shard is not None:
                query = "SELECT path, mtime_ns FROM documents WHERE shard = ?"
                self._enter(shard, {str(path): int(time) for path, time in self._rows(query, old)})
            if shard is None or shard.name != old:
                self._connection.execute("DELETE FROM chunks WHERE shard = ?", (old,))

    def _enter(self, shard: StoredShard, mtimes: Mapping[str, int]) -> None:
        values = (shard.name, shard.sha256, shard.num_bytes, sum(shard.chunk_bytes))
        self._connection.execute("INSERT OR REPLACE INTO shards VALUES (?, ?, ?, ?)", values)
        for number, chunk in enumerate(shard.contents.chunks):
            key, ids = bytes.fromhex(chunk.prefix_key), shard.token_ids[number]
            if ids is None or self._later("chunks WHERE prefix_key = ?", key, shard.name):
                continue
            where = (shard.name, number, shard.chunk_bytes[number])
            how = (chunk.position, chunk.rotated, json.dumps(chunk.streaming_ranges), chunk.has_tail)
            row = (key, bytes.fromhex(chunk.content_key), _pack_ids(ids), *how, *where)
            self._connection.execute(f"INSERT OR REPLACE INTO chunks VALUES ({', '.join('?' * len(row))})", row)
        for document in shard.contents.documents:
            if self._later("documents WHERE path = ?", document.path, shard.name):
                continue
            file = (document.path, document.sha256, document.size, mtimes.get(document.path, 0), shard.name)
            self._connection.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?, ?)", file)
            self._connection.execute("DELETE FROM document_chunks WHERE path = ?", (document.path,))
            places = [(document.path, i, bytes.fromhex(key)) for i, key in enumerate(document.chunks)]
            self._connection.executemany("INSERT INTO document_chunks VALUES (?, ?, ?)", places)

    def _later(self, row: str, value: object, name: str) -> bool:
        """Whether a row stands there already, of a shard with a higher number."""
        found = self._row(f"SELECT shard FROM {row}", value)
        return found is not None and shard_number(str(found[0])) > shard_number(name)

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

    def drop_shard(self, name: str) -> list[str]:
        """Take out a shard with its chunks and documents; returns the paths of all documents that need it."""
        with self._writing():
            needing = (
                "SELECT path FROM documents WHERE shard = ?1 UNION SELECT path FROM document_chunks"
                " WHERE prefix_key IN (SELECT prefix_key FROM chunks WHERE shard = ?1)"
            )
            paths = [str(path) for (path,) in self._rows(needing, name)]
            self._connection.execute("DELETE FROM chunks WHERE shard = ?", (name,))
            self._connection.execute("DELETE FROM shards WHERE name = ?", (name,))
        self.drop_documents(paths)
        return paths


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


def shard_number(name: str) -> int:
    """The number of a shard, from its name: the later it was written, the higher."""
    return int(name.partition("-")[0])
