"""Builds: the same documents make the same bytes, only what changed is written, and nothing half-written is kept."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch

from lserve_tools.cache.keys import chain_keys
from lserve_tools.cache.store import CacheStore
from lserve_tools.cache.writer import CacheWriter
from lserve_tools.errors import CacheError, CacheMismatchError
from tests.helpers.stored import (
    MIXED,
    TinyDocument,
    build,
    check_whole,
    kv_of,
    load_all,
    records_of,
    tiny_manifest,
    write_document,
)

A, B, C = (TinyDocument(f"{name}.md", (70, 65, 20), seed=i) for i, name in enumerate("abc"))


def shards(folder: Path) -> dict[str, str]:
    """Digest of every file beside the index and the manifest."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted((folder / "shards").iterdir())}


@pytest.mark.parametrize("codec", ["exact", "int8"])
def test_the_same_documents_make_the_same_shards(tmp_path: Path, codec: str) -> None:
    manifest = tiny_manifest(codec=codec, head_mask=MIXED, sink=4, recent=30)
    one, two = (build(tmp_path / name, manifest, A, B, C, seal_bytes=30_000) for name in "xy")
    assert shards(one) == shards(two)
    assert len(shards(one)) > 1


def test_shards_stay_below_their_limit(tmp_path: Path) -> None:
    build(tmp_path, tiny_manifest(), A, B, C, max_bytes=70_000)
    sizes = [p.stat().st_size for p in (tmp_path / "shards").iterdir()]
    header = 4_000
    assert len(sizes) > 3
    assert max(sizes) < 70_000 + header
    check_whole(tmp_path, A, B, C)


