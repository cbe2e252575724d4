"""Requests, the sequences that answer them, and their completions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from lserve_tools.engine.contexts import ContextNode
from lserve_tools.engine.memory import KVMemory
from lserve_tools.engine.sampling import SamplingParams
from lserve_tools.engine.work import Selection
from lserve_tools.errors import LServeError
from lserve_tools.text.segments import Segment


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: segments that may be shared, then a suffix of its own.

    Args:
        id: unique among the requests of a run.
        segments: the prefix first, then the documents in order.
        suffix_ids: the question and the generation prompt; at least one token.
        sampling: how the answer is chosen.
    """

    id: str
    segments: tuple[Segment, ...]
    suffix_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        if not self.suffix_ids:
            raise ValueError(f"request {self.id}: the suffix must hold a token")

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(len(s.token_ids) for s in self.segments) + len(self.suffix_ids)


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to a request.

    Args:
        finish_reason: `stop`, `length`, or `error` with `error` set.
        token_ids: generated tokens, the end token not among them.
        exact_tokens: prompt tokens whose KV came from the source, at the place where it was computed.
        computed_tokens: prompt tokens whose KV this run computed.
        time_to_first_token: seconds from submission.
        seconds: from submission to the last token.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    exact_tokens: int = 0
    computed_tokens: int = 0
    time_to_first_token: float = 0.0
    seconds: float = 0.0
    error: LServeError | None = None


class Sequence:
    """A request that is being answered: the nodes of its context and its own tail of suffix and answer.

    Args:
        request: what is answered.
        max_tokens: of the answer, already cut to the longest prompt that the model takes.
    """

    def __init__(self, request: Request, max_tokens: int, submitted: float) -> None:
        self.request = request
        self.max_tokens = max_tokens
        self.submitted = submitted
        self.path: list[ContextNode] = []
        self.token_ids: list[int] = []
        self.num_filled = 0
        self.first_token_at: float | None = None
        self.selection = Selection()

    def open_tail(self, path: list[ContextNode], memory: KVMemory) -> None:
        """Take the context and the pages for suffix and answer."""
        self.path = path
        self.table = memory.new_table(self.tail_chunks)
        self.streaming = memory.new_streaming_table()
        self.open_page = memory.open_pool.allocate(1)[0] if memory.layout.bits else None

    def close_tail(self, memory: KVMemory) -> None:
        """Give the pages back."""
        self.table.release()
        self.streaming.release()
        if self.open_page is not None:
            memory.open_pool.free([self.open_page])

    @property
    def tail_chunks(self) -> tuple[int, ...]:
        """Room for the suffix and the whole answer, as one chunk."""
        return (len(self.request.suffix_ids) + self.max_tokens,)

    @property
    def start(self) -> int:
        """Position of the first suffix token."""
        return self.path[-1].end if self.path else 0

    @property
    def tail(self) -> tuple[int, ...]:
        """Suffix and answer so far."""
        return (*self.request.suffix_ids, *self.token_ids)

    @property
    def context_filled(self) -> bool:
        """Whether the suffix can be computed."""
        return all(node.filled for node in self.path)

    @property
    def decoding(self) -> bool:
        """Whether only the last token is still to be computed."""
        return self.num_filled >= len(self.request.suffix_ids)

    def add_token(self, token: int) -> None:
        """Append a generated token."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.token_ids.append(token)

    def complete(self, text: str, token_ids: list[int], reason: str) -> Completion:
        """The completion of this sequence."""
        exact = sum(node.num_exact for node in self.path)
        prompt = self.request.num_prompt_tokens
        return Completion(
            id=self.request.id,
            text=text,
            token_ids=tuple(token_ids),
            finish_reason=reason,
            prompt_tokens=prompt,
            exact_tokens=exact,
            computed_tokens=prompt - exact,
            time_to_first_token=(self.first_token_at or time.perf_counter()) - self.submitted,
            seconds=time.perf_counter() - self.submitted,
        )
