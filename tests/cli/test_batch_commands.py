"""The commands build-cache and run as a user meets them: real processes, files and exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import lserve, results, write_batch, write_docs

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A folder with documents and their cache; not to be written to."""
    home = tmp_path_factory.mktemp("built")
    write_docs(home / "docs")
    done = lserve("build-cache", "docs", "--model", tiny_llama, "--codec", "exact", "--json", cwd=home)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["documents"], summary["built"], summary["failed"]) == (3, 3, [])
    assert summary["bytes"] > 0
    return home


def ask(built: Path, tmp_path: Path, *lines: dict[str, Any] | str, options: tuple[str, ...] = ()) -> Any:
    """Run a batch over the built cache; gives the process and its results by id."""
    batch = write_batch(tmp_path / "batch.jsonl", *lines)
    output = tmp_path / f"out{len(list(tmp_path.iterdir()))}.jsonl"
    done = lserve("run", batch, "--format", "simple", "-o", output, "--max-tokens", "6", *options, cwd=built)
    return done, results(output) if output.exists() else {}


def test_the_cache_answers_as_the_model_does_without_it(built: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"id": "one", "question": "Who signs?", "documents": "harbour.md"},
        {"id": "two", "question": "Where?", "documents": ["notes.txt", "code/*.py"]},
        {"id": "all", "question": "What?"},
        {"id": "none", "question": "What?", "documents": []},
        {"id": "own", "question": "What?", "context": "The tide is low."},
    ]
    done, cached = ask(built, tmp_path, *lines)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    computed = ask(built, tmp_path, *lines, options=("--no-cache",))[1]
    assert {i: r["answer"] for i, r in cached.items()} == {i: r["answer"] for i, r in computed.items()}
    assert cached["one"]["tokens"]["exact"] > 1000
    assert cached["one"]["tokens"]["computed"] < 100
    assert cached["one"]["note"] is None
    assert "only the first is reused" in cached["two"]["note"]
    assert cached["two"]["documents"] == ["notes.txt", "code/total.py"]
    assert cached["two"]["tokens"]["exact"] > 0
    assert cached["all"]["documents"] == ["code/total.py", "harbour.md", "notes.txt"]
    assert cached["none"]["documents"] == []
    assert cached["own"]["documents"] == ["context"]
    assert all(r["tokens"]["exact"] == 0 for r in computed.values())


def test_bad_lines_are_told_and_the_others_answered(built: Path, tmp_path: Path) -> None:
    good = {"id": "good", "question": "Who?", "documents": "notes.txt", "answer": "no such answer"}
    bad: list[dict[str, Any] | str] = [
        '{"id": "torn',
        {"id": "typo", "question": "Who?", "docments": "notes.txt"},
        {"id": "lost", "question": "Who?", "documents": "note.txt"},
        {"id": "empty", "question": "  "},
    ]
    done, lines = ask(built, tmp_path, good, *bad, options=("--json",))
    assert done.returncode == 1
    assert lines["good"]["error"] is None
    assert lines["2"]["error"]["message"].startswith("batch.jsonl:2: not JSON")
    assert lines["typo"]["error"]["message"] == "batch.jsonl:3: unknown key 'docments'; did you mean 'documents'?"
    assert lines["lost"]["error"]["message"].endswith("no such document in the cache; did you mean 'notes.txt'?")
    assert lines["empty"]["error"]["message"] == "batch.jsonl:5: the question is empty."
    summary = json.loads(done.stdout)
    assert (summary["lines"], summary["answered"], summary["failed"], summary["bad_lines"]) == (5, 1, 4, 4)
    assert (summary["answers_expected"], summary["answers_found"]) == (1, 0)
    for line in lines.values():
        assert line["error"] is None or f"Error: {line['error']['message']}" in done.stderr


def test_openai_lines_are_written_by_default(built: Path, tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "b.jsonl", {"id": "q", "question": "Who?", "documents": "notes.txt"})
    first = lserve("run", batch, "--max-tokens", "3", cwd=built)
    assert first.returncode == 0, first.stderr
    (line,) = [json.loads(text) for text in (tmp_path / "b.results.jsonl").read_text().splitlines()]
    usage = line["response"]["body"]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == line["response"]["body"]["lserve"]["tokens"]["exact"] > 0


