"""The KV pages of all layers, and the two pools that hand them out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor

from lserve_kernels import KeyRotation, KVPages, PageBounds, PageLayout, PlainPages, QuantizedPages, Written
from lserve_tools.engine.layers import LayerHeads, StreamingWindows
from lserve_tools.engine.pages import PagePool
from lserve_tools.engine.source import StoredChunk, StoredLayer
from lserve_tools.engine.tables import PageTable, StreamingTable
from lserve_tools.errors import UsageError
from lserve_tools.models.rope import Rope

_MAX_PAGES = 1 << 20  # where no layer has heads of a kind, pages of it cost nothing


class KVMemory:
    """Key and value pages of every layer, kept apart for retrieval and streaming heads.

    Args:
        layers: kind of each layer's heads.
        windows: the widest of their windows, or None if no head streams.
        layout: of a page.
        budget: bytes for all pages.
        sequences: that are answered at a time, at most.
        rope: turns keys that were stored without their position.
        device: where pages lie.
    """

    def __init__(
        self,
        layers: list[LayerHeads],
        windows: StreamingWindows | None,
        layout: PageLayout,
        budget: int,
        sequences: int,
        rope: Rope,
        device: torch.device,
    ) -> None:
        self.layers, self.layout, self.device, self._rope = layers, layout, device, rope
        plain = replace(layout, bits=None, logical_size=None)  # streaming heads keep few tokens, and those exactly
        self.sink, self.recent = (windows.sink, windows.recent) if windows else (0, 0)
        retrieval = sum(layout.bytes_per_page(len(heads.retrieval)) for heads in layers)
        streaming = sum(plain.bytes_per_page(len(heads.streaming)) for heads in layers)
        owners = 2 * sequences + 16  # contexts and sequences that hold streaming pages at a time
        num_open = sequences if layout.bits else 0
        left = max(0, budget - num_open * sum(plain.bytes_per_page(len(heads.retrieval)) for heads in layers))
        num_streaming = 0
        if streaming:
            most = left // streaming if not retrieval else left // (2 * streaming)
            num_streaming = most if not retrieval else min(most, owners * self.streaming_reserve)
        left -= num_streaming * streaming
        self.retrieval_pool = PagePool(min(left // retrieval, _MAX_PAGES) if retrieval else _MAX_PAGES)
        self.streaming_pool = PagePool(min(num_streaming, _MAX_PAGES))
        if (retrieval and not self.retrieval_pool.num_pages) or (streaming and num_streaming < self.streaming_reserve):
            raise UsageError(
                f"{budget / 1e6:.0f} MB of KV memory hold no page of {layout.page_size} tokens with its windows.",
                cure="Give more with --kv-memory.",
            )
        self.open_pool = PagePool(num_open)
        self.open_of = torch.full((self.retrieval_pool.num_pages if num_open else 0,), -1, device=device)
        self._retrieval = self._retrieval_pages()
        counts = [(len(heads.retrieval), self.retrieval_pool.num_pages) for heads in layers if layout.logical_size]
        self._bounds = [PageBounds.allocate(layout, heads, pages if heads else 0, device) for heads, pages in counts]
        pages = self.streaming_pool.num_pages
        self._streaming = [
            PlainPages.allocate(plain, len(heads.streaming), pages if len(heads.streaming) else 0, device)
            for heads in layers
        ]

    def _retrieval_pages(self) -> list[KVPages]:
        found: list[KVPages] = []
        offsets = torch.arange(self.layout.page_size, device=self.device)
        for layer, heads in enumerate(self.layers):
            count = len(heads.retrieval)
            num_pages = self.retrieval_pool.num_pages if count else 0
            if self.layout.bits is None:
                found.append(PlainPages.allocate(self.layout, count, num_pages, self.device))
                continue
            rotation = self._rope.at(layer, offsets) if self._rope.movable else None
            num_open = self.open_pool.num_pages
            found.append(
                QuantizedPages.allocate(self.layout, rotation, count, num_pages, num_open, self.open_of, self.device)
            )
        return found

    @property
    def has_streaming(self) -> bool:
        """Whether any layer has streaming heads."""
        return self.recent > 0

    @property
    def streaming_reserve(self) -> int:
        """Streaming pages that one owner holds at most: two windows while a chunk is written, and its sink."""
        if not self.has_streaming:
            return 0
        return 2 * (self.layout.num_pages(self.recent) + 1) + self.layout.num_pages(self.sink) + 1

    def new_table(self, chunks: tuple[int, ...]) -> PageTable:
        """A table for retrieval heads with room for `chunks`."""
        return PageTable(self.retrieval_pool, chunks, self.layout.page_size)

    def new_streaming_table(self) -> StreamingTable:
        """An empty table for streaming heads."""
        return StreamingTable(self.streaming_pool, self.sink, self.recent, self.layout.page_size)

    def retrieval_pages(self, layer: int) -> KVPages:
        """Pages of a layer's retrieval heads."""
        return self._retrieval[layer]

    def streaming_pages(self, layer: int) -> PlainPages:
        """Pages of a layer's streaming heads."""
        return self._streaming[layer]

    def bounds(self, layer: int) -> PageBounds:
        """Bounds of the keys of a layer's retrieval heads; there are some only with a `logical_size`."""
        return self._bounds[layer]

    def plan(self, slots: list[int], open_pages: dict[int, int] | None = None) -> Written:
        """Where tokens of retrieval heads go, in every layer; see `Written.plan`."""
        written = Written.plan(slots, self.layout, self.device, open_pages)
        if self.layout.bits:
            self.open_of[written.pages] = -1
            self.open_of[written.pages[written.open[0]]] = written.open[1]
        return written

    def write(
        self, layer: int, written: Written, keys: Tensor, values: Tensor, rotation: KeyRotation | None = None
    ) -> None:
        """Write keys (rotated) and values `[Hr, T, D]` of a layer's retrieval heads to where the plan says."""
        pages = self._retrieval[layer]
        pages.write(written, keys, values, rotation)
        if self.layout.logical_size:
            pages.bound(self._bounds[layer], written)

    def load(self, layer: int, record: StoredChunk, stored: StoredLayer, places: ChunkPlaces) -> None:
        """Write one layer of a stored chunk into its pages, rotated to where it stands."""
        heads = self.layers[layer]
        if len(heads.retrieval):
            rotation = None if record.rotated else self._rope.at(layer, places.positions)
            self.write(layer, places.written, stored.keys, stored.values, rotation)
        if len(heads.streaming) and len(places.streaming_tokens):
            rotation = None if record.rotated else self._rope.at(layer, places.streaming_positions)
            keys, values = (x[:, places.streaming_tokens] for x in (stored.streaming_keys, stored.streaming_values))
            self._streaming[layer].write(places.streaming, keys, values, rotation)


@dataclass(frozen=True, slots=True)
class ChunkPlaces:
    """Where the tokens of a stored chunk go.

    Args:
        positions: of its tokens.
        written: slots of them for retrieval heads.
        streaming_tokens: for streaming heads: which of the stored streaming tokens are wanted.
        streaming_positions: and their positions.
        streaming: and their slots.
    """

    positions: Tensor
    written: Written
    streaming_tokens: Tensor
    streaming_positions: Tensor
    streaming: Written


def default_budget(device: torch.device) -> int:
    """Bytes for KV pages when none are named: half of the memory that is free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return int(psutil.virtual_memory().available // 2)
