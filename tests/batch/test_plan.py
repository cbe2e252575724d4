from __future__ import annotations

import json
from typing import Any

from lserve_tools.batch.library import CachedLibrary
from lserve_tools.batch.plan import PlannedLine, Planner, answer_found
from lserve_tools.batch.reader import Batch, parse_batch
from lserve_tools.engine.sampling import SamplingParams
from lserve_tools.schema import BatchLine
from lserve_tools.text.prompts import document_segment, render_prompt_format
from tests.helpers.small_tokenizer import NO_SYSTEM, small_tokenizer

TOKENIZER = small_tokenizer()
DOCUMENTS = [document_segment(TOKENIZER, name, f"text of {name}") for name in ("a.md", "b.md")]


def plan(*lines: dict[str, Any], system: str | None = None, cached: bool = True) -> tuple[list[PlannedLine], Batch]:
    batch = parse_batch([json.dumps(line).encode() for line in lines], "batch.jsonl")
    prompt = render_prompt_format(TOKENIZER, system)
    planner = Planner(
        CachedLibrary(DOCUMENTS), TOKENIZER, prompt, SamplingParams(max_tokens=9, temperature=0.5), cached=cached
    )
    return planner.plan(batch), batch


def prompt_text(planned: PlannedLine) -> str:
    request = planned.request
    ids = [t for s in request.segments for t in s.token_ids] + list(request.suffix_ids)
    return str(TOKENIZER.decode(ids))


def test_a_prompt_is_prefix_documents_in_order_and_question() -> None:
    (planned,), _ = plan({"question": "Who?", "documents": ["b.md", "a.md"], "context": "more"})
    text = prompt_text(planned)
    parts = ["<|im_start|>user\n", "[b.md]\ntext of b.md", "[a.md]\ntext of a.md", "[context]\nmore", "Who?<|im_end|>"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert planned.documents == ("b.md", "a.md", "context")
    assert [s.name for s in planned.request.segments] == ["prefix", "b.md", "a.md", "context"]
    assert "Of 3 documents only the first is reused" in str(planned.note)


def test_lines_share_the_segments_of_their_documents() -> None:
    planned, _ = plan(*({"question": q, "documents": "a.md"} for q in "xy"))
    assert planned[0].request.segments == planned[1].request.segments
    assert planned[0].note is None


def test_no_documents_named_is_all_and_an_empty_list_is_none() -> None:
    planned, _ = plan({"question": "x"}, {"question": "x", "documents": []}, {"question": "x", "context": "own"})
    assert [p.documents for p in planned] == [("a.md", "b.md"), (), ("context",)]
    assert [p.whole for p in planned] == [True, False, False]


def test_a_line_goes_before_the_options_in_sampling() -> None:
    planned, _ = plan({"question": "x", "max_tokens": 3, "seed": 5, "stop": "."}, {"question": "x"})
    assert planned[0].request.sampling == SamplingParams(max_tokens=3, temperature=0.5, seed=5, stop=(".",))
    assert planned[1].request.sampling == SamplingParams(max_tokens=9, temperature=0.5)


def test_an_unknown_document_fails_its_line_alone() -> None:
    planned, batch = plan({"id": "bad", "question": "x", "documents": "b.mdd"}, {"id": "good", "question": "x"})
    assert [p.line.id for p in planned] == ["good"]
    (bad,) = batch.bad
    assert (bad.id, bad.code) == ("bad", "unknown_document")
    assert bad.message == "batch.jsonl:1: b.mdd: no such document in the cache; did you mean 'b.md'?"


def test_only_another_system_text_than_the_caches_is_told() -> None:
    same, other, none = plan(
        {"question": "x", "documents": "a.md", "system": "Be brief."},
        {"question": "x", "documents": "a.md", "system": "Be long."},
        {"question": "x", "documents": "a.md"},
        system="Be brief.",
    )[0]
    assert same.request.segments == none.request.segments
    assert [p.other_system for p in (same, other, none)] == [False, True, False]
    assert "nothing of the cache is reused" in str(other.note)
    assert "Be long." in prompt_text(other)
    (uncached,), _ = plan({"question": "x", "documents": "a.md", "system": "Be long."}, cached=False)
    assert not uncached.other_system
    assert uncached.note is None


def test_a_template_without_system_role_is_told() -> None:
    tokenizer = small_tokenizer(NO_SYSTEM)
    prompt = render_prompt_format(tokenizer)
    planner = Planner(CachedLibrary([]), tokenizer, prompt, SamplingParams(), cached=False)
    assert planner.warnings == []
    planner.plan(parse_batch([b'{"question": "x", "system": "Be brief."}'], "b"))
    assert len(planner.warnings) == 1


def test_answers_are_looked_for_whatever_their_case() -> None:
    line = BatchLine(id="1", question="x", answer=["Noon", "12 o'clock"])
    assert answer_found(line, "At noon.") is True
    assert answer_found(line, "At one.") is False
    assert answer_found(BatchLine(id="1", question="x"), "At noon.") is None
