"""One forward pass over packed tokens: who sees which pages, and the attention that follows from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lserve_kernels import (
    NOTHING,
    BandMask,
    OwnRuns,
    Partial,
    SharedRun,
    Written,
    band_mask,
    causal_attention,
    hidden,
    paged_attention,
    slots,
    streaming_attention,
)
from lserve_tools.engine.contexts import ContextNode, page_run
from lserve_tools.engine.layers import LayerHeads
from lserve_tools.engine.memory import KVMemory
from lserve_tools.engine.selection import SelectedRows, Selector
from lserve_tools.engine.tables import PageTable
from lserve_tools.engine.work import Work
from lserve_tools.models.attention import AttentionCall

Capture = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A stretch of rows that attend to each other causally, and what streaming heads see before it."""

    work: Work
    positions: Tensor  # of the keys in `slots`, ascending
    slots: Tensor


class Step:
    """Answers the attention of all layers for one packed batch.

    Rows are ordered so that sequences over the same context follow each other: whatever pages they share is one run.

    Args:
        work: what to compute; their rows are set here, and room for their keys is taken.
        memory: the pages.
        group: query heads a KV head.
        like: gives dtype and device.
        selector: lets decoding rows choose what they read; None lets them read everything.
        capture: called with (layer, keys `[Hkv, T, D]`, values `[Hkv, T, D]`) of every layer.
    """

    def __init__(
        self,
        work: list[Work],
        memory: KVMemory,
        group: int,
        like: Tensor,
        selector: Selector | None = None,
        capture: Capture | None = None,
    ) -> None:
        work = sorted(work, key=lambda item: item.order)
        reading_all, choosing = selector.split(work) if selector else (work, [])
        self.work = reading_all + choosing
        self._memory, self._group, self._like, self._capture = memory, group, like, capture
        row = 0
        for item in self.work:
            item.row, row = row, row + item.length
        self.num_rows = row
        device = like.device
        self.token_ids = torch.tensor([t for item in self.work for t in item.token_ids], device=device)
        self.positions = torch.tensor([p for item in self.work for p in range(item.start, item.end)], device=device)
        self._written = self._plan_written()
        self._selected: SelectedRows | None = None
        if selector and choosing:
            self._selected = SelectedRows(choosing, selector, memory, like)
        self._shared = self._shared_runs(reading_all)
        self._own = self._own_runs(reading_all)
        if memory.has_streaming:
            self._plan_streaming()
        self._masks: dict[tuple[int, int, int], BandMask] = {}
        self._window_runs: dict[tuple[int, int], list[OwnRuns]] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        """Write the layer's keys and values into their pages and attend; `[T, Hq, D]`."""
        if self._capture is not None:
            self._capture(call.layer, call.key, call.value)
        heads = self._memory.layers[call.layer]
        query = call.query.unflatten(0, (-1, self._group))
        if not len(heads.streaming):
            return _flat(self._attend_retrieval(call, query, call.key, call.value))
        if not len(heads.retrieval):
            return _flat(self._attend_streaming(call, heads, query, call.key, call.value))
        out = query.new_empty(query.shape[2], *query.shape[:2], query.shape[3]).permute(1, 2, 0, 3)
        for index, method in ((heads.retrieval, self._attend_retrieval), (heads.streaming, None)):
            mine = query[index], call.key[index], call.value[index]
            out[index] = method(call, *mine) if method else self._attend_streaming(call, heads, *mine)
        return _flat(out)

    def _attend_retrieval(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._memory.write(call.layer, self._written, key, value)
        total = _nothing_yet(query)
        for item in self.work:
            if item.length > 1:
                rows = slice(item.row, item.row + item.length)
                part = causal_attention(
                    query[:, :, rows], key[:, rows], value[:, rows], scale=call.scale, softcap=call.softcap
                )
                total.out[:, :, rows], total.lse[:, :, rows] = part
        own = [*self._own, self._selected.runs(call.layer, query)] if self._selected else self._own
        pages = self._memory.retrieval_pages(call.layer)
        paged_attention(query, pages, self._shared, own, total, scale=call.scale, softcap=call.softcap)
        return total.out

    def _attend_streaming(
        self, call: AttentionCall, heads: LayerHeads, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        pages = self._memory.streaming_pages(call.layer)
        pages.write(self._kept, key.index_select(1, self._kept_rows), value.index_select(1, self._kept_rows))
        total = _nothing_yet(query)
        for index, chunk in enumerate(self._chunks):
            rows = slice(chunk.work.row, chunk.work.row + chunk.work.length)
            part = self._attend_chunk(call, heads, index, query[:, :, rows], key[:, rows], value[:, rows])
            total.out[:, :, rows], total.lse[:, :, rows] = part
        runs = self._runs_of_window(heads.sink, heads.recent)
        paged_attention(query, pages, [], runs, total, scale=call.scale, softcap=call.softcap)
        return total.out

    def _attend_chunk(
        self, call: AttentionCall, heads: LayerHeads, index: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Partial:
        """Λ attention of one chunk: sink keys and the band before it come from pages, the rest is its own."""
        chunk = self._chunks[index]
        sink, recent, start = heads.sink, heads.recent, chunk.work.start
        is_past = (chunk.positions >= max(sink, start - recent + 1)) & (chunk.positions < start)
        stored_sink, past = chunk.slots[chunk.positions < sink], chunk.slots[is_past]
        own_sink = max(0, min(sink, chunk.work.end) - start)
        if (index, sink, recent) not in self._masks:
            self._masks[index, sink, recent] = band_mask(
                start, chunk.work.length, len(past), len(stored_sink) + own_sink, sink, recent, self._group, self._like
            )
        banded, sinks = [], []
        pages = self._memory.streaming_pages(call.layer)
        for flat, new in ((slots(pages.keys), key), (slots(pages.values), value)):
            banded.append(torch.cat([flat[:, past], new], dim=1))
            sinks.append(torch.cat([flat[:, stored_sink], new[:, :own_sink]], dim=1))
        mask = self._masks[index, sink, recent]
        return streaming_attention(
            query, banded[0], banded[1], sinks[0], sinks[1], mask, scale=call.scale, softcap=call.softcap
        )

    def _plan_written(self) -> Written:
        """Where the tokens go; of a sequence's pages the one that is not full stays open."""
        places: list[int] = []
        open_pages: dict[int, int] = {}
        for item in self.work:
            mine = item.slots()
            places += mine
            if item.open_page is not None:
                open_pages |= dict.fromkeys((slot // item.table.page_size for slot in mine), item.open_page)
        return self._memory.plan(places, open_pages)

    def _shared_runs(self, work: list[Work]) -> list[SharedRun]:
        """Runs of the nodes that stand before the rows, and of what an owner of several rows has computed before."""
        rows: dict[int, tuple[int, int]] = {}
        nodes: dict[int, ContextNode] = {}
        for item in work:
            for node in item.path:
                nodes[node.serial] = node
                first, _ = rows.get(node.serial, (item.row, 0))
                rows[node.serial] = first, item.row + item.length
        runs = [self._shared_run(rows[serial], node.table, node.run(self._like)) for serial, node in nodes.items()]
        for item in work:
            if item.length > 1 and item.first:
                before = page_run(item.table, item.first, self._like)
                runs.append(self._shared_run((item.row, item.row + item.length), item.table, before))
        return runs

    def _shared_run(self, rows: tuple[int, int], table: PageTable, run: tuple[Tensor, Tensor | None]) -> SharedRun:
        return SharedRun(*rows, run[0], table.pages[0] if table.contiguous else None, run[1])

    def _own_runs(self, work: list[Work]) -> list[OwnRuns]:
        """Tails of the rows that are computed alone, those of about the same length together."""
        buckets: dict[int, list[Work]] = defaultdict(list)
        for item in work:
            if item.length == 1:
                buckets[(item.first // item.table.page_size).bit_length()].append(item)
        size, runs = self._memory.layout.page_size, []
        for items in buckets.values():
            filled = torch.tensor([item.first + 1 for item in items])
            count = -(-int(filled.max()) // size)
            pages = [(item.table.pages + [item.table.pages[0]] * count)[:count] for item in items]
            seen = torch.arange(count * size) < filled[:, None]
            runs.append(self._own_run([item.row for item in items], pages, seen))
        return runs

    def _own_run(self, rows: list[int], pages: list[list[int]], seen: Tensor) -> OwnRuns:
        bias = torch.zeros(seen.shape, dtype=self._like.dtype).masked_fill_(~seen, hidden(self._like.dtype))
        device = self._like.device
        return OwnRuns(
            torch.tensor(rows, device=device), torch.tensor(pages, device=device), bias[:, None, None].to(device)
        )

    def _plan_streaming(self) -> None:
        """Take room for the keys that later tokens can see, and note what the rows see before themselves."""
        self._chunks: list[_Chunk] = []
        self._alone = [item for item in self.work if item.length == 1]
        rows: list[int] = []
        places: list[int] = []
        for item in self.work:
            if item.length > 1:
                self._chunks.append(self._chunk(item))
            for first, last in (
                item.streaming.kept(item.start, item.end) if item.length > 1 else [(item.start, item.end)]
            ):
                rows += range(item.row + first - item.start, item.row + last - item.start)
                places += item.streaming.append(first, last)
        device = self._like.device
        self._kept_rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self._kept = Written.plan(places, self._memory.layout, device)
        self._seen_pages = [item.streaming_entries() for item in self._alone]

    def _chunk(self, item: Work) -> _Chunk:
        size, device = self._memory.layout.page_size, self._like.device
        entries = item.streaming_entries()
        positions = [e.base + i for e in entries for i in range(e.count)]
        places = [e.page * size + i for e in entries for i in range(e.count)]
        return _Chunk(
            item,
            torch.tensor(positions, dtype=torch.int64, device=device),
            torch.tensor(places, dtype=torch.int64, device=device),
        )

    def _runs_of_window(self, sink: int, recent: int) -> list[OwnRuns]:
        """What single rows see of streaming pages under these windows."""
        if not self._alone:
            return []
        if (sink, recent) not in self._window_runs:
            size = self._memory.layout.page_size
            count = max(len(entries) for entries in self._seen_pages)
            pages = [([e.page for e in entries] + [0] * count)[:count] for entries in self._seen_pages]
            base = torch.tensor([([e.base for e in entries] + [0] * count)[:count] for entries in self._seen_pages])
            filled = torch.tensor([([e.count for e in entries] + [0] * count)[:count] for entries in self._seen_pages])
            offset = torch.arange(size)
            position = base[..., None] + offset
            at = torch.tensor([item.start for item in self._alone])[:, None, None]
            seen = (offset < filled[..., None]) & ((position < sink) | (at - position < recent))
            self._window_runs[sink, recent] = [
                self._own_run([item.row for item in self._alone], pages, seen.flatten(1))
            ]
        return self._window_runs[sink, recent]


def _nothing_yet(query: Tensor) -> Partial:
    """Totals of rows that have seen no key: `[H, G, T, D]` that lie in memory as `[T, H, G, D]`, and `[H, G, T]`."""
    heads, group, rows, width = query.shape
    out = query.new_zeros(rows, heads, group, width).permute(1, 2, 0, 3)
    return Partial(out, torch.full((heads, group, rows), NOTHING, dtype=torch.float32, device=query.device))


def _flat(out: Tensor) -> Tensor:
    """`[H, G, T, D]` to `[T, H * G, D]`."""
    return out.permute(2, 0, 1, 3).flatten(1, 2)
