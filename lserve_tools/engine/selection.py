"""Page selection while decoding: each head reads the pages that may hold what its query asks for, up to a budget.

LServe, arXiv:2502.14866: pages are chosen by bounds of their keys (Quest, arXiv:2406.10774), and a choice serves
several steps. Streaming heads are not concerned; questions are prefilled over all pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lserve_kernels import OwnRuns, choose_pages, hidden, score_pages
from lserve_tools.engine.memory import KVMemory
from lserve_tools.engine.work import Selection, Work

LOGICAL_SIZE = 16  # tokens that share bounds


@dataclass(frozen=True, slots=True)
class Selector:
    """How pages are chosen.

    Args:
        most: pages that a retrieval head reads at a time, at least 2.
        reuse_interval: decoded tokens of a sequence that one choice serves.
    """

    most: int
    reuse_interval: int

    def split(self, work: Sequence[Work]) -> tuple[list[Work], list[Work]]:
        """Work that reads everything, and tokens being decoded that would see more pages than the budget has."""
        parts: tuple[list[Work], list[Work]] = [], []
        for item in work:
            parts[item.selection is not None and item.num_pages > self.most].append(item)
        return parts


class SelectedRows:
    """The rows of one step that read chosen pages only.

    Args:
        items: the work of these rows, those over the same context next to each other.
        selector: how many pages, and for how long.
        memory: the pages and their bounds.
        like: gives dtype and device.
    """

    def __init__(self, items: Sequence[Work], selector: Selector, memory: KVMemory, like: Tensor) -> None:
        self._items, self._most, self._memory, self._like = items, selector.most, memory, like
        held = pad_sequence([_held(item) for item in items], batch_first=True).to(like.device)
        self._pages, self._counts = held.unbind(-1)  # [B, P]
        num_pages = [item.num_pages for item in items]
        self._num_pages = torch.tensor(num_pages, device=like.device)
        self._rows = torch.tensor([item.row for item in items], device=like.device)
        interval = selector.reuse_interval
        due = [s.is_due(count, interval) for s, count in zip(self._selections, num_pages, strict=True)]
        self._groups = list(_by_context(items, due))

    @property
    def _selections(self) -> list[Selection]:
        return [item.selection for item in self._items if item.selection is not None]

    def runs(self, layer: int, query: Tensor) -> OwnRuns:
        """What each head and row reads in this layer; query `[H, G, T, D]`, the step's keys already in their pages."""
        for group in self._groups:
            self._choose(layer, query, group)
        columns = torch.stack([s.columns[layer] for s in self._selections], dim=1)  # [H, B, most]
        heads = columns.shape[0]
        pages, counts = (x.expand(heads, -1, -1).gather(2, columns) for x in (self._pages, self._counts))
        offset = torch.arange(self._memory.layout.page_size, device=counts.device)
        seen = (offset < counts[..., None]).flatten(2).transpose(0, 1)[:, :, None]
        bias = torch.zeros(seen.shape, dtype=self._like.dtype, device=seen.device)
        return OwnRuns(self._rows, pages, bias.masked_fill_(~seen, hidden(self._like.dtype)))

    def _choose(self, layer: int, query: Tensor, group: _Group) -> None:
        """Choose pages for rows over one context, whose bounds are read once for all of them."""
        mine, common = group.members, group.common_pages
        asked = query.index_select(2, self._rows[mine])
        bounds = self._memory.bounds(layer)
        shared = score_pages(asked, bounds, self._pages[mine[:1], :common], self._counts[mine[:1], :common])
        own = score_pages(asked, bounds, self._pages[mine, common:], self._counts[mine, common:])
        columns = choose_pages(torch.cat([shared, own], dim=-1), self._num_pages[mine], self._most)
        for place, selection in enumerate(group.selections):
            selection.columns[layer] = columns[:, place]


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that choose in this step and stand on the same context of `common_pages` pages."""

    members: Tensor
    selections: list[Selection]
    common_pages: int


def _by_context(items: Sequence[Work], due: Sequence[bool]) -> Iterator[_Group]:
    choosing = [(i, item) for i, item in enumerate(items) if due[i]]
    for _, members in groupby(choosing, key=lambda pair: pair[1].order):
        group = list(members)
        common = sum(len(node.table.pages) for node in group[0][1].path)
        selections = [item.selection for _, item in group if item.selection is not None]
        yield _Group(torch.tensor([i for i, _ in group]), selections, common)


def _held(work: Work) -> Tensor:
    """Pages of retrieval heads that the row sees, and the tokens in each `[P, 2]`, in the order of the prompt."""
    counts = work.table.valid(work.first + work.length)
    own = torch.tensor([work.table.pages[: len(counts)], counts]).T
    return torch.cat([*(node.held() for node in work.path), own])
