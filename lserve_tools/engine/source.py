"""What the engine needs of a store of chunk KV; `cache.store.CacheStore` is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from torch import Tensor


class StoredLayer(Protocol):
    """KV of one chunk in one layer.

    `keys` and `values` are `[Hr, T, D]` of the retrieval heads; `streaming_keys` and `streaming_values` are
    `[Hs, n, D]` of the streaming heads, for the tokens of the record's `streaming_ranges`. The next layer may
    overwrite them.
    """

    @property
    def keys(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def streaming_keys(self) -> Tensor: ...
    @property
    def streaming_values(self) -> Tensor: ...


class StoredChunk(Protocol):
    """A chunk that a source can load."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def rotated(self) -> bool: ...
    @property
    def streaming_ranges(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def has_tail(self) -> bool: ...


Chunk = TypeVar("Chunk", bound=StoredChunk)


class ChunkSource(Protocol[Chunk]):
    """Finds chunks by prefix key and loads them layer by layer."""

    @property
    def root_key(self) -> bytes: ...

    def find(self, prefix_key: bytes, token_ids: Sequence[int]) -> Chunk | None:
        """The chunk with this key and these tokens, or None."""
        ...

    def load(self, record: Chunk) -> Iterator[StoredLayer]:
        """Its layers in order.

        Raises:
            CorruptShardError: if the bytes are not those that were written.
        """
        ...
