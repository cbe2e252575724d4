"""What a build will cost, said before it starts: bytes from shapes, seconds from a short probe."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lserve_tools.cache.geometry import CacheGeometry
from lserve_tools.cache.windows import Ranges, document_windows
from lserve_tools.engine.llm import LLM
from lserve_tools.errors import CacheError
from lserve_tools.models.load import LoadedModel
from lserve_tools.schema import Manifest
from lserve_tools.text.numbers import show_bytes as show_bytes
from lserve_tools.text.numbers import show_seconds as show_seconds
from lserve_tools.text.segments import Segment

_ID_BYTES = 4
_PROBE_TOKENS = 256
_SLACK = 1.05


@dataclass(frozen=True, slots=True)
class Work:
    """How the operations of a prompt grow with its length: a part per token, and a part per pair of tokens."""

    per_token: float
    per_pair: float

    @classmethod
    def of(cls, loaded: LoadedModel) -> Work:
        """From the number of parameters and the shape of attention."""
        spec = loaded.spec
        weights = sum(p.numel() for p in loaded.model.parameters())
        return cls(2.0 * weights, 4.0 * spec.num_layers * spec.num_query_heads * spec.head_dim)

    def total(self, lengths: Sequence[int]) -> float:
        """Operations of prompts of these lengths, each computed alone and causally."""
        return sum(self.per_token * n + self.per_pair * n * n / 2 for n in lengths)


def estimate_seconds(llm: LLM, loaded: LoadedModel, documents: Sequence[Segment]) -> float:
    """About how long computing `documents` takes: the longest one's first tokens are timed, the rest is scaled."""
    longest = max(documents, key=lambda s: len(s.token_ids))
    probe = Segment.of(longest.name, longest.token_ids[:_PROBE_TOKENS])
    seconds = min(_time(llm, probe), _time(llm, Segment.of(probe.name, probe.token_ids[1:] or probe.token_ids)))
    work = Work.of(loaded)
    return seconds * work.total([len(s.token_ids) for s in documents]) / work.total([len(probe.token_ids)])


def estimate_bytes(manifest: Manifest, documents: Sequence[Segment]) -> int:
    """Bytes of the KV of `documents` before the entropy stage, from shapes alone."""
    geometry = CacheGeometry(manifest)
    sizes: dict[tuple[int, Ranges], int] = {}
    total = 0
    for document in documents:
        for length, ranges in zip(document.chunks, _ranges(manifest, document), strict=True):
            if (length, ranges) not in sizes:
                layouts = [geometry.layout(layer, length, ranges) for layer in range(geometry.num_layers)]
                sizes[length, ranges] = sum(layout.nbytes for layout in layouts) + _ID_BYTES * length
            total += sizes[length, ranges]
    return total


def _ranges(manifest: Manifest, document: Segment) -> list[Ranges]:
    """What streaming heads keep of each chunk."""
    if manifest.streaming == "full":
        return [((0, length),) for length in document.chunks]
    windows = document_windows(document.chunks, len(manifest.prefix_ids), manifest.sink, manifest.recent)
    return [window.ranges for window in windows]


def check_disk(folder: Path, needed: int) -> None:
    """Refuse a build for which the disk has no room.

    Raises:
        CacheError: with both numbers.
    """
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed * _SLACK > free:
        raise CacheError(
            f"{folder}: the cache needs about {show_bytes(needed)}, and {show_bytes(free)} are free there.",
            cure="Free some space, name another place with -o, or build fewer documents.",
        )


def _time(llm: LLM, segment: Segment) -> float:
    started = time.perf_counter()
    llm.prefill([segment], lambda *_: None)
    return time.perf_counter() - started
