"""Pruning: what is dropped is gone and stays gone, the prefix stays, and a cache becomes as small as it is told to."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType

import pytest

from lserve_tools.cache.lock import BuildLock
from lserve_tools.cache.prune import cache_bytes, prune_folder
from lserve_tools.cache.store import CacheStore
from lserve_tools.cache.verify import verify
from lserve_tools.cache.writer import CacheWriter
from lserve_tools.errors import CacheError, UsageError
from tests.helpers.stored import TinyDocument, build, check_whole, tiny_manifest, write_document, write_prefix

DOCUMENTS = [TinyDocument(f"{name}.md", (70, 30), seed=i) for i, name in enumerate("abcdef")]
MANIFEST = tiny_manifest()
DROPPED = ["a.md", "d.md", "e.md"]
STEPS = {"fsync", "replace", "rename", "unlink", "execute", "executemany", "open", "write", "truncate"}


def make(folder: Path, *, together: int = 2) -> Path:
    """A cache with a prefix, whose documents were built backwards, several to a shard."""
    with CacheWriter(folder, MANIFEST) as writer:
        write_prefix(writer)
    backwards = DOCUMENTS[::-1]
    for first in range(0, len(backwards), together):
        build(folder, MANIFEST, *backwards[first : first + together])
    return folder


def drop(folder: Path, *paths: str) -> None:
    prune_folder(folder, lambda _: list(paths), None, dry_run=False)


def paths_of(folder: Path) -> list[str]:
    store = CacheStore.open(folder)
    try:
        return [d.path for d in store.documents()]
    finally:
        store.close()


def test_documents_are_dropped_by_name(tmp_path: Path) -> None:
    make(tmp_path)
    done = prune_folder(tmp_path, lambda paths: [p for p in paths if p in DROPPED], None, dry_run=False)
    assert (list(done.dropped), done.documents) == (DROPPED, 3)
    assert done.bytes_after == cache_bytes(tmp_path) < done.bytes_before
    check_whole(tmp_path, *(d for d in DOCUMENTS if d.path not in DROPPED))


@pytest.mark.parametrize("together", [1, 2, 3, 6])
def test_a_cache_becomes_as_small_as_told_oldest_first(tmp_path: Path, together: int) -> None:
    make(tmp_path, together=together)
    size = cache_bytes(tmp_path)
    wanted = size - 60_000
    planned = prune_folder(tmp_path, lambda _: [], wanted, dry_run=True)
    assert cache_bytes(tmp_path) == size
    done = prune_folder(tmp_path, lambda _: [], wanted, dry_run=False)
    assert done.dropped == planned.dropped
    assert done.bytes_after == cache_bytes(tmp_path) <= planned.bytes_after <= wanted
    assert set(done.dropped) == {d.path for d in DOCUMENTS[::-1][: len(done.dropped)]} if together == 1 else True
    assert 0 < len(done.dropped) < 6
    assert verify(tmp_path, lambda _: None).damaged == []
    check_whole(tmp_path, *(d for d in DOCUMENTS if d.path not in done.dropped))


def test_the_prefix_is_never_dropped(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(UsageError, match="without any document"):
        prune_folder(tmp_path, lambda _: [], 1000, dry_run=False)
    assert len(paths_of(tmp_path)) == 6
    drop(tmp_path, *(d.path for d in DOCUMENTS))
    with CacheWriter(tmp_path, MANIFEST) as writer:
        assert writer.has_prefix
        assert writer.documents() == {}


def test_chunks_that_others_need_stay(tmp_path: Path) -> None:
    class Longer(TinyDocument):
        def __post_init__(self) -> None:
            object.__setattr__(self, "token_ids", DOCUMENTS[0].token_ids + tuple(range(40)))

    longer = Longer("longer.md", (*DOCUMENTS[0].chunks, 40))
    build(tmp_path, MANIFEST, DOCUMENTS[0])
    build(tmp_path, MANIFEST, longer)
    drop(tmp_path, "a.md")
    check_whole(tmp_path, longer)
    assert verify(tmp_path, lambda _: None).damaged == []


def test_a_build_at_work_is_not_disturbed(tmp_path: Path) -> None:
    make(tmp_path)
    with BuildLock(tmp_path), pytest.raises(CacheError, match=r"another build is writing"):
        drop(tmp_path, "a.md")


def test_older_versions_never_come_back(tmp_path: Path) -> None:
    """Even if the file of a shard that was pruned turns up again."""
    old = build(tmp_path, MANIFEST, DOCUMENTS[0])
    (shard,) = (old / "shards").iterdir()
    data = shard.read_bytes()
    new = TinyDocument("a.md", (50,), seed=99)
    build(tmp_path, MANIFEST, new)
    drop(tmp_path)
    assert not shard.exists()
    shard.write_bytes(data)
    with CacheWriter(tmp_path, MANIFEST) as writer:
        assert writer.has_document("a.md", new.sha256)
    check_whole(tmp_path, new)


def _prune_until(folder: Path, steps: int) -> bool:
    """Prune in a process that is killed before its n-th step on disk; tells whether it was."""
    child = os.fork()
    if not child:
        left = [steps]

        def count(frame: FrameType, event: str, function: object) -> None:
            if event == "c_call" and getattr(function, "__name__", "") in STEPS:
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        drop(folder, *DROPPED)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_step_nothing_is_lost_and_nothing_comes_back(tmp_path: Path, stride: int) -> None:
    whole = make(tmp_path / "whole")
    kept = [d for d in DOCUMENTS if d.path not in DROPPED]
    killed = 0
    for steps in range(1, 1000, stride):
        folder = Path(shutil.copytree(whole, tmp_path / str(steps)))
        if not _prune_until(folder, steps):
            break
        killed += 1
        with CacheWriter(folder, MANIFEST):
            pass
        left = paths_of(folder)
        assert set(left) >= {d.path for d in kept}
        found = verify(folder, lambda _: None)
        assert (found.damaged, found.notes) == ([], [])
        drop(folder, *(set(DROPPED) & set(left)))
        (folder / "index.sqlite").unlink()
        with CacheWriter(folder, MANIFEST):
            pass
        check_whole(folder, *kept)
    assert killed * stride > 50
    check_whole(folder, *kept)


def test_what_was_dropped_before_a_kill_stays_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path)
    monkeypatch.setattr("lserve_tools.cache.prune.compact", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        drop(folder, *DROPPED)
    with CacheWriter(folder, MANIFEST) as writer:
        assert not set(DROPPED) & writer.documents().keys()
        write_document(writer, DOCUMENTS[0])
    assert "a.md" in paths_of(folder)
