"""`--dry-run`: what a run would read, reuse and compute, told without loading the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lserve_tools.batch.plan import PlannedLine
from lserve_tools.batch.reader import Batch
from lserve_tools.batch.setup import Setup
from lserve_tools.cache.keys import chain_keys
from lserve_tools.cache.store import CacheStore
from lserve_tools.engine.sequence import Request
from lserve_tools.schema import RunSummary
from lserve_tools.text.segments import Segment

Talk = Callable[[str], None]


def forecast(
    setup: Setup,
    batch: Batch,
    planned: Sequence[PlannedLine],
    warnings: Sequence[str],
    summary: RunSummary,
    talk: Talk,
    detail: Talk,
) -> None:
    """Say what would be done, into `summary`; prompts go to `detail` as text.

    Tokens count as computed for each line that reads them, though lines over the same documents share them.
    """
    summary.dry_run = True
    summary.warnings.extend(warnings)
    for warning in warnings:
        talk(f"Warning: {warning}")
    for bad in batch.bad:
        talk(f"Error: {bad.message}")
    summary.bad_lines = summary.failed = len(batch.bad)
    hits = _Hits(setup.source)
    for line in planned:
        request = line.request
        exact = hits.count(request)
        summary.prompt_tokens += request.num_prompt_tokens
        summary.tokens.exact += exact
        summary.tokens.computed += request.num_prompt_tokens - exact
        longest = request.num_prompt_tokens + request.sampling.max_tokens
        summary.longest_prompt = max(summary.longest_prompt, longest)
        ids = [t for s in request.segments for t in s.token_ids] + list(request.suffix_ids)
        detail(f"--- {line.place} ({line.question.id}): {len(ids):,} tokens, {exact:,} of them in the cache")
        detail(str(setup.tokenizer.decode(ids)))
    summary.kv_bytes = summary.longest_prompt * setup.choice.limits(setup.model).kv_bytes


class _Hits:
    """Counts tokens of prompts that the cache has; each segment after the same ones is looked up once."""

    def __init__(self, store: CacheStore | None) -> None:
        self._store = store
        self._known: dict[tuple[int, ...], tuple[int, bytes | None]] = {}

    def count(self, request: Request) -> int:
        """Leading tokens of a prompt that the cache has."""
        if self._store is None:
            return 0
        place: tuple[int, ...] = ()
        total, key = 0, self._store.root_key
        for segment in request.segments:
            place = (*place, id(segment))
            if place not in self._known:
                self._known[place] = self._look_up(self._store, key, segment)
            found, after = self._known[place]
            total += found
            if after is None:
                break
            key = after
        return total

    def _look_up(self, store: CacheStore, previous: bytes, segment: Segment) -> tuple[int, bytes | None]:
        """Tokens of a segment that are there, and the key after it if all are."""
        keys = chain_keys(previous, segment.token_ids, segment.chunks)
        found = usable = 0
        for key, length in zip(keys, segment.chunks, strict=True):
            record = store.find(key, segment.token_ids[found : found + length])
            if record is None:
                return usable, None
            found += length
            usable = found if record.has_tail else usable
        return usable, keys[-1] if keys and usable == found else None
