"""The commands `cache ls`, `stats`, `verify` and `prune` as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lserve_tools.cache.lock import BuildLock
from lserve_tools.cache.writer import CacheWriter
from lserve_tools.cli.main import main
from tests.helpers.stored import MIXED, TinyDocument, build, shard_path, tiny_manifest, write_prefix

MANIFEST = tiny_manifest(head_mask=MIXED, head_profile="p1", sink=10, recent=20, codec="int8")
DOCUMENTS = [TinyDocument(path, (70, 30), seed=len(path)) for path in ("a.md", "code/x.py", "code/deep/yy.py")]


@dataclass
class Done:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on stdout."""
        return json.loads(self.out)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in its usual place, each document in a shard of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    place = Path(".lserve/cache")
    with CacheWriter(place, MANIFEST) as writer:
        write_prefix(writer)
    for document in DOCUMENTS:
        build(place, MANIFEST, document)
    return place


@pytest.fixture
def cache(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `lserve-tools cache`."""

    def run(*arguments: str | Path) -> Done:
        with pytest.raises(SystemExit) as left:
            main(["cache", *map(str, arguments)])
        captured = capsys.readouterr()
        return Done(int(left.value.code or 0), captured.out, captured.err)

    return run


def paths(done: Done) -> list[str]:
    return [d["path"] for d in done.json["documents"]]


def test_ls_lists_documents_with_their_sizes(folder: Path, cache: Any) -> None:
    done = cache("ls")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].split() == ["document", "tokens", "chunks", "on", "disk"]
    assert [line.split()[:3] for line in lines[1:]] == [[d.path, "100", "2"] for d in DOCUMENTS[:1] + DOCUMENTS[:0:-1]]
    assert len({len(line) for line in lines}) == 1
    first = cache("ls", "--json").json["documents"][0]
    assert (first["path"], first["size"], first["tokens"], first["chunks"]) == ("a.md", 100, 100, 2)
    assert cache("ls", "-q").out == ""


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a.md"], ["a.md"]),
        (["./a.md"], ["a.md"]),
        (["code/*.py"], ["code/x.py"]),
        (["code/**"], ["code/deep/yy.py", "code/x.py"]),
        (["**/*.py", "a.md"], ["a.md", "code/deep/yy.py", "code/x.py"]),
    ],
)
def test_ls_takes_names_and_globs_as_run_does(folder: Path, cache: Any, names: list[str], found: list[str]) -> None:
    assert paths(cache("ls", *names, "--json")) == found


def test_a_name_without_a_document_is_told(folder: Path, cache: Any) -> None:
    done = cache("ls", "a.mb")
    assert (done.code, done.err) == (1, "error: a.mb: no such document in the cache; did you mean 'a.md'?\n")
    done = cache("prune", "*.txt")
    assert (done.code, done.err) == (1, "error: *.txt: no document of the cache matches.\n")


def test_stats_tell_sizes_and_what_it_was_built_with(folder: Path, cache: Any) -> None:
    found = cache("stats", "--json").json
    assert (found["documents"], found["tokens"], found["shards"], found["dead_bytes"]) == (3, 300, 4, 0)
    assert (found["kv_heads"], found["streaming_heads"], found["codec"], found["dtype"]) == (12, 6, "int8", "float32")
    assert found["raw_bytes"] == found["stored_tokens"] * 4 * 3 * 8 * 2 * 4
    assert found["ratio"] > 2
    out = cache("stats").out
    assert "6 of 12 KV heads stream (sink 10, recent 20, window stored)" in out
    assert "dead" not in out
    build(folder, MANIFEST, TinyDocument("a.md", (60,), seed=77))
    assert "dead: run `lserve-tools cache prune`" in cache("stats").out


def test_verify_tells_what_is_damaged_and_rebuild_drops_it(folder: Path, cache: Any) -> None:
    done = cache("verify")
    assert (done.code, done.err) == (0, "")
    assert "damaged    nothing" in done.out
    path = shard_path(folder, "a.md")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    for options in ((), ("-q",)):
        done = cache("verify", *options)
        assert done.code == 1
        assert done.err.startswith(f"Damaged: {path}, frame 1/3/kv: ")
        assert "Needed by a.md. `lserve-tools cache verify --rebuild` drops it" in done.err
        assert done.err.count("\n") == 1
    found = cache("verify", "--json").json["damaged"]
    assert [(d["place"], d["documents"]) for d in found] == [("frame 1/3/kv", ["a.md"])]
    done = cache("verify", "--rebuild")
    assert done.code == 1
    assert (
        "Build again: a.md. Run `lserve-tools build-cache DOCS --model tiny -o .lserve/cache --codec int8`." in done.err
    )
    assert cache("verify").code == 0
    assert paths(cache("ls", "--json")) == ["code/deep/yy.py", "code/x.py"]


def test_verify_rebuild_makes_a_lost_index(folder: Path, cache: Any) -> None:
    (folder / "index.sqlite").unlink()
    done = cache("ls")
    assert (done.code, "cache verify --rebuild" in done.err, done.err.count("\n")) == (1, True, 1)
    assert cache("verify").code == 1
    assert cache("verify", "--rebuild").code == 0
    assert len(paths(cache("ls", "--json"))) == 3


def test_prune_drops_what_is_named(folder: Path, cache: Any) -> None:
    before = cache("stats", "--json").json["bytes"]
    planned = cache("prune", "code/**", "--dry-run", "-v", "--json")
    assert planned.json["dropped"] == ["code/deep/yy.py", "code/x.py"]
    assert planned.err.splitlines() == ["Would drop code/deep/yy.py", "Would drop code/x.py"]
    assert len(paths(cache("ls", "--json"))) == 3
    done = cache("prune", "code/**", "--json").json
    assert (done["dropped"], done["documents"]) == (planned.json["dropped"], 1)
    assert done["bytes_after"] <= planned.json["bytes_after"]
    assert paths(cache("ls", "--json")) == ["a.md"]
    assert cache("stats", "--json").json["bytes"] < before
    assert cache("prune", "--json").json["dropped"] == []


def test_prune_to_a_size_drops_the_oldest(folder: Path, cache: Any) -> None:
    size = cache("prune", "--dry-run", "--json").json["bytes_before"]
    done = cache("prune", "--max-size", str(size - 1000), "--json").json
    assert done["dropped"] == ["a.md"]
    done = cache("prune", "--max-size", "1K")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "without any document" in done.err
    assert cache("prune", "--max-size", "much").code == 2


def test_prune_waits_for_no_build(folder: Path, cache: Any) -> None:
    with BuildLock(folder):
        done = cache("prune", "a.md")
        assert (done.code, done.err.count("\n")) == (1, 1)
        assert "another build is writing to .lserve/cache" in done.err
        assert cache("verify").code == 0
        assert cache("verify", "--rebuild").code == 1


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "prune"])
def test_without_a_cache_the_way_to_one_is_told(command: str, tmp_path: Path, cache: Any) -> None:
    done = cache(command, "--cache", tmp_path / "nowhere")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert "lserve-tools build-cache DOCS -o" in done.err
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("command", ["ls", "stats"])
def test_listing_needs_no_torch(folder: Path, command: str) -> None:
    code = (
        "import sys\n"
        "from lserve_tools.cli.main import main\n"
        f"try:\n    main(['cache', {command!r}])\n"
        "except SystemExit as left:\n"
        "    sys.exit(left.code or str({'torch', 'transformers'} & set(sys.modules) or '') or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
