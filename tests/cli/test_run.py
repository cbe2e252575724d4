"""What `run` can be told, and that nothing is ever lost, with real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.broken_lines import BROKEN
from tests.helpers.commands import command, lserve, results, write_batch, write_docs

pytestmark = pytest.mark.e2e
QUESTION = {"id": "q", "question": "Who signs?", "documents": "notes.txt"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A folder with documents and their cache; not to be written to."""
    home = tmp_path_factory.mktemp("home")
    write_docs(home / "docs")
    done = lserve("build-cache", "docs", "--model", tiny_llama, "-q", cwd=home)
    assert done.returncode == 0, done.stderr
    return home


def run(home: Path, batch: Path, *options: str | Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run a batch; gives the process and the results by id."""
    done = lserve("run", batch, "--format", "simple", "--max-tokens", "4", *options, cwd=home)
    output = batch.with_name(f"{batch.stem}.results.jsonl")
    return done, results(output) if output.exists() else {}


def test_answers_are_kept_and_only_what_failed_or_changed_is_asked_again(home: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{**QUESTION, "id": name} for name in ("same", "changed", "broken")]
    lines[2]["documents"] = "note.txt"
    batch = write_batch(tmp_path / "b.jsonl", *lines)
    first, before = run(home, batch, "--json")
    assert first.returncode == 1
    assert json.loads(first.stdout)["answered"] == 2
    with (tmp_path / "b.results.jsonl").open("a") as file:
        file.write('{"id": "torn", "answ')
    lines[1]["question"], lines[2]["documents"] = "Where?", "notes.txt"
    write_batch(batch, *lines)
    second, after = run(home, batch, "--json")
    assert second.returncode == 0, second.stderr
    summary = json.loads(second.stdout)
    assert (summary["kept"], summary["answered"], summary["failed"]) == (1, 2, 0)
    assert set(after) == {"same", "changed", "broken"}
    assert after["same"] == before["same"]
    assert after["changed"]["resume_key"] != before["changed"]["resume_key"]
    third, last = run(home, batch, "--json")
    assert (json.loads(third.stdout)["kept"], json.loads(third.stdout)["load_seconds"] < 0.1) == (3, True)
    assert last == after


@pytest.mark.parametrize(
    ("contents", "options", "expected"),
    [
        (None, ["--seed", "7"], "was answered with another model, cache, head profile or other options"),
        (None, ["--no-cache"], "was answered with another model, cache, head profile or other options"),
        ('{"id": "x", "error": {"code": "c", "message": "m"}}\n', [], "id 'x' is no line of the batch"),
        ('{"id": "q", "note": "my own file"}\n', [], "was answered with another model"),
        ("precious\n", [], "no result of this format"),
    ],
)
def test_results_of_something_else_are_never_touched(
    home: Path, tmp_path: Path, contents: str | None, options: list[str], expected: str
) -> None:
    batch, output = write_batch(tmp_path / "b.jsonl", QUESTION), tmp_path / "b.results.jsonl"
    if contents is None:
        run(home, batch)
    else:
        output.write_text(contents)
    before = output.read_bytes()
    done, _ = run_raw(home, batch, *options)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert "--overwrite" in done.stderr
    assert output.read_bytes() == before
    done, lines = run(home, batch, "--overwrite", *options)
    assert (done.returncode, list(lines)) == (0, ["q"])


def run_raw(home: Path, batch: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], None]:
    """Run a batch whose results may be no JSON."""
    return lserve("run", batch, "--format", "simple", "--max-tokens", "4", *options, cwd=home), None


def test_strict_does_nothing_if_a_line_is_bad(home: Path, tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "b.jsonl", QUESTION, {"id": "bad", "question": "x", "documents": "no.md"}, "torn")
    done, lines = run(home, batch, "--strict")
    assert (done.returncode, lines) == (2, {})
    assert "2 bad lines: b.jsonl:2: no.md: no such document" in done.stderr
    assert "b.jsonl:3: not JSON" in done.stderr


def test_a_dry_run_tells_all_and_writes_nothing(home: Path, tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "b.jsonl", QUESTION, "torn", {"id": "two", "question": "x", "documents": []})
    done, lines = run(home, batch, "--dry-run", "-v", "--json")
    assert (done.returncode, lines) == (1, {})
    told = json.loads(done.stdout)
    assert "[notes.txt]\nThe ledger lies in the tower.\n\n\nWho signs?<|im_end|>" in done.stderr
    real = json.loads(run(home, batch, "--json")[0].stdout)
    same = ("lines", "failed", "prompt_tokens", "tokens")
    assert {name: told[name] for name in same} == {name: real[name] for name in same}
    assert told["tokens"]["exact"] > 0
    assert told["longest_prompt"] > 4
    assert told["kv_bytes"] > 0


def test_one_question_needs_no_file(home: Path, tmp_path: Path) -> None:
    asked = ("run", "--question", "Who signs?", "--documents", "notes.txt", "--max-tokens", "4")
    plain = lserve(*asked, cwd=home)
    assert plain.returncode == 0, plain.stderr
    whole = json.loads(lserve(*asked, "--json", cwd=home).stdout)
    assert plain.stdout == whole["answer"] + "\n"
    assert whole["documents"] == ["notes.txt"]
    batch = write_batch(tmp_path / "b.jsonl", {**QUESTION, "id": "1"})
    assert run(home, batch)[1]["1"]["answer"] == whole["answer"]
    lost = lserve("run", "--question", "Who?", "--documents", "note.txt", cwd=home)
    assert (lost.returncode, lost.stdout) == (1, "")
    assert "note.txt: no such document in the cache; did you mean 'notes.txt'?" in lost.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "either a batch file or --question"),
        (["b.jsonl", "--question", "x"], "either a batch file or --question"),
        (["--question", " "], "the question is empty"),
        (["b.jsonl", "--documents", "a.md"], "--documents goes with --question"),
        (["-", "--json"], "want stdout"),
    ],
)
def test_arguments_that_exclude_each_other_are_refused(home: Path, arguments: list[str], expected: str) -> None:
    done = lserve("run", *arguments, cwd=home)
    assert done.returncode == 2
    assert expected in done.stderr


def test_standard_input_to_standard_output(home: Path) -> None:
    asked = command("run", "-", "--format", "simple", "--max-tokens", "4", "-q")
    done = subprocess.run(asked.line, cwd=home, env=asked.environment, input=json.dumps(QUESTION), **PIPED)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["id"] == "q"


def test_openai_lines_of_both_urls_are_answered(home: Path, tmp_path: Path) -> None:
    extra = {"lserve": {"documents": ["notes.txt"]}, "max_tokens": 4}
    chat = {"messages": [{"role": "user", "content": "Who signs?"}], **extra}
    batch = write_batch(
        tmp_path / "b.jsonl",
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "raw", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once", **extra}},
        {"custom_id": "other", "method": "POST", "url": "/v1/chat/completions", "body": {**chat, "model": "gpt-4o"}},
    )
    done = lserve("run", batch, cwd=home)
    assert done.returncode == 1, done.stderr
    lines = {
        line["custom_id"]: line for line in map(json.loads, (tmp_path / "b.results.jsonl").read_text().splitlines())
    }
    body = lines["chat"]["response"]["body"]
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    same = run(home, write_batch(tmp_path / "same.jsonl", QUESTION))[1]["q"]["answer"]
    assert body["choices"][0]["message"]["content"] == same
    assert lines["raw"]["response"]["body"]["object"] == "text_completion"
    assert lines["raw"]["response"]["body"]["lserve"]["tokens"]["exact"] == 0
    assert lines["other"]["error"]["code"] == "unsupported"


def test_documents_are_chosen_where_they_do_not_all_fit(home: Path, tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "b.jsonl", {"id": "q", "question": "Where does the ledger lie?"})
    done, lines = run(home, batch, "--max-model-len", "200", "--retrieve", "bm25")
    assert done.returncode == 0, done.stderr
    assert lines["q"]["documents"] == ["notes.txt"]
    assert "chosen by BM25" in lines["q"]["note"]
    done, lines = run(home, batch, "--max-model-len", "200", "--overwrite")
    assert (done.returncode, lines["q"]["error"]["code"]) == (1, "context_too_long")


def test_a_check_answers_again_with_the_full_model(home: Path, tmp_path: Path) -> None:
    lines = [{**QUESTION, "id": str(i), "question": "x" * (i + 1)} for i in range(4)]
    done, _ = run(home, write_batch(tmp_path / "b.jsonl", *lines), "--check", "3", "--kv-cache-dtype", "int8", "--json")
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["checked"]) == (0, 3)
    assert 4 * 3 >= summary["check_tokens"] >= summary["check_same_tokens"] >= summary["check_same"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_what_is_running_and_the_rest_can_go_on(
    home: Path, tmp_path: Path, number: signal.Signals
) -> None:
    lines = [{**QUESTION, "id": str(i), "question": f"Who {i}?", "max_tokens": 60} for i in range(80)]
    batch, output = write_batch(tmp_path / "b.jsonl", *lines), tmp_path / "b.results.jsonl"
    asked = command("run", batch, "--format", "simple", "--max-num-seqs", "2")
    process = subprocess.Popen(asked.line, cwd=home, env=asked.environment, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: output.exists() and output.stat().st_size > 0)
    process.send_signal(number)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130, told
    assert "finished. Again stops at once" in told
    first = results(output)
    assert 2 <= len(first) < 80
    assert all(line["error"] is None for line in first.values())
    done = lserve("run", batch, "--format", "simple", "--json", cwd=home)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kept"] == len(first)
    assert len(results(output)) == 80


PIPED: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "check": False}


def wait_for(condition: Any, seconds: float = 60) -> None:
    """Wait until something holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)


