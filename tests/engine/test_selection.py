"""Which pages decoding rows read, held to scores written out one key at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lserve_tools.engine.llm import LLM, EngineOptions
from lserve_tools.engine.selection import SelectedRows, Selector
from lserve_tools.engine.sequence import Request
from lserve_tools.engine.work import Work
from lserve_tools.text.segments import Segment
from tests.helpers.engine import Prompts, dense, loaded, tiny_model
from tests.helpers.oracles import assert_same_tokens

BUDGET, LENGTH, SIZE, LOGICAL = 1024, 6000, 64, 16


@dataclass
class Seen:
    """What one row read in one layer and step, and what a brute-force score of its pages says."""

    id: str
    layer: int
    columns: Tensor
    scores: Tensor
    reselected: bool


def brute_force(query: Tensor, keys: Tensor, work: Work) -> Tensor:
    """Scores of the row's pages `[H, P]`, from its keys alone, in the order of the prompt."""
    tables = [(node.table, len(node.segment.token_ids)) for node in work.path] + [(work.table, work.first + 1)]
    scores = []
    for table, filled in tables:
        places = table.slots(0, filled)
        flat = keys[:, places]
        for page in dict.fromkeys(place // SIZE for place in places):
            mine = [i for i, place in enumerate(places) if place // SIZE == page]
            bounds = []
            for first in range(0, len(mine), LOGICAL):
                group = flat[:, mine[first : first + LOGICAL]]
                low, high = group.amin(1)[:, None], group.amax(1)[:, None]
                bounds.append(torch.maximum(query * low, query * high).sum(-1).amax(1))
            scores.append(torch.stack(bounds).amax(0))
    return torch.stack(scores, dim=1)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Every choice that is made."""
    found: list[Seen] = []
    runs = SelectedRows.runs

    def watching(self: SelectedRows, layer: int, query: Tensor) -> object:
        answer = runs(self, layer, query)
        pages = self._memory.retrieval_pages(layer)
        keys, _ = pages.read(torch.arange(self._memory.retrieval_pool.num_pages))
        choosing = {int(i) for group in self._groups for i in group.members}
        for place, work in enumerate(self._items):
            assert work.selection is not None
            scores = brute_force(query[:, :, work.row], keys, work)
            found.append(Seen(str(work.order), layer, work.selection.columns[layer], scores, place in choosing))
        return answer

    monkeypatch.setattr(SelectedRows, "runs", watching)
    return found


def long_requests(prompts: Prompts) -> list[Request]:
    """Rows over 6,000, 6,000 (the same), 2,100 and 90 tokens: the last is under the budget."""
    long = Segment("long", prompts.ids(LENGTH), (1000,) * 6)
    middle = Segment("middle", prompts.ids(2100), (1100, 1000))
    return [
        prompts.request("a", (long,), 9, max_tokens=6),
        prompts.request("b", (long,), 40, max_tokens=6),
        prompts.request("c", (middle,), 3, max_tokens=6),
        prompts.request("d", (), 80, max_tokens=6),
    ]


def test_chosen_pages_are_those_that_a_brute_force_score_picks(seen: list[Seen]) -> None:
    model = tiny_model(max_position_embeddings=8192)
    options = EngineOptions(kv_memory=1 << 26, token_budget=BUDGET, reuse_interval=2)
    assert len(list(LLM(loaded(model), options=options).generate(long_requests(Prompts())))) == 4
    fresh = [choice for choice in seen if choice.reselected]
    assert len(fresh) < len(seen)
    assert {choice.scores.shape[1] > 90 for choice in fresh} == {True, False}
    for choice in fresh:
        last = choice.scores.shape[1] - 1
        assert choice.columns.shape[1] == BUDGET // SIZE
        for head, columns in enumerate(choice.columns.tolist()):
            assert columns == sorted(set(columns))
            assert {0, last} <= set(columns)
            scores = choice.scores[head]
            free = [c for c in columns if c not in (0, last)]
            others = [c for c in range(1, last) if c not in columns]
            assert scores[free].min() >= scores[others].max() - 1e-4


def test_answers_do_not_depend_on_neighbours(seen: list[Seen]) -> None:
    model = tiny_model(max_position_embeddings=8192)
    requests = long_requests(Prompts())
    options = EngineOptions(kv_memory=1 << 26, token_budget=BUDGET)
    together = {c.id: c.token_ids for c in LLM(loaded(model), options=options).generate(requests)}
    alone = {c.id: c.token_ids for r in requests for c in LLM(loaded(model), options=options).generate([r])}
    assert together == alone


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_budget_as_long_as_the_prompt_is_dense(family: str, seen: list[Seen]) -> None:
    model, requests = tiny_model(family), Prompts().mixed()
    options = EngineOptions(kv_memory=1 << 24, token_budget=1024)
    found = {c.id: list(c.token_ids) for c in LLM(loaded(model), options=options).generate(requests)}
    assert not seen
    for request in requests:
        assert_same_tokens(found[request.id], dense(model, request), 1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_choosing_all_pages_is_dense(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of chosen pages itself, with nothing left out."""
    model, prompts = tiny_model(family), Prompts()
    request = prompts.request("q", (prompts.short, prompts.long), 5, max_tokens=12)
    pages = 1 + (2 + 1) + (2 + 1 + 3) + 1

    def everything(self: Selector, work: list[Work]) -> tuple[list[Work], list[Work]]:
        return [w for w in work if w.selection is None], [w for w in work if w.selection is not None]

    monkeypatch.setattr(Selector, "split", everything)
    options = EngineOptions(kv_memory=1 << 24, token_budget=pages * SIZE, reuse_interval=3)
    (answer,) = LLM(loaded(model), options=options).generate([request])
    assert_same_tokens(list(answer.token_ids), dense(model, request), 1e-4)


def test_a_choice_serves_its_interval_and_ends_with_a_new_page(seen: list[Seen]) -> None:
    model, prompts = tiny_model(), Prompts()
    request = prompts.request("q", (prompts.long,), 58, max_tokens=14)
    options = EngineOptions(kv_memory=1 << 24, token_budget=128, reuse_interval=4)
    list(LLM(loaded(model), options=options).generate([request]))
    steps = [choice.reselected for choice in seen if choice.layer == 0]
    # Tokens 59 … 64 fill the page; the seventh decoded token opens the next one.
    assert steps == [True, False, False, False, True, False, True, False, False, False, True, False, False]


def test_pages_used_again_have_bounds_of_their_own(seen: list[Seen]) -> None:
    """Memory for one context at a time: pages hold other documents' keys before."""
    model, prompts = tiny_model(), Prompts()
    options = EngineOptions(kv_memory=1 << 19, token_budget=192, max_num_seqs=1)
    llm = LLM(loaded(model), options=options)
    documents = [Segment(f"d{i}", prompts.ids(400), (250, 150)) for i in range(6)]
    list(llm.generate([prompts.request(f"q{i}", (d,), 5, max_tokens=3) for i, d in enumerate(documents)]))
    assert llm._memory.retrieval_pool.num_pages < 6 * 8
    for choice in seen:
        chosen = choice.scores.gather(1, choice.columns)
        assert (chosen.amax(1) >= choice.scores[:, 1:-1].amax(1) - 1e-4).all() or not choice.reselected


@pytest.mark.parametrize(
    ("options", "why"),
    [({"token_budget": 127}, "two pages"), ({"token_budget": 200, "page_size": 24}, "multiple of 16")],
)
def test_budgets_that_cannot_be_met_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        EngineOptions(**options)
