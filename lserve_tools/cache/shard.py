"""Shards: safetensors files whose tensors are zstd frames, written as a stream and read frame by frame.

Frames carry their own checksums, the header's digest is part of the shard's name and of the index. A shard is written
under a temporary name and is there under its own only when all of it is on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray
from pydantic import ValidationError

from lserve_tools.cache.keys import content_key
from lserve_tools.errors import CacheError, CorruptShardError
from lserve_tools.schema import ShardContents

SHARDS = "shards"
SUFFIX, TEMPORARY, DAMAGED = ".safetensors", ".tmp", ".damaged"
_CONTENTS = "lserve"
_LEVEL = 1
_MAX_HEADER = 100_000_000  # what the safetensors library takes
_DIGEST_IN_NAME = 32
_UNUSED = 0x18
_ID_BYTES = 4

_local = threading.local()


def frame_name(chunk: int, layer: int | None) -> str:
    """The name of a frame: KV of a chunk in a layer, or its token ids."""
    return f"{chunk}/ids" if layer is None else f"{chunk}/{layer}/kv"


class ShardWriter:
    """A shard in flight.

    Args:
        folder: of shards.
        number: of the shard in the cache, from 1.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._number = folder, number
        self._frames: dict[str, tuple[int, int]] = {}
        self._data_path = folder / f"{number:06d}.data{TEMPORARY}"
        self._data = self._data_path.open("w+b")
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True)
        self.num_bytes = 0

    def add(self, name: str, data: bytes) -> None:
        """Compress and write a frame."""
        self.add_frame(name, self._compressor.compress(data))

    def add_frame(self, name: str, frame: bytes) -> None:
        """Write a frame that is compressed already."""
        self._data.write(frame)
        self._frames[name] = (self.num_bytes, self.num_bytes + len(frame))
        self.num_bytes += len(frame)

    def cut(self, num_bytes: int) -> None:
        """Forget all frames that begin at `num_bytes` or later."""
        self._frames = {name: place for name, place in self._frames.items() if place[0] < num_bytes}
        self._data.seek(num_bytes)
        self._data.truncate()
        self.num_bytes = num_bytes

    def seal(self, contents: ShardContents) -> tuple[Path, str]:
        """Put the shard in its place, safe from power loss, and return where it is and its header's digest."""
        header = _pack_header(self._frames, {_CONTENTS: contents.model_dump_json()})
        digest = hashlib.sha256(header).hexdigest()
        path = self._folder / f"{self._number:06d}-{digest[:_DIGEST_IN_NAME]}{SUFFIX}"
        whole = path.with_suffix(TEMPORARY)
        try:
            self._data.seek(0)
            with whole.open("wb") as file:
                file.write(header)
                shutil.copyfileobj(self._data, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            whole.unlink(missing_ok=True)
            raise
        self.discard()
        whole.replace(path)
        sync_folder(self._folder)
        return path, digest

    def discard(self) -> None:
        """Drop what was written for the shard so far."""
        with suppress(OSError):  # a full disk does not take what is still to be written
            self._data.close()
        self._data_path.unlink(missing_ok=True)


class ShardReader:
    """An open shard; frames may be read by several threads.

    Args:
        path: the shard.
        sha256: of its header, from the index; None takes the digest in its name.

    Raises:
        CorruptShardError: if it is not there, or its header is not the one that was written.
    """

    def __init__(self, path: Path, sha256: str | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise CorruptShardError(path, "the file", error.strerror or str(error)) from None
        try:
            header = self._read_header()
            self.sha256 = hashlib.sha256(header).hexdigest()
            expected = path.stem.rpartition("-")[2]
            if self.sha256 != (sha256 or self.sha256) or self.sha256[:_DIGEST_IN_NAME] != expected:
                raise CorruptShardError(path, "its header", "its digest is another")
            self._frames, self.contents = self._parse(header)
        except CorruptShardError:
            self._file.close()
            raise
        self._first = len(header)

    @property
    def complete(self) -> bool:
        """Whether the file is as long as its header says."""
        end = max((stop for _, stop in self._frames.values()), default=0)
        return os.fstat(self._file.fileno()).st_size == self._first + end

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def size(self, name: str) -> int:
        """Bytes of a frame on disk."""
        start, stop = self._frames[name]
        return stop - start

    def chunk_frames(self, number: int) -> list[str]:
        """Names of the frames of a chunk.

        Raises:
            CorruptShardError: if the header lacks one of them.
        """
        names = [frame_name(number, layer) for layer in (None, *range(len(self.contents.retrieval_heads)))]
        for name in names:
            if name not in self._frames:
                raise CorruptShardError(self.path, f"frame {name}", "the header has none")
        return names

    def frame(self, name: str) -> bytes:
        """A frame as it lies on disk, unchecked.

        Raises:
            CorruptShardError: if it cannot be read.
        """
        if name not in self._frames:
            raise CorruptShardError(self.path, f"frame {name}", "the header has none")
        start, stop = self._frames[name]
        try:
            with self._lock:
                self._file.seek(self._first + start)
                return self._file.read(stop - start) or b""
        except (OSError, ValueError, MemoryError) as error:
            raise CorruptShardError(self.path, f"frame {name}", str(error)) from None

    def read_ids(self, number: int) -> tuple[int, ...]:
        """Token ids of a chunk, from its own frame.

        Raises:
            CorruptShardError: if they are not those of its key.
        """
        chunk, name = self.contents.chunks[number], frame_name(number, None)
        ids = tuple(np.frombuffer(self.read(name, _ID_BYTES * chunk.num_tokens), dtype="<u4").tolist())
        if content_key(ids).hex() != chunk.content_key:
            raise CorruptShardError(self.path, f"frame {name}", "its tokens have another key")
        return ids

    def read(self, name: str, num_bytes: int) -> bytes:
        """The contents of a frame.

        Args:
            num_bytes: that it has; nothing larger is ever decompressed.

        Raises:
            CorruptShardError: if they are not those that were written.
        """
        frame = self.frame(name)
        try:
            parameters = zstandard.get_frame_parameters(frame)
            # zstd itself overlooks the unused bits of a frame's descriptor.
            if parameters.content_size != num_bytes or not parameters.has_checksum or frame[4] & _UNUSED:
                raise CorruptShardError(self.path, f"frame {name}", f"it does not hold {num_bytes:,} bytes")
            return _decompressor().decompress(frame, allow_extra_data=False)
        except (ValueError, MemoryError, zstandard.ZstdError) as error:
            raise CorruptShardError(self.path, f"frame {name}", str(error)) from None

    def read_into(self, name: str, out: NDArray[np.uint8]) -> None:
        """Read the contents of a frame into `out`, which is as long as they are; see `read`."""
        out[:] = np.frombuffer(self.read(name, out.nbytes), dtype=np.uint8)

    def _read_header(self) -> bytes:
        """The header with its length before it."""
        first = self._file.read(8) or b""
        count = int.from_bytes(first, "little")
        if len(first) < 8 or count > min(_MAX_HEADER, os.fstat(self._file.fileno()).st_size):
            raise CorruptShardError(self.path, "its header", "its length cannot be")
        return first + (self._file.read(count) or b"")

    def _parse(self, header: bytes) -> tuple[dict[str, tuple[int, int]], ShardContents]:
        try:
            fields: dict[str, Any] = json.loads(header[8:])
            contents = ShardContents.model_validate_json(fields.pop("__metadata__")[_CONTENTS])
            return {name: (f["data_offsets"][0], f["data_offsets"][1]) for name, f in fields.items()}, contents
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError):
            raise CorruptShardError(self.path, "its header", "it is not one of this format") from None


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what a full or read-only disk leads to into an error that names the place."""
    try:
        yield
    except OSError as error:
        cure = "Free some space there or name another folder with -o; the build goes on where it was."
        raise CacheError(f"{folder} cannot be written ({error.strerror or error}).", cure=cure) from None


def sync_folder(folder: Path) -> None:
    """Make renames in a folder safe from power loss, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pack_header(frames: Mapping[str, tuple[int, int]], metadata: Mapping[str, str]) -> bytes:
    """A safetensors header: its length in 8 bytes, JSON, and spaces up to a multiple of 8."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, (start, stop) in frames.items():
        fields[name] = {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _decompressor() -> zstandard.ZstdDecompressor:
    """One for each thread: they cannot be shared."""
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _local.decompressor
    return found
