"""The tree of contexts in memory: a node is a segment after all segments before it, shared by whoever has the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import torch
from torch import Tensor

from lserve_kernels import hidden
from lserve_tools.cache.keys import chain_keys
from lserve_tools.engine.memory import KVMemory
from lserve_tools.engine.tables import PageTable
from lserve_tools.text.segments import Segment

_serial = count()


class ContextNode:
    """One segment in memory after its parent's.

    Args:
        segment: its tokens.
        parent: the segment before it, or None for the prefix.
        keys: prefix keys of its chunks; the last one is the node's own.
        memory: where its pages lie.
    """

    def __init__(self, segment: Segment, parent: ContextNode | None, keys: list[bytes], memory: KVMemory) -> None:
        self.segment, self.parent, self.keys = segment, parent, keys
        self.serial = next(_serial)
        self.start = parent.end if parent else 0
        self.table = memory.new_table(segment.chunks)
        self.streaming = memory.new_streaming_table()
        self.num_filled = 0
        self.num_exact = 0
        self.users = 0
        self.last_used = 0
        self.children: dict[bytes, ContextNode] = {}
        self._run: tuple[Tensor, Tensor | None] | None = None
        self._held: Tensor | None = None

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + len(self.segment.token_ids)

    @property
    def filled(self) -> bool:
        """Whether the KV of all its tokens is there."""
        return self.num_filled == len(self.segment.token_ids)

    def path(self) -> list[ContextNode]:
        """The nodes from the root to this one."""
        return [*(self.parent.path() if self.parent else []), self]

    def next_chunk(self) -> int:
        """Index of the chunk that is filled next."""
        return self.table.first_tokens.index(self.num_filled)

    def run(self, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Page ids and bias of a filled node, made once."""
        if self._run is None:
            self._run = page_run(self.table, len(self.segment.token_ids), like)
        return self._run

    def held(self) -> Tensor:
        """Page ids and the tokens in each `[P, 2]` of a filled node, made once."""
        if self._held is None:
            counts = self.table.valid(len(self.segment.token_ids))
            self._held = torch.tensor([self.table.pages, counts]).T
        return self._held


class ContextTree:
    """All nodes in memory.

    Args:
        memory: where pages lie.
        root_key: of the store, so that node keys are chunk keys.
    """

    def __init__(self, memory: KVMemory, root_key: bytes) -> None:
        self._memory = memory
        self._root_key = root_key
        self._roots: dict[bytes, ContextNode] = {}
        self._clock = count(1)

    def match(self, segments: Sequence[Segment]) -> tuple[list[ContextNode], list[list[bytes]]]:
        """The nodes that are there for the leading segments, and the chunk keys of every segment."""
        nodes: list[ContextNode] = []
        keys: list[list[bytes]] = []
        children, previous = self._roots, self._root_key
        for segment in segments:
            keys.append(chain_keys(previous, segment.token_ids, segment.chunks))
            previous = keys[-1][-1]
            if len(nodes) == len(keys) - 1 and previous in children:
                nodes.append(children[previous])
                children = nodes[-1].children
        return nodes, keys

    def add(self, segment: Segment, parent: ContextNode | None, keys: list[bytes]) -> ContextNode:
        """Put a new, unfilled node after `parent`; takes its pages."""
        node = ContextNode(segment, parent, keys, self._memory)
        (parent.children if parent else self._roots)[keys[-1]] = node
        return node

    def acquire(self, nodes: Sequence[ContextNode]) -> None:
        """Keep `nodes` in memory for one more user."""
        now = next(self._clock)
        for node in nodes:
            node.users += 1
            node.last_used = now

    def release(self, nodes: Sequence[ContextNode]) -> None:
        """End one use of `nodes`; an unfilled one that nobody else waits for is dropped."""
        for node in reversed(nodes):
            node.users -= 1
            if not node.users and not node.filled:
                self._drop(node)

    def evict(self, pages: int, streaming_pages: int) -> bool:
        """Drop unused nodes, the longest unused first, until so many pages are free; False if they cannot be."""
        while self._memory.retrieval_pool.num_free < pages or self._memory.streaming_pool.num_free < streaming_pages:
            unused = self._unused()
            if not unused:
                return False
            self._drop(min(unused, key=lambda node: node.last_used))
        return True

    def evict_unused(self) -> None:
        """Drop every node that nobody uses."""
        while unused := self._unused():
            for node in unused:
                self._drop(node)

    def _unused(self) -> list[ContextNode]:
        return [node for node in self._walk() if not node.users and not node.children]

    def unfilled(self) -> list[ContextNode]:
        """Nodes whose KV is not all there, parents first."""
        return [node for node in self._walk() if not node.filled]

    def _walk(self) -> Iterator[ContextNode]:
        pending = list(self._roots.values())
        for node in pending:
            yield node
            pending.extend(node.children.values())

    def _drop(self, node: ContextNode) -> None:
        node.table.release()
        node.streaming.release()
        del (node.parent.children if node.parent else self._roots)[node.keys[-1]]


def page_run(table: PageTable, num_tokens: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Page ids `[P]` of a table's first tokens, and the bias `[1, 1, 1, P * page_size]` that hides its empty slots."""
    valid = table.valid(num_tokens)
    pages = torch.tensor(table.pages[: len(valid)], dtype=torch.int64, device=like.device)
    if all(n == table.page_size for n in valid):
        return pages, None
    empty = torch.arange(table.page_size) >= torch.tensor(valid)[:, None]
    bias = torch.zeros(empty.shape, dtype=like.dtype).masked_fill_(empty, hidden(like.dtype))
    return pages, bias.flatten()[None, None, None].to(like.device)
