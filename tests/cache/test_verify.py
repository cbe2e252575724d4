"""Verifying finds whatever is not as it was written and changes nothing; rebuilding leaves a cache that is sound."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from lserve_tools.cache.rebuild import rebuild
from lserve_tools.cache.verify import shard_bytes, verify
from lserve_tools.cache.writer import CacheWriter
from lserve_tools.errors import CacheError
from lserve_tools.schema import CacheVerification
from tests.helpers.stored import (
    MIXED,
    TinyDocument,
    build,
    check_whole,
    shard_path,
    tiny_manifest,
    write_document,
    write_prefix,
)

A, B = TinyDocument("a.md", (70, 30), seed=1), TinyDocument("b.md", (20,), seed=2)
MANIFEST = tiny_manifest(head_mask=MIXED, sink=10, recent=20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache of two shards and a prefix."""
    with CacheWriter(tmp_path, MANIFEST, seal_bytes=1) as writer:
        write_prefix(writer)
        for document in (A, B):
            write_document(writer, document)
    return tmp_path


def look(folder: Path) -> CacheVerification:
    """Verify, and make sure that nothing was changed by it."""

    def state() -> dict[Path, str]:
        return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}

    before = state()
    found = verify(folder, lambda _: None)
    assert state() == before
    return found


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def test_a_sound_cache_is_clean(folder: Path) -> None:
    read: list[int] = []
    found = verify(folder, read.append)
    assert (found.damaged, found.notes, found.documents, found.chunks, found.shards) == ([], [], 2, 4, 3)
    assert 0 < sum(read) < found.bytes == shard_bytes(folder)


def test_a_damaged_frame_is_named_with_what_needs_it(folder: Path) -> None:
    flip(shard_path(folder, "b.md"), -5)
    (damage,) = look(folder).damaged
    assert (damage.place, damage.documents) == ("frame 0/3/kv", ("b.md",))
    found = rebuild(folder, lambda _: None)
    assert (found.rebuilt, found.build_again, found.documents) == (True, ["b.md"], 1)
    assert (look(folder).damaged, look(folder).notes) == ([], [])
    check_whole(folder, A)


@pytest.mark.parametrize("damage", ["header", "gone", "cut"])
def test_a_shard_that_cannot_be_used_is_named(folder: Path, damage: str) -> None:
    path = shard_path(folder, "a.md")
    match damage:
        case "header":
            flip(path, 40)
        case "gone":
            path.unlink()
        case "cut":
            path.write_bytes(path.read_bytes()[:-100])
    damaged = look(folder).damaged
    assert {d.file for d in damaged} == {f"shards/{path.name}"}
    assert {d for found in damaged for d in found.documents} == {"a.md"}
    assert rebuild(folder, lambda _: None).build_again == ["a.md"]
    assert look(folder).damaged == []
    check_whole(folder, B)


def test_bytes_after_the_end_are_cut_off(folder: Path) -> None:
    path = shard_path(folder, "a.md")
    path.write_bytes(path.read_bytes() + b"more")
    assert [d.place for d in look(folder).damaged] == ["its end"]
    assert rebuild(folder, lambda _: None).build_again == []
    assert look(folder).damaged == []
    check_whole(folder, A, B)


INDEXES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"garbage" * 5000),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:5000]),
}


@pytest.mark.parametrize("how", INDEXES)
def test_an_index_is_made_again(folder: Path, how: str) -> None:
    INDEXES[how](folder / "index.sqlite")
    (damage,) = look(folder).damaged
    assert (damage.file, "--rebuild" in damage.cure) == ("index.sqlite", True)
    found = rebuild(folder, lambda _: None)
    assert (found.documents, found.build_again) == (2, [])
    assert look(folder).damaged == []
    check_whole(folder, A, B)


def test_an_index_of_another_cache_is_found_and_made_again(folder: Path, tmp_path: Path) -> None:
    other = build(tmp_path / "other", tiny_manifest(prefix_ids=(9,)), A)
    (folder / "index.sqlite").write_bytes((other / "index.sqlite").read_bytes())
    assert {d.file for d in look(folder).damaged} == {"index.sqlite"}
    assert rebuild(folder, lambda _: None).documents == 2
    assert look(folder).damaged == []


def test_an_index_that_says_something_else_is_found(folder: Path) -> None:
    import sqlite3

    changes = [
        "UPDATE documents SET size = 7 WHERE path = 'a.md'",
        "UPDATE documents SET sha256 = 'x' WHERE path = 'a.md'",
        "UPDATE documents SET shard = 'x' WHERE path = 'a.md'",
        "UPDATE chunks SET position = position + 1",
        "UPDATE chunks SET bytes = bytes + 1",
        "UPDATE chunks SET has_tail = 1 - has_tail",
        "UPDATE shards SET bytes = bytes + 1",
        "UPDATE shards SET sha256 = 'x'",
        "DELETE FROM document_chunks WHERE path = 'a.md' AND place = 1",
        "DELETE FROM chunks WHERE position = 3",
    ]
    index = folder / "index.sqlite"
    whole = index.read_bytes()
    for change in changes:
        with sqlite3.connect(index) as connection:
            connection.execute(change)
        connection.close()
        assert look(folder).damaged, change
        rebuild(folder, lambda _: None)
        assert look(folder).damaged == [], change
        check_whole(folder, A, B)
        index.write_bytes(whole)


def test_what_a_killed_build_leaves_is_noted_and_no_damage(folder: Path) -> None:
    (folder / "shards" / "000009.data.tmp").write_bytes(b"x")
    shard_path(folder, "b.md").with_suffix(".damaged").touch()
    found = look(folder)
    assert (found.damaged, len(found.notes)) == ([], 2)
    with CacheWriter(folder, MANIFEST):
        pass
    assert look(folder).notes == []


def test_damage_that_no_document_needs_is_noted(folder: Path) -> None:
    old = shard_path(folder, "b.md")
    build(folder, MANIFEST, TinyDocument("b.md", (25,), seed=3))
    flip(old, -5)
    found = look(folder)
    assert (found.damaged, len(found.notes)) == ([], 1)
    assert "cache prune" in found.notes[0].cure
    with CacheWriter(folder, MANIFEST) as writer:
        writer.prune(["a.md", "b.md"])
    assert look(folder).notes == []


def test_a_damaged_manifest_is_named_and_made_again_by_a_build(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"tiny"', '"tony"'))
    (damage,) = look(folder).damaged
    assert (damage.file, damage.problem) == ("manifest.json", "is damaged (its checksum is another).")
    with pytest.raises(CacheError, match="checksum"):
        rebuild(folder, lambda _: None)
    path.unlink()
    with (
        pytest.raises(CacheError, match=r"other shards, but manifest\.json is missing"),
        CacheWriter(folder, tiny_manifest(prefix_ids=(1,))),
    ):
        pass
    with CacheWriter(folder, MANIFEST):
        pass
    assert look(folder).damaged == []
    check_whole(folder, A, B)


def test_shards_of_another_cache_are_not_deleted(folder: Path, tmp_path: Path) -> None:
    other = build(tmp_path / "other", tiny_manifest(prefix_ids=(9,)), B)
    foreign = folder / "shards" / next((other / "shards").iterdir()).name.replace("000001", "000007")
    foreign.write_bytes(next((other / "shards").iterdir()).read_bytes())
    with pytest.raises(CacheError, match="is of another cache"):
        rebuild(folder, lambda _: None)
    assert foreign.exists()
