"""The KV pages of all layers, and the two pools that hand them out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import psutil
import torch
from torch import Tensor

from lserve_kernels import PageBounds, PageLayout, slots, update_bounds
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
        owners: contexts and sequences that hold streaming pages at a time, at most.
        device: where pages lie.
        logical_size: tokens whose keys are bounded together, for page selection; None keeps no bounds.
    """

    def __init__(
        self,
        layers: list[LayerHeads],
        windows: StreamingWindows | None,
        layout: PageLayout,
        budget: int,
        owners: int,
        device: torch.device,
        logical_size: int | None = None,
    ) -> None:
        self.layers, self.layout, self.logical_size, self.device = layers, layout, logical_size, device
        self.sink, self.recent = (windows.sink, windows.recent) if windows else (0, 0)
        retrieval = sum(layout.bytes_per_page(len(heads.retrieval), logical_size) for heads in layers)
        streaming = sum(layout.bytes_per_page(len(heads.streaming)) for heads in layers)
        num_streaming = 0
        if streaming:
            most = budget // streaming if not retrieval else budget // (2 * streaming)
            num_streaming = most if not retrieval else min(most, owners * self.streaming_reserve)
        left = budget - num_streaming * streaming
        self.retrieval_pool = PagePool(min(left // retrieval, _MAX_PAGES) if retrieval else _MAX_PAGES)
        self.streaming_pool = PagePool(min(num_streaming, _MAX_PAGES))
        if (retrieval and not self.retrieval_pool.num_pages) or (streaming and num_streaming < self.streaming_reserve):
            raise UsageError(
                f"{budget / 1e6:.0f} MB of KV memory hold no page of {layout.page_size} tokens with its windows.",
                cure="Give more with --kv-memory.",
            )
        self._retrieval = [
            layout.allocate(len(heads.retrieval), self.retrieval_pool.num_pages if len(heads.retrieval) else 0, device)
            for heads in layers
        ]
        self._bounds = [PageBounds.allocate(keys, logical_size) for keys, _ in self._retrieval if logical_size]
        self._streaming = [
            layout.allocate(len(heads.streaming), self.streaming_pool.num_pages if len(heads.streaming) else 0, device)
            for heads in layers
        ]

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

    def retrieval_pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Key and value pages of a layer's retrieval heads, `[Hr, P, page_size, D]`."""
        return self._retrieval[layer]

    def streaming_pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Key and value pages of a layer's streaming heads, `[Hs, P, page_size, D]`."""
        return self._streaming[layer]

    def bounds(self, layer: int) -> PageBounds:
        """Bounds of the keys of a layer's retrieval heads; there are some only with a `logical_size`."""
        return self._bounds[layer]

    def update_bounds(self, layer: int, touched: Touched) -> None:
        """Bound keys anew after some were written; without a `logical_size` nothing is to be done."""
        if self.logical_size and len(self.layers[layer].retrieval):
            update_bounds(self._bounds[layer], self._retrieval[layer][0], touched.logical, touched.counts)

    def load(self, layer: int, record: StoredChunk, stored: StoredLayer, places: ChunkPlaces, rope: Rope) -> None:
        """Write one layer of a stored chunk into its pages, rotated to where it stands."""
        heads = self.layers[layer]
        if len(heads.retrieval):
            turn = None if record.rotated else partial(rope.rotate, layer, positions=places.positions)
            _put(self._retrieval[layer], places.slots, stored.keys, stored.values, turn)
            self.update_bounds(layer, places.touched)
        if len(heads.streaming) and len(places.streaming_slots):
            turn = None if record.rotated else partial(rope.rotate, layer, positions=places.streaming_positions)
            keys, values = (x[:, places.streaming_tokens] for x in (stored.streaming_keys, stored.streaming_values))
            _put(self._streaming[layer], places.streaming_slots, keys, values, turn)


class Touched:
    """Logical pages that new tokens went to, and how many tokens each holds now.

    Args:
        slots: of the new tokens, ascending within a page.
        logical_size: tokens of a logical page; None: nobody asks for them.
        device: of the pages.
    """

    def __init__(self, slots: list[int], logical_size: int | None, device: torch.device) -> None:
        held = {slot // logical_size: slot % logical_size + 1 for slot in slots} if logical_size else {}
        self.logical = torch.tensor(list(held), dtype=torch.int64, device=device)
        self.counts = torch.tensor(list(held.values()), dtype=torch.int64, device=device)


class ChunkPlaces:
    """Where the tokens of a stored chunk go.

    Args:
        first: the position of the chunk's first token.
        slots: slots of its tokens for retrieval heads.
        tokens: for streaming heads: which of the stored streaming tokens are wanted.
        positions: and their positions.
        streaming_slots: and their slots.
        touched: logical pages of `slots`.
    """

    def __init__(
        self,
        first: int,
        slots: list[int],
        tokens: list[int],
        positions: list[int],
        streaming_slots: list[int],
        touched: Touched,
    ) -> None:
        self.touched = touched
        self.positions = torch.arange(first, first + len(slots))
        self.slots = _as_index(slots)
        self.streaming_tokens = torch.tensor(tokens, dtype=torch.int64)
        self.streaming_positions = torch.tensor(positions, dtype=torch.int64)
        self.streaming_slots = torch.tensor(streaming_slots, dtype=torch.int64)


def default_budget(device: torch.device) -> int:
    """Bytes for KV pages when none are named: half of the memory that is free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return int(psutil.virtual_memory().available // 2)


def _as_index(places: list[int]) -> slice | Tensor:
    """A slice where the slots follow each other, which copies faster than an index."""
    if places and places[-1] - places[0] == len(places) - 1 and places == sorted(places):
        return slice(places[0], places[-1] + 1)
    return torch.tensor(places, dtype=torch.int64)


def _put(
    pages: tuple[Tensor, Tensor],
    places: slice | Tensor,
    keys: Tensor,
    values: Tensor,
    turn: Callable[..., Tensor] | None,
) -> None:
    """Write keys, turned, and values to their slots; where these follow each other, without a copy between."""
    key_slots, value_slots = (slots(x) for x in pages)
    value_slots[:, places] = values.to(value_slots)
    if turn is None:
        key_slots[:, places] = keys.to(key_slots)
    elif isinstance(places, slice):
        turn(keys, out=key_slots[:, places])
    else:
        key_slots[:, places] = turn(keys).to(key_slots)
