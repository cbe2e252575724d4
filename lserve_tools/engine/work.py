"""What a step computes for one owner, and what a decoding sequence carries from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lserve_tools.engine.contexts import ContextNode
from lserve_tools.engine.tables import PageTable, StreamingPage, StreamingTable


@dataclass(slots=True)
class Selection:
    """What one sequence reads until it chooses again.

    Args:
        columns: per layer, the chosen pages `[H, most]`, counted in the order of the prompt.
        num_pages: pages there were when they were chosen.
        served: steps that the choice has served.
    """

    columns: dict[int, Tensor] = field(default_factory=dict)
    num_pages: int = 0
    served: int = 0

    def is_due(self, num_pages: int, reuse_interval: int) -> bool:
        """Count a step; True if pages are to be chosen in it: the interval is over, or a new page was opened."""
        due = self.served % reuse_interval == 0 or num_pages != self.num_pages
        self.served, self.num_pages = (1 if due else self.served + 1), num_pages
        return due


@dataclass(slots=True)
class Work:
    """Tokens of one owner (a context node or a sequence's tail) that a step computes.

    Args:
        token_ids: the tokens.
        first: index of the first of them in the owner's own tokens.
        start: its position in the prompt.
        path: the filled nodes before the owner, root first.
        table, streaming: the owner's own pages.
        open_page: where the owner's last page lies until it is full, if pages are quantized; contexts have none.
        selection: of a sequence that decodes and may choose what it reads.
        row: first packed row; set by the step.
    """

    token_ids: Sequence[int]
    first: int
    start: int
    path: list[ContextNode]
    table: PageTable
    streaming: StreamingTable
    order: tuple[int, ...]
    selection: Selection | None = None
    open_page: int | None = None
    row: int = 0

    @property
    def length(self) -> int:
        """Tokens computed."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.length

    def slots(self) -> list[int]:
        """Slots of the tokens for retrieval heads."""
        return self.table.slots(self.first, self.first + self.length)

    @property
    def num_pages(self) -> int:
        """Pages of retrieval heads that the last token sees."""
        size = self.table.page_size
        return sum(len(node.table.pages) for node in self.path) + -(-(self.first + self.length) // size)

    def streaming_entries(self) -> list[StreamingPage]:
        """Pages of streaming heads of which the first token sees something, in order of position."""
        tables = [*(node.streaming for node in self.path), self.streaming]
        return [e for table in tables for e in table.entries if self.streaming.visible(e, self.start)]
