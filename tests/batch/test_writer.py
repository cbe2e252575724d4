from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lserve_tools.batch.writer import ResultWriter, default_output
from lserve_tools.engine.sequence import Completion
from lserve_tools.errors import UsageError
from lserve_tools.schema import ReadingAccount, TokenAccount

DONE = Completion("q1", "Noon.", (5, 6, 7), "stop", prompt_tokens=40, exact_tokens=30, computed_tokens=10)
READ = ReadingAccount(documents=["a.md"], tokens=TokenAccount(exact=30, computed=10), note="n", answer_found=True)


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_openai_lines_are_those_of_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    with ResultWriter(path, model="demo", result_format="openai") as writer:
        writer.write_answer(DONE, READ)
        writer.write_failure("q2", "unknown_document", "b:2: no")
    good, bad = written(path)
    assert good["custom_id"] == "q1"
    assert good["error"] is None
    assert good["response"]["status_code"] == 200
    body = good["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "demo")
    assert body["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Noon."}, "finish_reason": "stop"}
    ]
    usage = {"prompt_tokens": 40, "completion_tokens": 3, "total_tokens": 43}
    assert body["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 30}}
    assert body["lserve"] == json.loads(READ.model_dump_json())
    assert bad["response"] is None
    assert bad["error"] == {"code": "unknown_document", "message": "b:2: no"}
    assert good["id"] != bad["id"]


def test_simple_lines_are_flat(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultWriter(path, model="demo", result_format="simple") as writer:
        writer.write_answer(DONE, READ)
        writer.write_failure("q2", "c", "m")
    good, bad = written(path)
    assert (good["id"], good["answer"], good["finish_reason"], good["completion_tokens"]) == ("q1", "Noon.", "stop", 3)
    assert good["tokens"] == {"exact": 30, "repaired": 0, "recomputed": 0, "computed": 10}
    assert (good["documents"], good["note"], good["answer_found"], good["error"]) == (["a.md"], "n", True, None)
    assert (bad["id"], bad["answer"], bad["error"]["code"]) == ("q2", None, "c")


def test_a_line_is_in_the_file_before_the_next_one_is_made(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultWriter(path, model="demo", result_format="simple") as writer:
        writer.write_failure("q1", "c", "m")
        assert len(written(path)) == 1


def test_kept_lines_come_first_and_all_others_go(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old\nkept\ntorn")
    with ResultWriter(path, model="demo", result_format="text", kept=[b"kept"]) as writer:
        assert path.read_text() == "kept\n"
        writer.write_answer(DONE, READ)
    assert path.read_text() == "kept\nNoon.\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.jsonl").write_text("old\n")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    with ResultWriter(tmp_path / "link.jsonl", model="demo", result_format="text") as writer:
        writer.write_answer(DONE, READ)
    assert (tmp_path / "real.jsonl").read_text() == "Noon.\n"


def test_a_raw_prompts_answer_is_a_text_completion(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultWriter(path, model="demo", result_format="openai") as writer:
        writer.write_answer(DONE, READ, raw=True)
    (line,) = written(path)
    body = line["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Noon.", "finish_reason": "stop"}]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        ResultWriter(tmp_path / "file" / "out.jsonl", model="demo", result_format="simple")
    with pytest.raises(UsageError, match="cannot be written"):
        ResultWriter(tmp_path, model="demo", result_format="simple")


def test_the_output_lies_beside_the_batch() -> None:
    assert default_output(Path("work/batch.jsonl")) == Path("work/batch.results.jsonl")
