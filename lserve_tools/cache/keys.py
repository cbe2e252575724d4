"""Keys of chunks: what a chunk holds, and what its KV was computed after.

All are blake2b digests of 32 bytes: two chunks with one key would be a wrong answer, so nothing shorter will do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

KEY_BYTES = 32


def content_key(token_ids: Sequence[int]) -> bytes:
    """The key of a chunk's tokens alone, wherever they stand."""
    return _digest(np.asarray(token_ids, dtype="<u4").tobytes())


def prefix_key(previous: bytes, content: bytes) -> bytes:
    """The key of a chunk after all that comes before it.

    Args:
        previous: the prefix key of the chunk before, or the root key.
        content: the chunk's content key.
    """
    return _digest(previous + content)


def chain_keys(root: bytes, token_ids: Sequence[int], chunk_lengths: Sequence[int]) -> list[bytes]:
    """The prefix keys of consecutive chunks.

    Args:
        root: the key that the first one follows.
        token_ids: of all chunks.
        chunk_lengths: tokens of each chunk; they add up to all tokens.
    """
    if sum(chunk_lengths) != len(token_ids):
        raise ValueError(f"chunks of {sum(chunk_lengths)} tokens do not cut {len(token_ids)} tokens")
    keys: list[bytes] = []
    first = 0
    for length in chunk_lengths:
        keys.append(prefix_key(keys[-1] if keys else root, content_key(token_ids[first : first + length])))
        first += length
    return keys


@dataclass(frozen=True, slots=True)
class RootIdentity:
    """Everything besides tokens that shapes the KV of a cache.

    Args:
        model: fingerprint of the model.
        tokenizer: fingerprint of the tokenizer.
        dtype: of the computation, for a codec without loss; None for a lossy one, whose error hides the rounding of
            any dtype, so that KV computed in one may be used in another.
        weight_quantization: how weights are quantized, or None.
        rope: identity of the rotary embedding.
        sink, recent: the windows of streaming heads, in tokens; 0 without them.
        head_mask: `[L][Hkv]`, True for a retrieval head; None if all are.
        streaming: what is stored of streaming heads, `window` or `full`.
        codec: name of the codec.
        format_version: of the cache.
        prefix_ids: tokens before the first document.
    """

    model: str
    tokenizer: str
    dtype: str | None
    weight_quantization: str | None
    rope: str
    sink: int
    recent: int
    head_mask: tuple[tuple[bool, ...], ...] | None
    streaming: str
    codec: str
    format_version: int
    prefix_ids: tuple[int, ...]

    def digest(self) -> bytes:
        """The root key: what the first chunk of every prompt follows."""
        return _digest(json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode())


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()
