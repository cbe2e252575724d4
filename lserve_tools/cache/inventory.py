"""What a cache holds and how large it is, from manifest and index alone: quick, and without torch."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from lserve_tools.cache.index import INDEX, PREFIX_PATH, Index
from lserve_tools.cache.manifest import read_manifest
from lserve_tools.schema import CachedDocument, CacheReport, CacheStats, Manifest


def list_documents(folder: Path) -> list[CachedDocument]:
    """All documents of a cache by path.

    Raises:
        CacheError: if there is no cache, or it is damaged.
    """
    read_manifest(folder)
    with closing(Index(folder / INDEX)) as index:
        return [
            CachedDocument(path=d.path, size=d.size, tokens=d.tokens, chunks=d.chunks, bytes=d.num_bytes)
            for d in index.sizes()
            if d.path != PREFIX_PATH
        ]


def report(folder: Path) -> CacheReport:
    """Numbers of a cache, and what it was built with.

    Raises:
        CacheError: if there is no cache, or it is damaged.
    """
    manifest = read_manifest(folder)
    mask = manifest.head_mask or ()
    with closing(Index(folder / INDEX)) as index:
        stats, shards = measure(index, manifest), len(index.shards())
    return CacheReport(
        **stats.model_dump(),
        cache=str(folder),
        model=manifest.model,
        revision=manifest.revision,
        dtype=manifest.dtype,
        codec=manifest.codec,
        system=manifest.system,
        prefix_tokens=len(manifest.prefix_ids),
        head_profile=manifest.head_profile,
        kv_heads=manifest.num_layers * manifest.num_kv_heads,
        streaming_heads=sum(not retrieves for row in mask for retrieves in row),
        sink=manifest.sink,
        recent=manifest.recent,
        streaming=manifest.streaming,
        shards=shards,
        index_bytes=(folder / INDEX).stat().st_size,
        ratio=stats.raw_bytes / max(stats.bytes_per_token * stats.stored_tokens, 1e-9),
    )


def measure(index: Index, manifest: Manifest) -> CacheStats:
    """Numbers and sizes of what an index has."""
    totals = index.totals()
    living, written = totals.pop("chunk_bytes"), totals.pop("written_bytes")
    stored = totals["stored_tokens"]
    return CacheStats(
        **totals,
        dead_bytes=written - living,
        bytes_per_token=living / max(stored, 1),
        raw_bytes=stored * manifest.raw_bytes_per_token,
    )
