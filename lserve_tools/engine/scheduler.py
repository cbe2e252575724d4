"""Who is answered next: admission by free pages, loading of stored chunks, and the work of each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lserve_kernels import Written
from lserve_tools.engine.contexts import ContextNode, ContextTree
from lserve_tools.engine.memory import ChunkPlaces, KVMemory
from lserve_tools.engine.sequence import Sequence
from lserve_tools.engine.source import ChunkSource, StoredChunk
from lserve_tools.engine.tables import PageTable
from lserve_tools.engine.work import Work
from lserve_tools.errors import CapacityError, CorruptShardError
from lserve_tools.text.segments import Segment


class Scheduler:
    """Owns waiting and running sequences and the contexts that they stand on.

    Args:
        memory: the KV pages.
        tree: contexts in memory.
        source: stored chunks, or None.
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: tokens that one step computes, at most (a step always computes something).
    """

    def __init__(
        self,
        memory: KVMemory,
        tree: ContextTree,
        source: ChunkSource[Any] | None,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._memory, self._tree, self._source = memory, tree, source
        self._max_num_seqs, self._max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.warnings: list[str] = []

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences; those over the same context follow each other, in the order in which contexts appear."""
        groups: dict[tuple[Segment, ...], list[Sequence]] = {}
        for sequence in sequences:
            groups.setdefault(sequence.request.segments, []).append(sequence)
        self.waiting.extend(s for group in groups.values() for s in group)

    def admit(self) -> list[tuple[Sequence, CapacityError]]:
        """Let waiting sequences in while there is room; return those that can never be."""
        refused: list[tuple[Sequence, CapacityError]] = []
        while self.waiting and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            try:
                path = self.open_context(sequence.request.segments, sequence.tail_chunks)
            except CapacityError as error:
                refused.append((self.waiting.popleft(), error))
                continue
            if path is None:
                if not self.running:
                    raise RuntimeError("no sequence runs, all unused pages were freed, and the next one does not fit")
                break
            sequence.open_tail(path, self._memory)
            self.running.append(self.waiting.popleft())
        return refused

    def open_context(self, segments: tuple[Segment, ...], tail: tuple[int, ...]) -> list[ContextNode] | None:
        """Acquire the nodes of a context, loading or preparing those that are not there; None if they don't fit now.

        Raises:
            CapacityError: if they would not fit into empty memory either.
        """
        segments = tuple(s for s in segments if s.token_ids)  # a model without a template may have an empty prefix
        size, pool = self._memory.layout.page_size, self._memory.retrieval_pool
        whole = sum(PageTable.count(s.chunks, size) for s in segments) + PageTable.count(tail, size)
        if whole > pool.num_pages:
            raise CapacityError(
                whole * size, pool.num_pages * size, "KV pages", cure="Give more with --kv-memory, or fewer documents."
            )
        windows = self._memory.streaming_reserve * (len(segments) + 1)
        if windows > self._memory.streaming_pool.num_pages:
            raise CapacityError(
                windows * size,
                self._memory.streaming_pool.num_pages * size,
                "KV pages of streaming heads",
                cure="Give more with --kv-memory, or fewer documents.",
            )
        found, keys = self._tree.match(segments)
        self._tree.acquire(found)
        missing = segments[len(found) :]
        pages = sum(PageTable.count(s.chunks, size) for s in missing) + PageTable.count(tail, size)
        if not self._tree.evict(pages, self._streaming_demand(len(missing) + 1)):
            self._tree.release(found)
            return None
        path = list(found)
        for segment, chunk_keys in zip(missing, keys[len(found) :], strict=True):
            node = self._tree.add(segment, path[-1] if path else None, chunk_keys)
            self._tree.acquire([node])
            path.append(node)
            self._load(node)
        return path

    def next_work(self) -> list[tuple[Work, Sequence | ContextNode]]:
        """The tokens that the next step computes: answers first, then suffixes, then contexts."""
        work: list[tuple[Work, Sequence | ContextNode]] = []
        left = self._max_num_batched_tokens
        for sequence in sorted(self.running, key=lambda s: not s.decoding):
            if sequence.context_filled and (left > 0 or not work):
                item = sequence_work(sequence, max(left, 1))
                work.append((item, sequence))
                left -= item.length
        for node in self._tree.unfilled():
            if node.users and (node.parent is None or node.parent.filled) and (left > 0 or not work):
                item = node_work(node, max(left, 1), whole_pages=self._memory.layout.bits is not None)
                work.append((item, node))
                left -= item.length
        return work

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out and give its pages back; its context stays until the room is needed."""
        self.running.remove(sequence)
        sequence.close_tail(self._memory)
        self._tree.release(sequence.path)

    def _streaming_demand(self, new_owners: int) -> int:
        """Streaming pages that must be free for `new_owners` more owners."""
        reserve = self._memory.streaming_reserve
        growing = [s.streaming for s in self.running] + [node.streaming for node in self._tree.unfilled()]
        return reserve * new_owners + sum(max(0, reserve - len(table.entries)) for table in growing)

    def _load(self, node: ContextNode) -> None:
        """Fill a node's leading chunks from the source, as far as it has them undamaged."""
        if self._source is None:
            return
        records: list[StoredChunk] = []
        for chunk, key in enumerate(node.keys):
            first, last = node.table.first_tokens[chunk], node.table.first_tokens[chunk + 1]
            record = self._source.find(key, node.segment.token_ids[first:last])
            if record is None:
                break
            records.append(record)
        try:
            with _one_thread():
                for chunk in range(self._usable(records)):
                    self._load_chunk(self._source, node, chunk, records[chunk])
        except CorruptShardError as error:
            self.warnings.append(f"{error.message} {node.segment.name} is computed instead. {error.cure}")
            if self._memory.has_streaming:  # its pages hold the window of a chunk that cannot be gone on from
                node.num_filled = 0
                node.streaming.release()
        node.num_exact = node.num_filled

    def _usable(self, records: list[StoredChunk]) -> int:
        """Leading chunks after which computing can go on."""
        return max((i + 1 for i, record in enumerate(records) if record.has_tail), default=0)

    def _load_chunk(self, source: ChunkSource[Any], node: ContextNode, chunk: int, record: StoredChunk) -> None:
        first, last = node.table.first_tokens[chunk], node.table.first_tokens[chunk + 1]
        start = node.start + first
        kept = node.streaming.kept(start, node.start + last) if self._memory.has_streaming else []
        stored = [start + t for a, b in record.streaming_ranges for t in range(a, b)]
        wanted = [(i, p) for i, p in enumerate(stored) if any(a <= p < b for a, b in kept)]
        streaming_slots = [s for _, p in wanted for s in node.streaming.append(p, p + 1)]
        places = ChunkPlaces(
            torch.arange(start, node.start + last),
            self._memory.plan(node.table.slots(first, last)),
            torch.tensor([i for i, _ in wanted], dtype=torch.int64),
            torch.tensor([p for _, p in wanted], dtype=torch.int64),
            Written.plan(streaming_slots, self._memory.layout, self._memory.device),
        )
        for layer, kv in enumerate(source.load(record)):
            self._memory.load(layer, record, kv, places)
        node.num_filled = last
        node.streaming.slide(node.start + last)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch to one thread: the source decompresses in threads of its own, which torch's would stall."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def sequence_work(sequence: Sequence, most: int) -> Work:
    """The next tokens of a sequence's tail, at most `most`."""
    tail = sequence.tail
    first = sequence.num_filled
    last = min(len(tail), first + most)
    return Work(
        token_ids=tail[first:last],
        first=first,
        start=sequence.start + first,
        path=sequence.path,
        table=sequence.table,
        streaming=sequence.streaming,
        order=tuple(node.serial for node in sequence.path),
        selection=sequence.selection if sequence.decoding else None,
        open_page=sequence.open_page,
    )


def node_work(node: ContextNode, most: int, *, whole_pages: bool = False) -> Work:
    """The next tokens of a node, at most `most` and none beyond a chunk's end.

    Args:
        whole_pages: end with a page, one at least, so that none is left open.
    """
    first = node.num_filled
    chunk_end = next(end for end in node.table.first_tokens if end > first)
    if whole_pages:
        most = max(1, most // node.table.page_size) * node.table.page_size
    last = min(chunk_end, first + most)
    path = node.path()
    return Work(
        token_ids=node.segment.token_ids[first:last],
        first=first,
        start=node.start + first,
        path=path[:-1],
        table=node.table,
        streaming=node.streaming,
        order=tuple(n.serial for n in path),
    )
