"""Tiny caches of random KV, and what they must give back."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lserve_tools.cache.index import INDEX, Index
from lserve_tools.cache.keys import chain_keys
from lserve_tools.cache.records import ChunkRecord
from lserve_tools.cache.shard import SHARDS
from lserve_tools.cache.store import CacheStore
from lserve_tools.cache.writer import CacheWriter
from lserve_tools.schema import Manifest

MIXED = ((True, False, True), (False, False, False), (True, True, True), (False, True, False))


def tiny_manifest(**changes: Any) -> Manifest:
    """4 layers of 3 KV heads, 8 wide, all of them retrieval heads."""
    settings: dict[str, Any] = {
        "model": "tiny",
        "model_fingerprint": "0123456789abcdef",
        "tokenizer_fingerprint": "fedcba9876543210",
        "dtype": "float32",
        "rope": "plain",
        "num_layers": 4,
        "num_kv_heads": 3,
        "head_dim": 8,
        "codec": "exact",
        "prefix_text": "Read this.",
        "prefix_ids": (1, 2, 3),
    }
    return Manifest(**{**settings, **changes})


@dataclass(frozen=True)
class TinyDocument:
    """A document of random tokens, whose KV is a function of its keys."""

    path: str
    chunks: tuple[int, ...]
    seed: int = 0
    token_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        object.__setattr__(self, "token_ids", tuple(rng.randrange(50_000) for _ in range(sum(self.chunks))))

    @property
    def sha256(self) -> str:
        return f"{self.seed}-{self.chunks}"

    def pieces(self) -> list[tuple[int, ...]]:
        """Tokens of each chunk."""
        ends = [sum(self.chunks[: i + 1]) for i in range(len(self.chunks))]
        return [self.token_ids[end - count : end] for end, count in zip(ends, self.chunks, strict=True)]


def kv_of(manifest: Manifest, key: bytes, layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[Hkv, T, D]` of a chunk, always the same."""
    generator = torch.Generator().manual_seed(int.from_bytes(key[:6], "little") + layer)
    shape = (2, manifest.num_kv_heads, num_tokens, manifest.head_dim)
    keys, values = torch.randn(shape, generator=generator).to(getattr(torch, manifest.dtype))
    return keys, values


def write_document(writer: CacheWriter, document: TinyDocument, *, stop_at: int | None = None) -> list[bool]:
    """Write a document; tells which of its chunks were wanted. With `stop_at` it is broken off in that chunk."""
    writer.begin_document(
        document.path, document.sha256, len(document.token_ids), 7, document.token_ids, document.chunks
    )
    wanted, position = [], len(writer.manifest.prefix_ids)
    keys = chain_keys(writer.document_root, document.token_ids, document.chunks)
    for number, (key, ids) in enumerate(zip(keys, document.pieces(), strict=True)):
        wanted.append(writer.begin_chunk(key, ids, position))
        for layer in range(writer.manifest.num_layers - (number == stop_at)):
            writer.add_layer(layer, *kv_of(writer.manifest, key, layer, len(ids)))
        if number == stop_at:
            return wanted
        position += len(ids)
    writer.end_document()
    return wanted


def build(folder: Path, manifest: Manifest, *documents: TinyDocument, **how: Any) -> Path:
    """Write a whole cache; gives its folder."""
    with CacheWriter(folder, manifest, **how) as writer:
        for document in documents:
            write_document(writer, document)
    return folder


def records_of(store: CacheStore, document: TinyDocument) -> list[ChunkRecord | None]:
    """What the store finds for each chunk of a document that stands first."""
    keys = chain_keys(store.document_root, document.token_ids, document.chunks)
    return [store.find(key, ids) for key, ids in zip(keys, document.pieces(), strict=True)]


def load_all(store: CacheStore, document: TinyDocument) -> list[list[tuple[Tensor, ...]]]:
    """Copies of all tensors of a document: of each chunk, of each layer."""
    loaded = []
    for record in records_of(store, document):
        assert record is not None, f"a chunk of {document.path} is not there"
        loaded.append(
            [
                tuple(t.clone() for t in (kv.keys, kv.values, kv.streaming_keys, kv.streaming_values))
                for kv in store.load(record)
            ]
        )
    return loaded


def expected(manifest: Manifest, record: ChunkRecord, layer: int) -> tuple[Tensor, ...]:
    """What a layer of a stored chunk is before a codec: retrieval heads whole, streaming heads where they are kept."""
    keys, values = kv_of(manifest, record.prefix_key, layer, record.num_tokens)
    mask = torch.tensor(manifest.head_mask[layer] if manifest.head_mask else [True] * manifest.num_kv_heads)
    kept = [t for a, b in record.streaming_ranges for t in range(a, b)]
    return keys[mask], values[mask], keys[~mask][:, kept], values[~mask][:, kept]


def write_prefix(writer: CacheWriter) -> None:
    """Write the prefix of a cache, if it is not there."""
    if writer.has_prefix:
        return
    ids = writer.manifest.prefix_ids
    (key,) = chain_keys(writer.root_key, ids, (len(ids),))
    writer.begin_prefix()
    writer.begin_chunk(key, ids, 0)
    for layer in range(writer.manifest.num_layers):
        writer.add_layer(layer, *kv_of(writer.manifest, key, layer, len(ids)))
    writer.end_document()


def shard_path(folder: Path, document: str) -> Path:
    """The shard in which a document was completed."""
    index = Index(folder / INDEX)
    try:
        (size,) = [size for size in index.sizes() if size.path == document]
    finally:
        index.close()
    return folder / SHARDS / size.shard


def check_whole(folder: Path, *documents: TinyDocument) -> None:
    """The cache holds these documents and no others, and gives back their KV."""
    store = CacheStore.open(folder)
    assert [d.path for d in store.documents()] == sorted(d.path for d in documents)
    for document in documents:
        for record, layers in zip(records_of(store, document), load_all(store, document), strict=True):
            assert record is not None
            for layer, got in enumerate(layers):
                for tensor, wanted in zip(got, expected(store.manifest, record, layer), strict=True):
                    assert torch.equal(tensor, wanted)
    store.close()
