"""Killed builds, full disks, folders that cannot be written to, and several processes on one cache."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from lserve_tools.cache.store import CacheStore
from lserve_tools.cache.verify import verify
from lserve_tools.cache.writer import CacheWriter
from lserve_tools.errors import CorruptIndexError
from tests.helpers.processes import finish, in_child, needs_fork, start
from tests.helpers.stored import (
    MIXED,
    TinyDocument,
    check_whole,
    load_all,
    tiny_manifest,
    write_document,
    write_prefix,
)

resource = pytest.importorskip("resource", reason="needs limits of a process")
KILLS, SECONDS = 100, 60  # at full size
MANIFEST = tiny_manifest(head_mask=MIXED, sink=10, recent=20)
DOCUMENTS = [TinyDocument(f"{i:02d}.md", (70, 30 + i), seed=i) for i in range(12)]
SEAL_BYTES = 20_000

pytestmark = needs_fork
slow = pytest.mark.slow


def make(folder: Path, documents: list[TinyDocument] = DOCUMENTS) -> None:
    """Build what is not there yet."""
    with CacheWriter(folder, MANIFEST, seal_bytes=SEAL_BYTES) as writer:
        write_prefix(writer)
        for document in documents:
            if not writer.has_document(document.path, document.sha256):
                write_document(writer, document)


def contents(folder: Path) -> dict[str, object]:
    """Digests of shards, and all rows of the index but for the times of files, which shards do not hold."""
    held: dict[str, object] = {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (folder / "shards").iterdir()
    }
    connection = sqlite3.connect(folder / "index.sqlite")
    tables = {"shards": "*", "chunks": "*", "documents": "path, sha256, size, shard", "document_chunks": "*"}
    for table, columns in tables.items():
        held[table] = sorted(connection.execute(f"SELECT {columns} FROM {table}"))
    connection.close()
    return held


def read_what_is_there(folder: Path) -> list[str]:
    """Load all documents that a reader finds and compare them; gives their paths."""
    store = CacheStore.open(folder)
    try:
        paths = [entry.path for entry in store.documents()]
        for document in DOCUMENTS:
            if document.path in paths:
                load_all(store, document)
        return paths
    finally:
        store.close()


@pytest.mark.parametrize("kills", [8, pytest.param(KILLS, marks=slow)])
def test_a_build_killed_at_random_moments_ends_like_one_that_was_not(tmp_path: Path, kills: int) -> None:
    rng = random.Random(kills)
    make(tmp_path / "whole")
    wanted = contents(tmp_path / "whole")
    started = time.perf_counter()
    in_child(lambda: make(tmp_path / "timed"))
    seconds = time.perf_counter() - started
    killed = 0
    while killed < kills:
        folder = tmp_path / "killed"
        shutil.rmtree(folder, ignore_errors=True)
        for _ in range(rng.randint(1, 3)):
            build = start(partial(make, folder))
            time.sleep(rng.uniform(0, seconds))
            os.kill(build[0], signal.SIGKILL)
            said = finish(build)
            assert said in ("", "None"), said
            killed += not said
            if (folder / "index.sqlite").exists():
                try:
                    read_what_is_there(folder)
                except CorruptIndexError:  # in the middle of a change: the next build goes back
                    assert (folder / "index.sqlite-journal").exists()
        make(folder)
        found = verify(folder, lambda _: None)
        assert (found.damaged, found.notes) == ([], [])
        assert contents(folder) == wanted


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a file system of so many kilobytes, if this process may."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted: list[Path] = []

    def mount(kilobytes: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("may not mount a file system")
        mounted.append(place)
        return place

    yield mount
    for one in mounted:
        subprocess.run(["umount", str(one)], check=True)


def goes_on(folder: Path, said: str, elsewhere: Path) -> int:
    """Check what a build on a full disk said and left, then finish it where there is room; gives what was kept."""
    assert said.startswith("error: "), said
    assert "\n" not in said
    assert str(folder) in said
    sealed = {p.name for p in (folder / "shards").glob("*.safetensors")}
    assert not list(folder.rglob("*.tmp"))
    shutil.copytree(folder, elsewhere)
    make(elsewhere)
    assert sealed <= {p.name for p in (elsewhere / "shards").iterdir()}
    assert verify(elsewhere, lambda _: None).damaged == []
    check_whole(elsewhere, *DOCUMENTS)
    return len(sealed)


@pytest.mark.parametrize("kilobytes", [60, 160, 240, 320])
def test_a_full_disk_is_one_line_and_the_build_goes_on(
    tmp_path: Path, small_disk: Callable[[int], Path], kilobytes: int
) -> None:
    folder = small_disk(kilobytes) / "cache"
    kept = goes_on(folder, in_child(lambda: make(folder)), tmp_path / "elsewhere")
    assert kept or kilobytes < 160


@pytest.mark.parametrize("limit", [500, 20_000, 46_000, 50_000])
def test_a_file_that_may_not_grow_is_one_line_and_the_build_goes_on(tmp_path: Path, limit: int) -> None:
    """As on a full disk, wherever a process may not mount one: index and shards are bound alike."""

    def bound() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        make(tmp_path / "cache")

    goes_on(tmp_path / "cache", in_child(bound), tmp_path / "elsewhere")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="must be root to become another user")
def test_another_user_can_read_and_is_told_why_not_build() -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = Path(name) / "cache"
        make(folder)

        def as_nobody(work: Callable[[], object]) -> str:
            def changed() -> object:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                return work()

            return in_child(changed)

        assert as_nobody(lambda: len(read_what_is_there(folder))) == "12"
        assert as_nobody(lambda: verify(folder, lambda _: None).damaged) == "[]"
        said = as_nobody(lambda: make(folder))
        assert said.startswith(f"error: {folder} cannot be written (Permission denied).")
        assert "\n" not in said


@pytest.mark.parametrize("seconds", [4, pytest.param(SECONDS, marks=slow)])
def test_two_builders_and_a_reader_share_a_folder(tmp_path: Path, seconds: int) -> None:
    folder = tmp_path / "cache"
    make(folder, DOCUMENTS[:2])
    end = time.monotonic() + seconds

    def build(seed: int) -> str:
        rng, done, waited = random.Random(seed), 0, 0
        while time.monotonic() < end:
            said = in_child(lambda: make(folder, rng.sample(DOCUMENTS[2:], 3)))
            waited += "another build is writing to" in said
            done += said == "None"
            assert said == "None" or "another build is writing to" in said, said
            if done % 5 == 4:
                said = in_child(lambda: drop(folder, rng.sample(DOCUMENTS[2:], 4)))
                assert said == "None" or "another build is writing to" in said, said
        return f"{done} {waited}"

    def read() -> str:
        count = 0
        while time.monotonic() < end:
            assert {"00.md", "01.md"} <= set(read_living(folder))
            count += 1
        return str(count)

    said = [finish(one) for one in [start(lambda: build(1)), start(lambda: build(2)), start(read)]]
    assert not [words for words in said if "bug" in words or "error" in words], said
    assert int(said[2]) > seconds
    assert sum(int(words.split()[0]) for words in said[:2]) > seconds
    found = verify(folder, lambda _: None)
    assert found.damaged == []
    make(folder)
    check_whole(folder, *DOCUMENTS)


def drop(folder: Path, documents: list[TinyDocument]) -> None:
    """Prune some documents."""
    with CacheWriter(folder, MANIFEST) as writer:
        writer.prune(writer.documents().keys() - {d.path for d in documents})


def read_living(folder: Path) -> list[str]:
    """Load the documents that are never dropped, one after the other."""
    store = CacheStore.open(folder)
    try:
        for document in DOCUMENTS[:2]:
            load_all(store, document)
        return [entry.path for entry in store.documents()]
    finally:
        store.close()
