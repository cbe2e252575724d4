"""`bench qa` on a tiny model: three contenders, the same questions, one object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lserve_tools.cli.main import main

QUICK = ("--documents", "2", "--document-tokens", "700", "--questions", "3", "--answer-tokens", "5", "--codec", "exact")


def bench_qa(model: Path, corpus: Path, *options: str) -> int:
    """Run the command in this process; gives the exit code."""
    try:
        main(["bench", "qa", "--model", str(model), "--corpus", str(corpus), *QUICK, *options])
    except SystemExit as left:
        return int(left.code or 0)
    return 0


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    text = tmp_path / "corpus.txt"
    text.write_text("".join(f"Berth {i} is signed by the harbour master before noon.\n" for i in range(120)))
    return text


def test_three_contenders_give_the_same_tokens(
    tiny_llama: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_qa(tiny_llama, corpus, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    first, second, ours = (c["token_ids"] for c in found["contenders"])
    assert [len(answer) for answer in first] == [5] * 6
    assert first == second == ours
    assert (found["questions"], found["next_tokens"], found["next_tokens_agreeing"]) == (6, 30, 30)
    assert found["prompt_tokens"] > 700
    assert found["bytes_on_disk"] > 0
    assert all(c["seconds"] > c["first_token_seconds"] > 0 for c in found["contenders"])


def test_the_table_has_every_comparison(tiny_llama: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_qa(tiny_llama, corpus) == 0
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert {"first token", "whole batch", "with the build", "sixteen on one", "next tokens", "cache on disk"} <= set(
        rows
    )


def test_a_short_corpus_is_refused(tiny_llama: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_qa(tiny_llama, corpus, "--document-tokens", "90000") == 2
    error = capsys.readouterr().err
    assert "180,000 are needed" in error
    assert "--corpus" in error
