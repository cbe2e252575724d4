"""What was written to a cache is what is loaded from it; all else is an error that says what to do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lserve_tools.cache.store import CacheStore
from lserve_tools.cache.writer import CacheWriter
from lserve_tools.errors import CacheError, CacheMismatchError
from lserve_tools.schema import Manifest
from tests.helpers.stored import MIXED, TinyDocument, build, expected, load_all, records_of, tiny_manifest

SHORT, LONG = TinyDocument("b/short.md", (1, 64), seed=1), TinyDocument("a.md", (65, 130, 63), seed=2)
STREAMING = {"head_mask": MIXED, "head_profile": "p1", "sink": 10, "recent": 40}
KINDS: list[dict[str, Any]] = [{}, STREAMING, {**STREAMING, "recent": 150}, {**STREAMING, "streaming": "full"}]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", ["exact", "int8"])
@pytest.mark.parametrize("kind", KINDS, ids=["retrieval", "window", "wide window", "full"])
def test_kv_comes_back(tmp_path: Path, codec: str, dtype: str, kind: dict[str, Any]) -> None:
    manifest = tiny_manifest(codec=codec, dtype=dtype, **kind)
    store = CacheStore.open(build(tmp_path, manifest, SHORT, LONG))
    for document in (SHORT, LONG):
        position = 3
        for record, layers in zip(records_of(store, document), load_all(store, document), strict=True):
            assert record is not None
            assert (record.position, record.rotated) == (position, codec == "exact")
            position += record.num_tokens
            assert len(layers) == manifest.num_layers
            for layer, got in enumerate(layers):
                for tensor, wanted in zip(got, expected(manifest, record, layer), strict=True):
                    assert tensor.shape == wanted.shape
                    if codec == "exact":
                        assert torch.equal(tensor, wanted)
                    else:
                        assert tensor.dtype == torch.float32
                        torch.testing.assert_close(tensor, wanted.float(), atol=0.03, rtol=0)


def test_streaming_heads_keep_their_windows_only(tmp_path: Path) -> None:
    store = CacheStore.open(build(tmp_path, tiny_manifest(**STREAMING), LONG))
    records = records_of(store, LONG)
    assert [r and r.streaming_ranges for r in records] == [((0, 7),), (), ((23, 63),)]
    assert [r and r.has_tail for r in records] == [False, False, True]


def test_a_window_wider_than_the_last_chunk_reaches_back(tmp_path: Path) -> None:
    store = CacheStore.open(build(tmp_path, tiny_manifest(**{**STREAMING, "recent": 100}), LONG))
    records = records_of(store, LONG)
    assert [r and r.streaming_ranges for r in records] == [((0, 7),), ((93, 130),), ((0, 63),)]
    assert [r and r.has_tail for r in records] == [False, False, True]


def test_without_streaming_heads_every_chunk_has_its_tail(tmp_path: Path) -> None:
    store = CacheStore.open(build(tmp_path, tiny_manifest(), LONG))
    assert all(r and r.has_tail and r.streaming_ranges == () for r in records_of(store, LONG))


def test_documents_are_listed_by_path_with_their_tokens(tmp_path: Path) -> None:
    store = CacheStore.open(build(tmp_path, tiny_manifest(), SHORT, LONG))
    assert [d.path for d in store.documents()] == ["a.md", "b/short.md"]
    entry = store.document("a.md")
    assert entry is not None
    assert (entry.token_ids, entry.chunks, entry.sha256) == (LONG.token_ids, LONG.chunks, LONG.sha256)
    assert (entry.size, entry.mtime_ns) == (258, 7)
    assert store.document("c.md") is None
    assert store.document("") is None


def test_a_chunk_is_found_by_key_and_tokens_only(tmp_path: Path) -> None:
    store = CacheStore.open(build(tmp_path, tiny_manifest(), SHORT))
    record = records_of(store, SHORT)[1]
    assert record is not None
    ids = SHORT.pieces()[1]
    assert store.find(record.prefix_key, list(ids)) == record
    assert store.find(record.prefix_key, ids[:-1]) is None
    assert store.find(record.prefix_key, (*ids[:-1], ids[-1] ^ 1)) is None
    assert store.find(record.content_key, ids) is None
    assert store.variants(record.content_key) == [record]
    assert store.variants(record.prefix_key) == []


def test_two_chunks_can_be_loaded_at_a_time(tmp_path: Path) -> None:
    manifest = tiny_manifest(codec="int8")
    store = CacheStore.open(build(tmp_path, manifest, LONG))
    records = [r for r in records_of(store, LONG) if r]
    for layer, pair in enumerate(zip(*(store.load(r) for r in records), strict=True)):
        for record, kv in zip(records, pair, strict=True):
            torch.testing.assert_close(kv.keys, expected(manifest, record, layer)[0], atol=0.03, rtol=0)


def test_loading_may_be_broken_off(tmp_path: Path) -> None:
    store = CacheStore.open(build(tmp_path, tiny_manifest(), LONG))
    whole = load_all(store, LONG)
    for record in records_of(store, LONG):
        assert record is not None
        layers = store.load(record)
        next(layers)
        layers.close()  # type: ignore[attr-defined]
    for before, after in zip(whole, load_all(store, LONG), strict=True):
        assert all(torch.equal(a, b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))


def test_numbers_come_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    store = CacheStore.open(build(tmp_path, tiny_manifest(codec="int8"), SHORT), dtype=torch.bfloat16)
    assert {t.dtype for chunk in load_all(store, SHORT) for layer in chunk for t in layer} == {torch.bfloat16}


def test_sizes_add_up(tmp_path: Path) -> None:
    manifest = tiny_manifest(codec="int8", dtype="bfloat16")
    stats = CacheStore.open(build(tmp_path, manifest, SHORT, LONG)).stats()
    assert (stats.documents, stats.chunks, stats.tokens, stats.stored_tokens) == (2, 5, 323, 323)
    assert stats.raw_bytes == 323 * 4 * 3 * 8 * 2 * 2
    assert stats.bytes == sum(p.stat().st_size for p in (tmp_path / "shards").iterdir())
    assert stats.dead_bytes == 0
    assert 0 < stats.bytes_per_token * 323 < stats.bytes


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="leave to write cannot be taken away")
def test_a_folder_without_leave_to_write_can_be_read(tmp_path: Path) -> None:
    build(tmp_path, tiny_manifest(), SHORT)
    folders = [tmp_path, tmp_path / "shards"]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert len(load_all(CacheStore.open(tmp_path), SHORT)) == 2
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_a_reader_writes_nothing(tmp_path: Path) -> None:
    build(tmp_path, tiny_manifest(), SHORT)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")}
    store = CacheStore.open(tmp_path)
    load_all(store, SHORT)
    store.documents()
    store.close()
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")} == before


def test_what_is_no_cache_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"no such folder.*lserve-tools build-cache DOCS -o .*nowhere"):
        CacheStore.open(tmp_path / "nowhere")
    with pytest.raises(CacheError, match=r"manifest.json is missing.*lserve-tools build-cache DOCS"):
        CacheStore.open(tmp_path)
    build(tmp_path / "c", tiny_manifest(), SHORT)
    (tmp_path / "c/index.sqlite").unlink()
    with pytest.raises(CacheError, match=r"index.sqlite is not there.*Run build-cache again"):
        CacheStore.open(tmp_path / "c")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is damaged"),
        ("[]", "is damaged"),
        ('{"format_version": 1}', "is damaged"),
        ('{"format_version": 9}', "format version 9, not 1"),
        ("\xff", "is damaged"),
    ],
)
def test_a_damaged_manifest_is_told(tmp_path: Path, text: str, why: str) -> None:
    build(tmp_path, tiny_manifest(), SHORT)
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CacheError, match=rf"{why}.*{tmp_path}.*--overwrite"):
        CacheStore.open(tmp_path)


def test_a_manifest_with_an_unknown_field_or_codec_is_told(tmp_path: Path) -> None:
    build(tmp_path, tiny_manifest(), SHORT)
    path = tmp_path / "manifest.json"
    fields = json.loads(path.read_text())
    for change in ({"colour": 1}, {"codec": "int3"}, {"dtype": "float33"}, {"head_mask": [[True]]}):
        path.write_text(json.dumps({**fields, **change}))
        with pytest.raises(CacheError, match="manifest"):
            CacheStore.open(tmp_path)


def test_the_manifest_comes_back(tmp_path: Path) -> None:
    manifest = tiny_manifest(**STREAMING, system="Be brief.", revision="main")
    store = CacheStore.open(build(tmp_path, manifest, SHORT))
    assert store.manifest == manifest
    assert isinstance(store.manifest, Manifest)


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    store = CacheStore.open(build(tmp_path, tiny_manifest(), SHORT))
    store.check(model_fingerprint="0123456789abcdef", tokenizer_fingerprint="fedcba9876543210", dtype="float32")
    with pytest.raises(CacheMismatchError) as caught:
        store.check(model="other", model_fingerprint="f00")
    assert (caught.value.field, caught.value.cached) == ("model", "tiny (0123456789ab)")
    assert caught.value.wanted == "other (f00)"
    assert "build-cache" in caught.value.cure
    for name, value in (("tokenizer_fingerprint", "x"), ("dtype", "bfloat16"), ("rope", "x"), ("head_profile", "x")):
        with pytest.raises(CacheMismatchError, match=value):
            store.check(**{name: value})


def test_a_lossy_cache_fits_any_dtype(tmp_path: Path) -> None:
    lossy = [
        CacheStore.open(build(tmp_path / d, tiny_manifest(codec="int8", dtype=d), SHORT))
        for d in ("float32", "bfloat16")
    ]
    lossy[0].check(dtype="bfloat16")
    assert lossy[0].root_key == lossy[1].root_key
    exact = [CacheStore.open(build(tmp_path / f"e{d}", tiny_manifest(dtype=d), SHORT)) for d in ("float32", "bfloat16")]
    assert exact[0].root_key != exact[1].root_key


def test_a_reader_follows_chunks_into_a_shard_that_was_written_anew(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    store = CacheStore.open(build(tmp_path, manifest, SHORT, LONG))
    records = records_of(store, LONG)
    with CacheWriter(tmp_path, manifest) as writer:
        writer.prune(["a.md"])
    for record in records:
        assert record is not None
        for layer, kv in enumerate(store.load(record)):
            assert torch.equal(kv.keys, expected(manifest, record, layer)[0])
