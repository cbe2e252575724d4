"""Damaged caches: what is loaded is what was written, or an error that names the place, whatever happens to the bytes.

The next build mends them: it forgets what is damaged and builds that again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lserve_tools.cache.store import CacheStore
from lserve_tools.cache.writer import CacheWriter
from lserve_tools.errors import CacheError, CorruptShardError
from tests.helpers.stored import (
    MIXED,
    TinyDocument,
    build,
    expected,
    load_all,
    records_of,
    tiny_manifest,
    write_document,
)

A, B = TinyDocument("a.md", (70, 30), seed=1), TinyDocument("b.md", (20,), seed=2)
MANIFEST = tiny_manifest(head_mask=MIXED, sink=10, recent=20)
KINDS = ["flip", "cut", "zero", "swap"]

relaxed = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
Damage = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of two shards; not to be written to."""
    folder = tmp_path_factory.mktemp("whole") / "cache"
    build(folder, MANIFEST, A, B, seal_bytes=1)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Callable[[], Path]:
    """Makes a fresh copy at each call."""

    def make() -> Path:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        return Path(shutil.copytree(whole, tmp_path / "copy"))

    return make


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """A change of some bytes: one bit, a cut, a run of zeros, or two runs swapped."""
    kind = draw(st.sampled_from(KINDS))
    place, other = draw(st.floats(0, 1, exclude_max=True)), draw(st.floats(0, 1, exclude_max=True))
    bit, run = draw(st.integers(0, 7)), draw(st.integers(1, 40))

    def damage(data: bytes) -> bytes:
        at, to = int(place * len(data)), int(other * len(data))
        changed = bytearray(data)
        match kind:
            case "flip":
                changed[at] ^= 1 << bit
            case "cut":
                del changed[at:]
            case "zero":
                changed[at : at + run] = bytes(len(changed[at : at + run]))
            case "swap":
                count = min(run, len(data) - max(at, to))
                changed[at : at + count], changed[to : to + count] = data[to : to + count], data[at : at + count]
        return bytes(changed)

    return damage


def load_and_compare(folder: Path) -> Iterator[CacheError]:
    """Load all that can be loaded, make sure that it is right, and give the errors met."""
    store = CacheStore.open(folder)
    for document in (A, B):
        for record in records_of(store, document):
            if record is None:
                continue
            try:
                for layer, kv in enumerate(store.load(record)):
                    got = (kv.keys, kv.values, kv.streaming_keys, kv.streaming_values)
                    for tensor, wanted in zip(got, expected(MANIFEST, record, layer), strict=True):
                        assert torch.equal(tensor, wanted), "other tensors than were written"
            except CorruptShardError as error:
                yield error
    store.close()


def error_of(folder: Path) -> CacheError | None:
    """The error that using a cache meets; what can be used must be right."""
    known = {d.path: d.token_ids for d in (A, B)}
    try:
        errors = list(load_and_compare(folder))
        store = CacheStore.open(folder)
        for entry in store.documents():
            assert known.get(entry.path, entry.token_ids) == entry.token_ids
            assert entry.token_ids in known.values()
        store.stats()
        return errors[0] if errors else None
    except CacheError as error:
        return error


def mend_and_check(folder: Path) -> None:
    """Build again, and expect everything to be there."""
    with CacheWriter(folder, MANIFEST) as writer:
        for document in (A, B):
            if not writer.has_document(document.path, document.sha256):
                write_document(writer, document)
    assert list(load_and_compare(folder)) == []
    store = CacheStore.open(folder)
    assert [(d.path, d.token_ids) for d in store.documents()] == [("a.md", A.token_ids), ("b.md", B.token_ids)]
    assert len(load_all(store, A)) == 2
    store.close()