def test_another_system_text_is_answered_without_the_cache(built: Path, tmp_path: Path) -> None:
    lines = [{"id": "other", "question": "Who?", "documents": "notes.txt", "system": "Be brief."}]
    done, answers = ask(built, tmp_path, *lines, options=("--json",))
    assert done.returncode == 0
    line = answers["other"]
    assert line["tokens"]["exact"] == 0
    assert "nothing of the cache is reused" in line["note"]
    assert json.loads(done.stdout)["other_prefix"] == 1
    assert "another system text" in done.stderr


def test_a_second_build_computes_only_what_has_changed(tmp_path: Path, tiny_llama: Path) -> None:
    docs = write_docs(tmp_path / "docs")
    build = ("build-cache", "docs", "--model", tiny_llama, "--json")
    assert json.loads(lserve(*build, cwd=tmp_path).stdout)["built"] == 3
    (docs / "notes.txt").write_text("The ledger was moved.\n")
    (docs / "harbour.md").unlink()
    second = json.loads(lserve(*build, cwd=tmp_path).stdout)
    assert (second["built"], second["unchanged"], second["pruned"], second["documents"]) == (1, 1, 0, 3)
    third = json.loads(lserve(*build, "--prune", cwd=tmp_path).stdout)
    assert (third["built"], third["unchanged"], third["pruned"], third["documents"]) == (0, 2, 1, 2)


