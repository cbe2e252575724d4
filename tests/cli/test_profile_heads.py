"""profile-heads as a user runs it, on a tiny model, and its choice of heads on the demo model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lserve_tools.cli.main import main
from lserve_tools.errors import LServeError, UsageError
from lserve_tools.heads import search
from lserve_tools.heads.corpus import load_corpus
from lserve_tools.heads.profile import HeadProfile, choose_retrieval
from lserve_tools.heads.quality import measure_quality
from lserve_tools.heads.search import CHECKPOINT, SearchOptions, find_heads
from lserve_tools.heads.synthetic import PromptMaker
from lserve_tools.models.load import load_model, resolve_model
from lserve_tools.text.prompts import render_prompt_format

# The tiny tokenizer needs several times the tokens of a real one.
QUICK = ("--steps", "3", "--min-length", "1400", "--max-length", "1500", "--sink", "8", "--recent", "40")


def profile_heads(output: Path, model: Path, *options: str) -> int:
    """Run the command in this process; gives the exit code."""
    try:
        main(["profile-heads", "--model", str(model), "-o", str(output), *QUICK, *options])
    except SystemExit as left:
        return int(left.code or 0)
    return 0


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Any:
    """A bare run in an empty folder."""
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-m", "lserve_tools", "profile-heads", "--model", str(tiny_llama), *QUICK]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    return folder / ".lserve" / "heads", found


def test_a_run_leaves_a_whole_profile(done: Any) -> None:
    folder, _ = done
    profile = HeadProfile.load(folder)
    assert profile.record is not None
    assert (profile.sink, profile.recent, tuple(profile.scores.shape)) == (8, 40, (3, 2))
    assert profile.retrieval.tolist() == choose_retrieval(profile.scores, profile.record.sparsity).tolist()
    assert [point.step for point in profile.record.loss_curve] == [0, 1, 2]
    assert profile.record.quality_curve[0].sparsity == 0
    assert profile.model_fingerprint == profile.record.settings.model_fingerprint
    names = {path.name for path in folder.iterdir()} - {"heads.png", "curve.png"}
    assert names == {"full_attention_heads.tsv", "config.json", "profile.json"}


def test_a_run_says_what_was_found_and_what_comes_next(done: Any) -> None:
    folder, found = done
    profile = HeadProfile.load(folder)
    rows = dict(line.split(maxsplit=1) for line in found.stdout.splitlines())
    assert rows["streaming"].startswith(f"{int((~profile.retrieval).sum())} of 6 KV heads")
    assert rows["profile"] == ".lserve/heads"
    assert found.stderr.count("\nhead ") == 2
    assert "lserve-tools build-cache DOCS\n" in found.stderr


def test_pictures_are_drawn_where_matplotlib_is_installed(done: Any) -> None:
    pytest.importorskip("matplotlib")
    folder, found = done
    for name in ("heads.png", "curve.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert "matplotlib" not in found.stderr


def test_json_is_one_object_and_a_profile_is_not_overwritten_unasked(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "draw", lambda *_: [])
    output = tmp_path / "heads"
    assert profile_heads(output, tiny_llama, "--sparsity", "0.5", "--json", "--seed", "4") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["streaming"], summary["heads"], summary["sparsity"]) == (3, 6, 0.5)
    assert summary["profile_id"] == HeadProfile.load(output).id
    assert profile_heads(output, tiny_llama) == 2
    assert "--overwrite" in capsys.readouterr().err
    before = (output / "full_attention_heads.tsv").read_bytes()
    assert profile_heads(output, tiny_llama, "--sparsity", "0.5", "--overwrite", "--seed", "4") == 0
    assert (output / "full_attention_heads.tsv").read_bytes() == before


def test_an_interrupted_run_goes_on(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    options = SearchOptions(tmp_path / "b", steps=3, min_length=1400, max_length=1500, sink=8, recent=40)
    loaded = load_model(resolve_model(str(tiny_llama)), device="cpu")
    monkeypatch.setattr(search, "draw", lambda *_: [])
    with monkeypatch.context() as patched:
        patched.setattr(search, "measure_quality", interrupted)
        with pytest.raises(KeyboardInterrupt):
            find_heads(loaded, options, print)
    assert (tmp_path / "b" / CHECKPOINT).exists()
    assert profile_heads(tmp_path / "b", tiny_llama) == 2
    assert profile_heads(tmp_path / "b", tiny_llama, "--resume", "--sparsity", "0.5") == 0
    assert profile_heads(tmp_path / "a", tiny_llama, "--sparsity", "0.5") == 0
    whole, resumed = HeadProfile.load(tmp_path / "a").record, HeadProfile.load(tmp_path / "b").record
    assert resumed == whole
    assert not (tmp_path / "b" / CHECKPOINT).exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_length": 700, "max_length": 600}, "--max-length 600 is less than --min-length 700"),
        ({"sink": 600, "recent": 200, "min_length": 700}, "nothing is out of sight"),
        ({"resume": True, "overwrite": True}, "exclude each other"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        SearchOptions(tmp_path / "heads", **options).check()


def test_a_missing_corpus_is_named(tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile_heads(tmp_path / "heads", tiny_llama, "--corpus", str(tmp_path / "nowhere")) in (1, 2)
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "heads").exists()


@pytest.mark.slow
def test_on_the_demo_model_the_chosen_half_is_better_than_others(tmp_path: Path) -> None:
    try:
        loaded = load_model(resolve_model("demo"))
    except LServeError as error:
        pytest.skip(str(error))
    options = SearchOptions(tmp_path / "heads", sparsity=0.5, held_out=1)
    profile, _ = find_heads(loaded, options, print)
    assert profile.record is not None
    curve = [point.loss for point in profile.record.loss_curve]
    assert curve[-1] < curve[0] / 1.5
    assert int((profile.scores < 0.2).sum()) > 30
    assert int((profile.scores > 0.8).sum()) > 5
    maker = PromptMaker(
        loaded.tokenizer,
        render_prompt_format(loaded.tokenizer),
        load_corpus(None),
        lengths=(options.min_length, options.min_length + 64),
        facts=options.facts,
        seed=1,
        held_out=True,
    )
    prompts = [maker.make(number) for number in range(4)]

    def loss(retrieval: torch.Tensor) -> float:
        return measure_quality(loaded, prompts, retrieval, sink=options.sink, recent=options.recent).loss

    half = choose_retrieval(profile.scores, 0.5)
    ours = loss(half)
    assert ours < loss(~half)
    generator = torch.Generator().manual_seed(0)
    others = [loss(choose_retrieval(torch.rand(half.shape, generator=generator), 0.5)) for _ in range(3)]
    assert ours < min(others)
