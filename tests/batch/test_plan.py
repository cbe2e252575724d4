from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lserve_tools.batch.library import CachedLibrary
from lserve_tools.batch.plan import PlannedLine, Planner, PlanOptions
from lserve_tools.batch.question import Question
from lserve_tools.batch.reader import Batch, parse_batch
from lserve_tools.batch.retrieve import Retriever
from lserve_tools.engine.sampling import SamplingParams
from lserve_tools.text.prompts import document_segment, render_prompt_format
from lserve_tools.text.segments import Segment
from tests.helpers.small_tokenizer import NO_SYSTEM, small_tokenizer

TOKENIZER = small_tokenizer()
DOCUMENTS = [document_segment(TOKENIZER, name, f"text of {name}") for name in ("a.md", "b.md")]


def plan(
    *lines: dict[str, Any],
    system: str | None = None,
    cached: bool = True,
    most: int = 10**6,
    bm25: bool = False,
    documents: Sequence[Segment] = DOCUMENTS,
) -> tuple[list[PlannedLine], Batch]:
    batch = parse_batch([json.dumps(line).encode() for line in lines], "batch.jsonl")
    prompt = render_prompt_format(TOKENIZER, system)
    sampling = SamplingParams(max_tokens=9, temperature=0.5)
    options = PlanOptions(sampling, cached=cached, models=("demo",), max_model_len=most)
    planner = Planner(CachedLibrary(documents), TOKENIZER, prompt, options, Retriever(TOKENIZER) if bm25 else None)
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


def test_a_line_goes_before_the_options_in_sampling() -> None:
    planned, _ = plan({"question": "x", "max_tokens": 3, "seed": 5, "stop": "."}, {"question": "x"})
    assert planned[0].request.sampling == SamplingParams(max_tokens=3, temperature=0.5, seed=5, stop=(".",))
    assert planned[1].request.sampling == SamplingParams(max_tokens=9, temperature=0.5)


def test_an_unknown_document_fails_its_line_alone() -> None:
    planned, batch = plan({"id": "bad", "question": "x", "documents": "b.mdd"}, {"id": "good", "question": "x"})
    assert [p.question.id for p in planned] == ["good"]
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
    assert [p.other_prefix for p in (same, other, none)] == [False, True, False]
    assert "nothing of the cache is reused" in str(other.note)
    assert "Be long." in prompt_text(other)
    (uncached,), _ = plan({"question": "x", "documents": "a.md", "system": "Be long."}, cached=False)
    assert not uncached.other_prefix
    assert uncached.note is None


def test_a_template_without_system_role_is_told() -> None:
    tokenizer = small_tokenizer(NO_SYSTEM)
    prompt = render_prompt_format(tokenizer)
    planner = Planner(CachedLibrary([]), tokenizer, prompt, PlanOptions(SamplingParams()))
    assert planner.warnings == []
    planner.plan(parse_batch([b'{"question": "x", "system": "Be brief."}'], "b"))
    assert len(planner.warnings) == 1


def test_answers_are_looked_for_whatever_their_case() -> None:
    question = Question("1", "x", answer=("Noon", "12 o'clock"))
    assert question.answered_by("At noon.") is True
    assert question.answered_by("At one.") is False
    assert Question("1", "x").answered_by("At noon.") is None


def chat(*messages: tuple[str, str], **body: Any) -> dict[str, Any]:
    said = [{"role": role, "content": content} for role, content in messages]
    return {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": said, **body}}


def test_an_openai_chat_is_the_same_prompt_as_the_short_form() -> None:
    extra = {"documents": "a.md"}
    (ours, theirs), _ = plan(
        {"question": "Who?", **extra, "system": "Be brief.", "max_tokens": 5},
        chat(("system", "Be brief."), ("user", "Who?"), lserve=extra, max_completion_tokens=5, model="demo"),
        system="Be brief.",
    )
    assert ours.request.segments == theirs.request.segments
    assert ours.request.suffix_ids == theirs.request.suffix_ids
    assert ours.request.sampling == theirs.request.sampling
    assert not theirs.other_prefix


def test_a_conversation_reads_its_documents_first() -> None:
    (planned,), _ = plan(chat(("user", "Who?"), ("assistant", "He."), ("user", "When?"), lserve={"documents": "a.md"}))
    text = prompt_text(planned)
    parts = ["[a.md]", "Who?<|im_end|>", "assistant\nHe.<|im_end|>", "When?<|im_end|>"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_a_raw_prompt_has_no_template_and_no_cache() -> None:
    body = {"prompt": "Once", "lserve": {"documents": "a.md"}}
    (planned,), _ = plan({"custom_id": "r", "url": "/v1/completions", "body": body})
    assert prompt_text(planned) == "[a.md]\ntext of a.md\n\nOnce"
    assert planned.other_prefix


def test_another_model_than_the_runs_fails_its_line() -> None:
    planned, batch = plan(chat(("user", "Who?"), model="gpt-4o"))
    assert planned == []
    assert batch.bad[0].message.startswith("batch.jsonl:1: the line asks for the model 'gpt-4o', and this run's is")


def test_a_prompt_that_is_too_long_fails_before_any_model_is_loaded() -> None:
    lines = [{"id": "whole", "question": "x"}, {"id": "one", "question": "x", "documents": "a.md"}]
    most = len(plan(lines[1])[0][0].request.suffix_ids) + 3 + 2 * max(len(d.token_ids) for d in DOCUMENTS)
    planned, batch = plan(*lines, most=most)
    assert [p.question.id for p in planned] == ["one"]
    assert batch.bad[0].code == "context_too_long"
    assert "batch.jsonl:1: the whole cache (documents: 2) needs" in batch.bad[0].message
    assert "--retrieve bm25" in batch.bad[0].message


def test_documents_that_do_not_fit_together_are_chosen_by_bm25() -> None:
    documents = [
        document_segment(TOKENIZER, name, f"The {word} is open.\n" * 20)
        for name, word in [("a.md", "harbour"), ("b.md", "ledger"), ("c.md", "tower")]
    ]
    shortest = min(len(d.token_ids) for d in documents)
    planned, batch = plan(
        {"id": "one", "question": "Where is the Ledger?"},
        {"id": "fits", "question": "Where?", "documents": "b.md"},
        {"id": "none", "question": "zzz"},
        most=2 * shortest,
        bm25=True,
        documents=documents,
    )
    assert [p.documents for p in planned] == [("b.md",), ("b.md",)]
    assert planned[0].note == "Of 3 documents, 1 were chosen by BM25, best first."
    assert planned[1].note is None
    assert [(bad.id, bad.code) for bad in batch.bad] == [("none", "nothing_retrieved")]
    assert batch.bad[0].message.startswith("batch.jsonl:3: none of 3 documents shares a word with the question.")