def test_a_dry_build_writes_nothing(tmp_path: Path, tiny_llama: Path) -> None:
    write_docs(tmp_path / "docs")
    done = lserve("build-cache", "docs", "--model", tiny_llama, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "about" in done.stderr
    assert not (tmp_path / ".lserve").exists()


def test_what_cannot_be_built_is_named_and_the_rest_is_built(tmp_path: Path, tiny_llama: Path) -> None:
    docs = write_docs(tmp_path / "docs")
    (docs / "picture.png").write_bytes(b"\x89PNG\x00")
    (docs / "old.txt").write_bytes(b"na\xefve\n")
    (docs / "long.md").write_text("A line of a long document.\n" * 400)
    done = lserve("build-cache", "docs", "--model", tiny_llama, "--json", cwd=tmp_path)
    assert done.returncode == 1
    summary = json.loads(done.stdout)
    assert summary["built"] == 3
    assert [s["path"] for s in summary["skipped"]] == ["picture.png"]
    assert [s["path"] for s in summary["failed"]] == ["long.md", "old.txt"]
    assert "2,048" in done.stderr
    assert "old.txt: is not UTF-8 (byte 0xef in line 1)" in done.stderr


@pytest.mark.parametrize(
    ("files", "expected"),
    [(None, "docs: no such file or folder"), ({}, "docs: holds no files"), ({"a.bin": "\0"}, "a.bin: binary")],
)
def test_a_folder_without_documents_is_refused(
    tmp_path: Path, tiny_llama: Path, files: dict[str, str] | None, expected: str
) -> None:
    if files is not None:
        (tmp_path / "docs").mkdir()
        write_docs(tmp_path / "docs", files)
    done = lserve("build-cache", "docs", "--model", tiny_llama, cwd=tmp_path)
    assert_refused(done, 2, expected)


def test_ids_used_twice_stop_before_anything_is_written(built: Path, tmp_path: Path) -> None:
    done, lines = ask(built, tmp_path, {"id": "a", "question": "x"}, {"id": "a", "question": "y"})
    assert_refused(done, 2, "batch.jsonl:2: id 'a' is used by line 1 already.")
    assert lines == {}


def test_another_model_than_the_caches_is_refused(built: Path, tmp_path: Path, tiny_folder: Any) -> None:
    other = tiny_folder("mistral")
    done, _ = ask(built, tmp_path, {"question": "x"}, options=("--model", str(other)))
    assert_refused(done, 2, "the cache was built with model")
    again = lserve("build-cache", "docs", "--model", other, cwd=built)
    assert_refused(again, 2, "--overwrite")


def test_without_a_cache_the_way_to_one_is_told(tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "batch.jsonl", {"question": "x"})
    assert_refused(lserve("run", batch, cwd=tmp_path), 2, "build-cache")


def test_no_model_is_an_error_that_offers_the_demo(tmp_path: Path) -> None:
    write_docs(tmp_path / "docs")
    assert_refused(lserve("build-cache", "docs", cwd=tmp_path, LSERVE_MODEL=""), 2, "--model demo")


def test_without_any_cache_documents_are_read_beside_the_batch(tmp_path: Path, tiny_llama: Path) -> None:
    write_docs(tmp_path / "docs")
    batch = write_batch(tmp_path / "batch.jsonl", {"id": "q", "question": "Who?", "documents": "docs/notes.txt"})
    run = ("run", batch, "--no-cache", "--model", tiny_llama, "--format", "simple", "--max-tokens", "3")
    done = lserve(*run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert results(tmp_path / "batch.results.jsonl")["q"]["documents"] == ["docs/notes.txt"]


def assert_refused(done: subprocess.CompletedProcess[str], code: int, expected: str) -> None:
    """One line on stderr that says what is wrong, and nothing on stdout."""
    assert done.returncode == code, done.stderr
    assert expected in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize("place", ["frame", "header"])
def test_a_flipped_byte_is_found_told_and_never_answered_from(built: Path, tmp_path: Path, place: str) -> None:
    question = {"id": "q", "question": "Who signs?", "documents": "harbour.md"}
    sound = ask(built, tmp_path, question)[1]["q"]["answer"]
    damaged = shutil.copytree(built / ".lserve" / "cache", tmp_path / "damaged")
    for shard in (damaged / "shards").glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[40 if place == "header" else len(data) * 2 // 3] ^= 4
        shard.write_bytes(data)
    done, lines = ask(built, tmp_path, question, options=("--cache", str(damaged), "--json"))
    assert done.returncode == 0, done.stderr
    assert lines["q"]["answer"] == sound
    assert lines["q"]["tokens"]["computed"] > 512
    told = [line for line in done.stderr.splitlines() if "harbour.md is computed instead" in line]
    assert len(told) == 1
    assert ".safetensors" in told[0]
    assert "build-cache" in told[0]
    assert told[0].removeprefix("Warning: ") in json.loads(done.stdout)["warnings"]


def test_a_cache_of_another_format_is_refused(built: Path, tmp_path: Path) -> None:
    other = shutil.copytree(built / ".lserve" / "cache", tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    done, _ = ask(built, tmp_path, {"question": "x"}, options=("--cache", str(other)))
    assert_refused(done, 2, "the cache was built with format version 99, not 1.")


def test_a_profile_that_is_not_the_caches_is_refused(built: Path, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    heads.mkdir()
    (heads / "full_attention_heads.tsv").write_text("0.1\t0.9\n" * 3)
    (heads / "config.json").write_text(json.dumps({"sink_size": 4, "recent_size": 16}))
    done, _ = ask(built, tmp_path, {"question": "x"}, options=("--heads", str(heads)))
    assert_refused(done, 2, "the cache was built with head profile none, not ")
    again = lserve("build-cache", "docs", "--heads", heads, "--codec", "exact", cwd=built, LSERVE_MODEL=model_of(built))
    assert again.returncode == 2
    assert "the cache was built with head profile none, not " in again.stderr.splitlines()[-1]
    assert "--overwrite" in again.stderr


def test_a_cache_that_does_not_fit_into_one_prompt_says_so(built: Path, tmp_path: Path) -> None:
    lines = [{"id": "whole", "question": "x"}, {"id": "one", "question": "x", "documents": "notes.txt"}]
    done, answers = ask(built, tmp_path, *lines, options=("--max-model-len", "600"))
    assert done.returncode == 1
    assert answers["one"]["error"] is None
    failure = answers["whole"]["error"]
    assert failure["code"] == "context_too_long"
    assert "batch.jsonl:1: the whole cache (documents: 3) needs" in failure["message"]
    assert "600" in failure["message"]
    assert '"documents"' in failure["message"]


def test_a_profile_in_its_place_is_taken_and_the_chain_runs_bare(tmp_path: Path, tiny_llama: Path) -> None:
    write_docs(tmp_path / "docs")
    heads = tmp_path / ".lserve" / "heads"
    heads.mkdir(parents=True)
    (heads / "full_attention_heads.tsv").write_text("0.1\t0.9\n" * 3)
    (heads / "config.json").write_text(json.dumps({"sink_size": 64, "recent_size": 128}))
    write_batch(tmp_path / "batch.jsonl", {"id": "q", "question": "Who signs?", "documents": "harbour.md"})
    built = lserve("build-cache", "docs/", cwd=tmp_path, LSERVE_MODEL=str(tiny_llama))
    assert built.returncode == 0, built.stderr
    assert "3 of 6 KV heads stream" in built.stderr
    done = lserve("run", "batch.jsonl", "--format", "simple", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert results(tmp_path / "batch.results.jsonl")["q"]["tokens"]["exact"] > 1000


def model_of(built: Path) -> str:
    return str(json.loads((built / ".lserve" / "cache" / "manifest.json").read_text())["model"])