def test_a_second_build_adds_what_is_new(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    build(tmp_path, manifest, A)
    before = shards(tmp_path)
    with CacheWriter(tmp_path, manifest) as writer:
        assert writer.has_document("a.md", A.sha256)
        assert not writer.has_document("a.md", "other")
        assert not writer.has_document("b.md", B.sha256)
        write_document(writer, B)
        assert not writer.has_document("b.md", B.sha256), "nothing is entered before its shard is sealed"
    assert before.items() < shards(tmp_path).items()
    check_whole(tmp_path, A, B)


def test_chunks_that_documents_share_are_stored_once(tmp_path: Path) -> None:
    class Longer(TinyDocument):
        def __post_init__(self) -> None:
            ids = A.token_ids + tuple(range(40))
            object.__setattr__(self, "token_ids", ids)

    longer = Longer("longer.md", (*A.chunks, 40))
    with CacheWriter(tmp_path, tiny_manifest()) as writer:
        assert write_document(writer, A) == [True] * 3
        assert write_document(writer, longer) == [False, False, False, True]
    with CacheWriter(tmp_path, tiny_manifest()) as writer:
        assert write_document(writer, longer) == [False] * 4
    check_whole(tmp_path, A, longer)
    assert CacheStore.open(tmp_path).stats().chunks == 4


def test_a_shared_chunk_grows_when_a_longer_window_needs_it(tmp_path: Path) -> None:
    """What is stored of a chunk in the middle of a long document is not enough for one that ends there."""

    class Cut(TinyDocument):
        def __post_init__(self) -> None:
            object.__setattr__(self, "token_ids", A.token_ids[:135])

    cut = Cut("cut.md", A.chunks[:2])
    manifest = tiny_manifest(head_mask=MIXED, sink=10, recent=80)
    for name, order in (("x", (A, cut)), ("y", (cut, A))):
        folder = tmp_path / name
        with CacheWriter(folder, manifest) as writer:
            for document in order:
                write_document(writer, document)
        check_whole(folder, A, cut)
        records = [r for r in records_of(CacheStore.open(folder), A) if r]
        assert [r.has_tail for r in records] == [False, True, True]
        assert [r.streaming_ranges for r in records] == [((0, 7), (55, 70)), ((0, 65),), ((0, 20),)]


def test_a_changed_document_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    changed = TinyDocument("a.md", (33, 80), seed=9)
    manifest = tiny_manifest()
    build(tmp_path, manifest, A, B)
    build(tmp_path, manifest, changed)
    check_whole(tmp_path, changed, B)
    store = CacheStore.open(tmp_path)
    assert 0 < store.stats().dead_bytes < store.stats().bytes


def test_pruning_drops_documents_and_shards_that_nobody_needs(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    for document in (A, B, C):
        build(tmp_path, manifest, document)
    with CacheWriter(tmp_path, manifest) as writer:
        report = writer.prune(["a.md", "c.md"])
    assert report.documents == ("b.md",)
    assert report.after < report.before
    assert len(shards(tmp_path)) == 2
    check_whole(tmp_path, A, C)


def test_what_is_pruned_is_gone_from_shards_that_live(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    build(tmp_path, manifest, A, B)
    (old,) = shards(tmp_path)
    with CacheWriter(tmp_path, manifest) as writer:
        report = writer.prune(["b.md"])
    (new,) = shards(tmp_path)
    assert (new != old, new[:7], report.documents) == (True, "000001-", ("a.md",))
    (tmp_path / "index.sqlite").unlink()
    with CacheWriter(tmp_path, manifest):
        pass
    store = CacheStore.open(tmp_path)
    assert store.stats().dead_bytes == 0
    assert records_of(store, A) == [None] * 3
    check_whole(tmp_path, B)
    before = shards(tmp_path)
    with CacheWriter(tmp_path, manifest) as writer:
        writer.prune(["b.md"])
    assert shards(tmp_path) == before, "nothing was dead"


def test_the_prefix_is_stored_and_never_listed_or_pruned(tmp_path: Path) -> None:
    manifest = tiny_manifest(head_mask=MIXED, sink=2, recent=2)
    with CacheWriter(tmp_path, manifest) as writer:
        before = writer.has_prefix
        writer.begin_prefix()
        (key,) = chain_keys(writer.root_key, manifest.prefix_ids, (3,))
        assert writer.begin_chunk(key, manifest.prefix_ids, 0)
        for layer in range(4):
            writer.add_layer(layer, *kv_of(manifest, key, layer, 3))
        writer.end_document()
        write_document(writer, A)
        writer.prune(["a.md"])
        assert (before, writer.has_prefix) == (False, True)
    check_whole(tmp_path, A)
    store = CacheStore.open(tmp_path)
    record = store.find(key, manifest.prefix_ids)
    assert record is not None
    assert (record.position, record.has_tail, record.streaming_ranges) == (0, True, ((0, 3),))
    assert store.document("") is None
    with CacheWriter(tmp_path, tiny_manifest(prefix_ids=(), head_mask=MIXED), overwrite=True) as writer:
        assert writer.has_prefix


def test_what_is_complete_is_kept_when_a_build_is_broken_off(tmp_path: Path) -> None:
    manifest = tiny_manifest()

    def broken_off() -> None:
        with CacheWriter(tmp_path, manifest) as writer:
            write_document(writer, A)
            write_document(writer, B, stop_at=1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    check_whole(tmp_path, A)
    with CacheWriter(tmp_path, manifest) as writer:
        assert write_document(writer, B) == [False, True, True]
    check_whole(tmp_path, A, B)
    other = build(tmp_path / "other", manifest, A)
    assert all(not name.endswith(".tmp") for name in [*shards(tmp_path), *shards(other)])


def test_a_document_that_is_not_ended_is_forgotten(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, tiny_manifest()) as writer:
        write_document(writer, A, stop_at=2)
        write_document(writer, B)
    check_whole(tmp_path, B)


def test_a_killed_build_goes_on_at_the_last_sealed_shard(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    child = os.fork() if hasattr(os, "fork") else pytest.skip("needs fork")
    if not child:
        writer = CacheWriter(tmp_path, manifest, seal_bytes=1).__enter__()
        write_document(writer, A)
        write_document(writer, B, stop_at=1)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert any(name.endswith(".tmp") for name in shards(tmp_path))
    check_whole(tmp_path, A)
    with CacheWriter(tmp_path, manifest) as writer:
        assert not any(name.endswith(".tmp") for name in shards(tmp_path))
        assert writer.has_document("a.md", A.sha256)
        write_document(writer, B)
    check_whole(tmp_path, A, B)


def test_only_one_build_writes_at_a_time(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    with CacheWriter(tmp_path, manifest) as writer:
        with pytest.raises(CacheError, match=r"another build is writing to .*Wait"), CacheWriter(tmp_path, manifest):
            pass
        write_document(writer, A)
    with CacheWriter(tmp_path, manifest):
        pass


def test_readers_may_look_on_while_a_build_adds(tmp_path: Path) -> None:
    build(tmp_path, tiny_manifest(), A)
    store = CacheStore.open(tmp_path)
    build(tmp_path, tiny_manifest(), B)
    assert [d.path for d in store.documents()] == ["a.md", "b.md"]
    assert len(load_all(store, A)) == len(load_all(store, B)) == 3


def test_a_cache_of_another_kind_is_refused_or_replaced(tmp_path: Path) -> None:
    build(tmp_path, tiny_manifest(), A)
    for change, field in (
        ({"codec": "int8"}, "codec"),
        ({"model_fingerprint": "x"}, "model"),
        ({"tokenizer_fingerprint": "x"}, "tokenizer"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"head_mask": MIXED, "head_profile": "p"}, "head profile"),
        ({"prefix_ids": (1,), "prefix_text": "x"}, "prefix"),
    ):
        other = tiny_manifest(**change)
        with pytest.raises(CacheMismatchError, match="--overwrite") as caught, CacheWriter(tmp_path, other):
            pass
        assert caught.value.field == field
    check_whole(tmp_path, A)
    other = tiny_manifest(dtype="bfloat16")
    build(tmp_path, other, B, overwrite=True)
    check_whole(tmp_path, B)
    assert CacheStore.open(tmp_path).manifest == other


def test_chunks_out_of_order_or_of_other_documents_are_refused(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, tiny_manifest()) as writer:
        with pytest.raises(ValueError, match="no document"):
            writer.begin_chunk(b"", (1,), 3)
        keys = chain_keys(writer.document_root, A.token_ids, A.chunks)
        writer.begin_document("a.md", "s", 1, 1, A.token_ids, A.chunks)
        first, second = A.pieces()[:2]
        for key, ids, position in ((keys[1], second, 73), (keys[0], first, 4), (keys[0], second, 3)):
            with pytest.raises(ValueError, match=r"chunk 0 of a\.md"):
                writer.begin_chunk(key, ids, position)
        writer.begin_chunk(keys[0], first, 3)
        with pytest.raises(ValueError, match="layer 1 where layer 0 is due"):
            writer.add_layer(1, torch.zeros(3, 70, 8), torch.zeros(3, 70, 8))
        with pytest.raises(ValueError, match="0 of 3 chunks"):
            writer.end_document()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CacheError, match="cannot be written"),
        CacheWriter(tmp_path / "file" / "cache", tiny_manifest()),
    ):
        pass