@pytest.mark.parametrize(("count", "kills"), [(80, 2), pytest.param(1000, 5, marks=pytest.mark.slow)])
def test_killed_and_resumed_a_batch_with_broken_lines_gives_what_it_gives_undisturbed(
    home: Path, tmp_path: Path, count: int, kills: int
) -> None:
    """One line in twenty is broken, each in another of twenty ways."""
    rng = random.Random(count)
    lines: list[Any] = [
        {"id": f"q{i}", "question": f"What is {i}?", "documents": rng.choice(["notes.txt", "code/*.py", []])}
        for i in range(count)
    ]
    for place, broken in zip(range(7, count, 20), BROKEN * count, strict=False):
        lines[place] = broken(place)
    batch = tmp_path / "b.jsonl"
    batch.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    calm, expected = run(home, batch, "--max-num-seqs", "8")
    assert calm.returncode == 1
    failed = {i for i, line in expected.items() if line["error"]}
    assert len(failed) == len(range(7, count, 20))
    assert len(expected) == count
    output = tmp_path / "b.results.jsonl"
    output.rename(tmp_path / "calm.jsonl")
    asked = command("run", batch, "--format", "simple", "--max-tokens", "4", "--max-num-seqs", "8")
    for kill in range(kills):
        process = subprocess.Popen(asked.line, cwd=home, env=asked.environment, stderr=subprocess.DEVNULL)
        least = count * (kill + 1) // (kills + 2)
        wait_for(lambda least=least: output.exists() and output.read_bytes().count(b"\n") > least)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done, resumed = run(home, batch, "--max-num-seqs", "8", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["kept"] > 0
    assert resumed == expected
    assert output.read_text().count("\n") == count


def test_a_pipe_that_closes_is_one_line(home: Path, tmp_path: Path) -> None:
    lines = [{**QUESTION, "id": str(i)} for i in range(300)]
    asked = command("run", write_batch(tmp_path / "b.jsonl", *lines), "-o", "-", "--max-tokens", "4", "-q")
    process = subprocess.Popen(
        asked.line, cwd=home, env=asked.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    told = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert len(told.strip().splitlines()) == 1, told
    assert "cannot be written" in told


@pytest.mark.skipif(os.name == "nt" or sys.platform == "darwin", reason="needs /dev/full")
def test_a_full_disk_is_one_line(home: Path, tmp_path: Path) -> None:
    done = lserve("run", write_batch(tmp_path / "b.jsonl", QUESTION), "-o", "/dev/full", cwd=home)
    assert done.returncode == 1
    assert "/dev/full: cannot be written (No space left on device)." in done.stderr.splitlines()[-1]
