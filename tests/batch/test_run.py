from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from lserve_tools.batch.answering import Answering
from lserve_tools.batch.library import CachedLibrary
from lserve_tools.batch.plan import Planner, PlanOptions
from lserve_tools.batch.reader import parse_batch
from lserve_tools.batch.run import peak_rss_bytes
from lserve_tools.batch.writer import ResultWriter
from lserve_tools.engine.sampling import SamplingParams
from lserve_tools.engine.sequence import Completion, Request
from lserve_tools.errors import CapacityError, LServeError
from lserve_tools.schema import RunSummary
from lserve_tools.text.prompts import document_segment, render_prompt_format
from tests.helpers.small_tokenizer import small_tokenizer

LINES = [
    {"id": "good", "question": "x", "documents": "a.md", "answer": "noon"},
    {"id": "long", "question": "x", "documents": "a.md"},
    {"id": "whole", "question": "x"},
    {"id": "broken", "question": "x", "documents": []},
    {"id": "other", "question": "x", "documents": [], "system": "Be brief."},
    {"id": "bad", "question": ""},
]


class FakeEngine:
    """Answers last lines first, and refuses some."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def stop(self) -> None: ...

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        for request in reversed(list(requests)):
            if request.id in ("long", "whole"):
                yield Completion(request.id, "", (), "error", 70, error=CapacityError(70, 50, "context", cure="Cut."))
            elif request.id == "broken":
                yield Completion(request.id, "", (), "error", 7, error=LServeError("out of luck."))
            else:
                self.warnings.append(f"a chunk of {request.id} is damaged.")
                yield Completion(request.id, "At Noon.", (1, 2), "stop", 30, exact_tokens=20, computed_tokens=10)


class Keys:
    """A key for each request."""

    def of(self, request: Request) -> str:
        return f"run.{request.id}"


def test_every_line_is_written_counted_and_told(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    batch = parse_batch([json.dumps(line).encode() for line in LINES], "batch.jsonl")
    library = CachedLibrary([document_segment(tokenizer, "a.md", "text")])
    options = PlanOptions(SamplingParams(), cached=True)
    planner = Planner(library, tokenizer, render_prompt_format(tokenizer), options)
    planned = planner.plan(batch)
    summary = RunSummary(output="o", model="m", cache="c", lines=len(LINES))
    told: list[str] = []
    path = tmp_path / "out.jsonl"
    with ResultWriter(path, model="m", result_format="simple") as writer:
        answering = Answering(summary, writer, Keys(), told.append)
        answering.fail_all(batch)
        seen = answering.answer(FakeEngine(), planned, ["good"])
    assert [completion.id for completion in seen] == ["good"]
    results = {line["id"]: line for line in map(json.loads, path.read_text().splitlines())}
    assert list(results) == ["bad", "other", "broken", "whole", "long", "good"]
    messages = {i: r["error"]["message"] for i, r in results.items() if r["error"]}
    assert messages == {
        "bad": "batch.jsonl:6: the question is empty.",
        "broken": "batch.jsonl:4: out of luck.",
        "long": "batch.jsonl:2: the prompt needs 70 tokens of context, and there are 50. Cut.",
        "whole": "batch.jsonl:3: the prompt needs 70 tokens of context, and there are 50. Cut.",
    }
    assert results["good"]["answer_found"] is True
    assert results["good"]["resume_key"] == "run.good"
    assert (summary.answered, summary.failed, summary.bad_lines) == (2, 4, 1)
    assert (summary.answers_expected, summary.answers_found) == (1, 1)
    assert (summary.prompt_tokens, summary.completion_tokens) == (60, 4)
    assert (summary.tokens.exact, summary.tokens.computed) == (40, 20)
    assert [w for w in summary.warnings if "damaged" in w] == [
        "a chunk of other is damaged.",
        "a chunk of good is damaged.",
    ]
    assert {f"Error: {message}" for message in messages.values()} <= set(told)
    assert all(f"Warning: {warning}" in told for warning in summary.warnings)


def test_peak_memory_is_in_bytes() -> None:
    assert 10**7 < peak_rss_bytes() < 10**12
