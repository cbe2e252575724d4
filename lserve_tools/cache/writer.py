"""Writing a cache: one document after the other, its chunks in order, layer by layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torch import Tensor

from lserve_tools.cache.geometry import CacheGeometry
from lserve_tools.cache.index import INDEX, PREFIX_PATH, Index
from lserve_tools.cache.keys import chain_keys, content_key
from lserve_tools.cache.lock import BuildLock
from lserve_tools.cache.manifest import MANIFEST, compare, read_manifest, roots, write_manifest
from lserve_tools.cache.mend import open_mended
from lserve_tools.cache.prune import plan_prune, prune
from lserve_tools.cache.records import PruneReport
from lserve_tools.cache.shard import DAMAGED, SHARDS, SUFFIX, ShardReader, writing
from lserve_tools.cache.stream import ShardStream
from lserve_tools.cache.windows import ChunkWindow, covers, document_windows, merge
from lserve_tools.errors import CacheError, CorruptShardError
from lserve_tools.schema import Manifest, ShardChunk, ShardDocument

_MAX_BYTES = 512_000_000
_SEAL_BYTES = 64_000_000  # a killed build loses about as much


@dataclass(slots=True)
class _Document:
    """The document in hand.

    Args:
        keys, windows: of its chunks.
        position: of its first token.
        done: chunks that are complete.
    """

    entry: ShardDocument
    mtime_ns: int
    token_ids: tuple[int, ...]
    chunks: tuple[int, ...]
    keys: list[bytes]
    windows: list[ChunkWindow]
    position: int
    done: int = 0


class CacheWriter:
    """The one builder of a cache; a context manager. What is complete when it ends, even by an exception, is kept.

    Args:
        folder: of the cache; it is made.
        manifest: of the cache; one that is there must agree with it.
        overwrite: delete a cache that is there.
        max_bytes: of a shard, unless one chunk alone is larger.
        seal_bytes: from which a shard ends with a document.

    Raises:
        CacheError: on entering, if another build holds the folder, or it cannot be written.
        CacheMismatchError: on entering, if the cache there is of another kind.
    """

    def __init__(
        self,
        folder: str | Path,
        manifest: Manifest,
        *,
        overwrite: bool = False,
        max_bytes: int = _MAX_BYTES,
        seal_bytes: int = _SEAL_BYTES,
    ) -> None:
        self.folder, self.manifest = Path(folder), manifest
        self._overwrite, self._limits = overwrite, (max_bytes, seal_bytes)
        self._geometry = CacheGeometry(manifest)
        self.root_key, self.document_root = roots(manifest)
        self._lock = BuildLock(self.folder)
        self._document: _Document | None = None
        self._storing: ShardChunk | None = None
        self._layer: int | None = None

    def __enter__(self) -> CacheWriter:
        with ExitStack() as undo, writing(self.folder):
            undo.enter_context(self._lock)
            self._index = self._open()
            undo.callback(self._index.close)
            self._stream = ShardStream(self.folder / SHARDS, self._index, self._geometry, self.root_key, *self._limits)
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._stream.drop_chunk()
            self._stream.seal()
        except CacheError:
            if error is None:  # else the first one says more
                raise
        finally:
            self._stream.close()
            self._index.close()
            self._lock.__exit__(kind, error, traceback)

    def documents(self) -> dict[str, str]:
        """Digests of the texts of all documents by path: what is left after damage was found, so what may be kept."""
        return {path: self._index.sha256(path) or "" for path in self._index.paths()}

    def has_document(self, path: str, sha256: str) -> bool:
        """Whether the cache holds this text at this path."""
        return self._index.sha256(path) == sha256

    @property
    def has_prefix(self) -> bool:
        """Whether the prefix is stored, or empty."""
        return not self.manifest.prefix_ids or self._index.sha256(PREFIX_PATH) is not None

    def begin_prefix(self) -> None:
        """Begin the prefix, which is stored like a document of one chunk at position 0."""
        ids = self.manifest.prefix_ids
        entry = ShardDocument(path=PREFIX_PATH, sha256="", size=0, chunks=())
        self._begin(entry, 0, ids, (len(ids),), self.root_key, 0)

    def begin_document(
        self, path: str, sha256: str, size: int, mtime_ns: int, token_ids: Sequence[int], chunks: Sequence[int]
    ) -> None:
        """Begin a document; one that is not ended is forgotten.

        Args:
            path: relative to the folder that is built.
            sha256: of its text; `size` in bytes.
            mtime_ns: of its file.
            token_ids: all of its tokens; `chunks` are the lengths of its chunks.
        """
        entry = ShardDocument(path=path, sha256=sha256, size=size, chunks=())
        self._begin(entry, mtime_ns, token_ids, chunks, self.document_root, len(self.manifest.prefix_ids))

    def begin_chunk(self, prefix_key: bytes, token_ids: Sequence[int], position: int) -> bool:
        """Begin the next chunk of the document.

        Args:
            prefix_key: its key; with tokens and position it must be what follows from the document.

        Returns:
            Whether its layers are wanted; else they are stored already, and `add_layer` drops them.
        """
        document = self._in_hand()
        self._stream.drop_chunk()
        number, ids = document.done, tuple(token_ids)
        first = sum(document.chunks[:number])
        whole = document.token_ids[first : first + document.chunks[number]]
        if (prefix_key, ids, position) != (document.keys[number], whole, document.position + first):
            raise ValueError(f"chunk {number} of {document.entry.path or 'the prefix'} has another key, text or place")
        window = self._wanted(prefix_key, ids, document.windows[number])
        self._layer, self._storing = 0, None
        if window is None:
            return False
        self._storing = ShardChunk(
            prefix_key=prefix_key.hex(),
            content_key=content_key(ids).hex(),
            num_tokens=len(ids),
            position=position,
            rotated=not self._geometry.codec.before_rope,
            streaming_ranges=window.ranges,
            has_tail=window.has_tail,
        )
        layouts = [self._geometry.layout(i, len(ids), window.ranges) for i in range(self._geometry.num_layers)]
        self._stream.begin_chunk(self._storing, ids, sum(layout.nbytes for layout in layouts))
        return True

    def add_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write one layer of the chunk; the last one ends it.

        Args:
            layer: 0, 1, … in order.
            keys, values: `[Hkv, T, D]` of all KV heads; keys before RoPE if the codec takes them so, else after it.
        """
        document = self._in_hand()
        if layer != self._layer:
            raise ValueError(f"layer {layer} where layer {self._layer} is due")
        if self._storing is not None:
            ranges = self._storing.streaming_ranges
            layout = self._geometry.layout(layer, self._storing.num_tokens, ranges)
            self._stream.add_layer(layer, layout.encode(self._geometry.split(layer, keys, values, ranges)))
        self._layer += 1
        if self._layer == self._geometry.num_layers:
            self._stream.end_chunk()
            self._layer = None
            document.done += 1

    def end_document(self) -> None:
        """End the document, all chunks of which are there; it takes the place of an older one at its path."""
        document = self._in_hand()
        if document.done != len(document.chunks):
            raise ValueError(f"{document.entry.path} has {document.done} of {len(document.chunks)} chunks")
        keys = tuple(key.hex() for key in document.keys)
        self._document = None
        self._stream.end_document(document.entry.model_copy(update={"chunks": keys}), document.mtime_ns)

    def prune(self, keep: Collection[str], max_bytes: int | None = None) -> PruneReport:
        """Drop documents whose path is not in `keep`, and everything that no document needs.

        Args:
            max_bytes: of the cache; see `plan_prune`.
        """
        self._document = None
        self._stream.drop_chunk()
        self._stream.seal()
        gone = sorted(set(self._index.paths()) - set(keep))
        plan = plan_prune(self.folder, self._index, gone, max_bytes)
        return prune(self.folder, self._index, plan.documents)

    def _open(self) -> Index:
        """The index, with a manifest beside it; called under the lock."""
        shards = self.folder / SHARDS
        if self._overwrite:
            (self.folder / MANIFEST).unlink(missing_ok=True)
            for pattern in (f"{INDEX}*", f"{SHARDS}/*{SUFFIX}", f"{SHARDS}/*{DAMAGED}"):
                for path in self.folder.glob(pattern):
                    path.unlink()
        if (self.folder / MANIFEST).exists():
            compare(read_manifest(self.folder), self.manifest, self.folder)
        else:
            for path in shards.glob(f"[0-9]*-*{SUFFIX}"):
                self._refuse_foreign(path)
            write_manifest(self.folder, self.manifest)
        return open_mended(self.folder, self._geometry, self.root_key, self.document_root)

    def _refuse_foreign(self, path: Path) -> None:
        """Make sure that a shard without a manifest beside it is of this very cache."""
        with suppress(CorruptShardError), closing(ShardReader(path)) as shard:
            if shard.contents.root_key != self.root_key.hex():
                cure = "Build with the options that it was built with, or with --overwrite."
                raise CacheError(f"{self.folder} has other shards, but {MANIFEST} is missing.", cure=cure)

    def _begin(
        self,
        entry: ShardDocument,
        mtime_ns: int,
        token_ids: Sequence[int],
        chunks: Sequence[int],
        previous: bytes,
        position: int,
    ) -> None:
        self._stream.drop_chunk()
        ids, lengths = tuple(token_ids), tuple(chunks)
        if not ids:
            raise ValueError(f"{entry.path or 'the prefix'} has no tokens")
        keys = chain_keys(previous, ids, lengths)
        if not self._geometry.has_streaming:
            windows = [ChunkWindow((), True)] * len(lengths)
        elif self.manifest.streaming == "full":
            windows = [ChunkWindow(((0, length),), True) for length in lengths]
        else:
            windows = document_windows(lengths, position, self.manifest.sink, self.manifest.recent)
        self._document = _Document(entry, mtime_ns, ids, lengths, keys, windows, position)
        self._layer = None

    def _wanted(self, key: bytes, token_ids: Sequence[int], window: ChunkWindow) -> ChunkWindow | None:
        """What must be stored of a chunk: nothing if what is there will do, else that and what is there."""
        stored = self._stream.stored(key, token_ids)
        if stored is None:
            return window
        if covers(stored.ranges, window.ranges) and stored.has_tail >= window.has_tail:
            return None
        return ChunkWindow(merge(stored.ranges + window.ranges, len(token_ids)), stored.has_tail or window.has_tail)

    def _in_hand(self) -> _Document:
        if self._document is None:
            raise ValueError("no document was begun")
        return self._document