@relaxed
@given(damage=damages(), number=st.integers(0, 1))
def test_a_damaged_shard_never_gives_other_tensors(copy: Callable[[], Path], damage: Damage, number: int) -> None:
    folder = copy()
    path = sorted((folder / "shards").glob("*.safetensors"))[number]
    path.write_bytes(damage(path.read_bytes()))
    for error in load_and_compare(folder):
        assert path.name in error.message
        assert "build-cache" in error.cure
    mend_and_check(folder)


@relaxed
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_when_the_index_is_made_again(copy: Callable[[], Path], place: float, bit: int) -> None:
    """Token ids lie in shards too: those that were damaged must not get into a new index."""
    folder = copy()
    path = max((folder / "shards").glob("*.safetensors"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    path.write_bytes(bytes(data))
    (folder / "index.sqlite").unlink()
    with CacheWriter(folder, MANIFEST) as writer:
        assert writer.has_document("b.md", B.sha256)
    list(load_and_compare(folder))
    mend_and_check(folder)


@relaxed
@given(damage=damages())
def test_a_damaged_index_never_gives_other_tensors_or_texts(copy: Callable[[], Path], damage: Damage) -> None:
    folder = copy()
    path = folder / "index.sqlite"
    path.write_bytes(damage(path.read_bytes()))
    error = error_of(folder)
    assert error is None or (str(folder) in error.message and error.cure)
    mend_and_check(folder)


@relaxed
@given(damage=damages())
def test_a_damaged_manifest_is_told_or_harmless(copy: Callable[[], Path], damage: Damage) -> None:
    folder = copy()
    path = folder / "manifest.json"
    path.write_bytes(damage(path.read_bytes()))
    error = error_of(folder)
    assert error is None or error.cure


def test_an_index_is_made_again_from_the_shards(copy: Callable[[], Path]) -> None:
    folder = copy()
    before = CacheStore.open(folder)
    (folder / "index.sqlite").unlink()
    with CacheWriter(folder, MANIFEST) as writer:
        assert writer.has_document("a.md", A.sha256)
        assert writer.has_document("b.md", B.sha256)
    after = CacheStore.open(folder)
    for document in (A, B):
        assert records_of(after, document) == records_of(before, document)
    assert after.stats() == before.stats()
    assert list(load_and_compare(folder)) == []


def test_a_shard_that_is_gone_is_built_again(copy: Callable[[], Path]) -> None:
    folder = copy()
    sorted((folder / "shards").iterdir())[0].unlink()
    with pytest.raises(CorruptShardError, match="No such file"):
        load_all(CacheStore.open(folder), A)
    with CacheWriter(folder, MANIFEST) as writer:
        assert not writer.has_document("a.md", A.sha256)
        assert writer.has_document("b.md", B.sha256)
    mend_and_check(folder)


def test_only_the_damaged_chunk_is_built_again(copy: Callable[[], Path]) -> None:
    folder = copy()
    path = sorted((folder / "shards").iterdir())[0]
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptShardError, match="frame 1/3/kv is damaged"):
        load_all(CacheStore.open(folder), A)
    with CacheWriter(folder, MANIFEST) as writer:
        assert not writer.has_document("a.md", A.sha256)
        assert write_document(writer, A) == [False, True]
    mend_and_check(folder)


def test_damage_in_frames_and_headers_is_found(copy: Callable[[], Path]) -> None:
    """Where a bit means something, it is found; a property alone could pass by never hitting one."""
    folder = copy()
    path = sorted((folder / "shards").iterdir())[0]
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for place in (0, 4, 8, 100, header - 20, header + 40, (header + len(data)) // 2, len(data) - 1):
        damaged = bytearray(data)
        damaged[place] ^= 1
        path.write_bytes(bytes(damaged))
        if place == header + 40:  # token ids, which readers take from the index
            (folder / "index.sqlite").unlink()
            with CacheWriter(folder, MANIFEST) as writer:
                assert not writer.has_document("a.md", A.sha256)
            folder = copy()
            continue
        assert list(load_and_compare(folder)), f"byte {place} of {len(data)}"
