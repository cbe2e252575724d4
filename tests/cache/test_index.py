"""What the system refuses is no damage: a sound index is never thrown away for a lock, a full disk or a kill."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from lserve_tools.cache.store import CacheStore
from lserve_tools.cache.verify import verify
from lserve_tools.cache.writer import CacheWriter
from lserve_tools.errors import CacheError, CorruptIndexError
from tests.helpers.stored import TinyDocument, build, check_whole, tiny_manifest

A, B = TinyDocument("a.md", (70, 30), seed=1), TinyDocument("b.md", (20,), seed=2)
MANIFEST = tiny_manifest()


def test_an_index_that_is_held_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, MANIFEST, A, B)
    monkeypatch.setattr("lserve_tools.cache.database._WAIT", 0)
    inode = (tmp_path / "index.sqlite").stat().st_ino
    holder = sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    for use in (lambda: CacheWriter(tmp_path, MANIFEST).__enter__(), lambda: CacheStore.open(tmp_path).documents()):
        with pytest.raises(CacheError, match=r"database is locked.*Another process holds it") as caught:
            use()
        assert not isinstance(caught.value, CorruptIndexError)
    holder.execute("ROLLBACK")
    holder.close()
    with CacheWriter(tmp_path, MANIFEST):
        pass
    assert (tmp_path / "index.sqlite").stat().st_ino == inode
    check_whole(tmp_path, A, B)


def test_a_change_that_a_kill_broke_off_is_taken_back_by_the_next_build(tmp_path: Path) -> None:
    folder = build(tmp_path / "cache", MANIFEST, A, B)
    changing = sqlite3.connect(folder / "index.sqlite", isolation_level=None)
    changing.execute("PRAGMA cache_size = 1")  # so that half of the change is on disk before it is complete
    changing.execute("BEGIN")
    changing.execute("UPDATE chunks SET token_ids = zeroblob(4000)")
    killed = Path(shutil.copytree(folder, tmp_path / "killed"))
    changing.close()
    assert (killed / "index.sqlite-journal").exists()
    with pytest.raises(CorruptIndexError, match="left by a killed build in the middle of a change"):
        CacheStore.open(killed).documents()
    assert [d.file for d in verify(killed, lambda _: None).damaged] == ["index.sqlite"]
    with CacheWriter(killed, MANIFEST) as writer:
        assert writer.documents().keys() == {"a.md", "b.md"}
    assert verify(killed, lambda _: None).damaged == []
    check_whole(killed, A, B)
