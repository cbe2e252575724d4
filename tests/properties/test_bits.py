"""Random damage anywhere in a cache: `cache verify` tells it, or what is read is what was written."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lserve_tools.cache.store import CacheStore
from lserve_tools.cache.verify import verify
from lserve_tools.cache.writer import CacheWriter
from lserve_tools.errors import CacheError
from tests.helpers.stored import MIXED, TinyDocument, load_all, records_of, tiny_manifest, write_document, write_prefix

DAMAGES = 2000  # at full size
MANIFEST = tiny_manifest(head_mask=MIXED, sink=10, recent=20, system="Be brief.", revision="main", head_profile="p1")
A, B = TinyDocument("a.md", (70, 30), seed=1), TinyDocument("b.md", (20,), seed=2)


@dataclass(frozen=True)
class Contents:
    """What a reader is given: what answers are made of, what is only shown, and KV."""

    texts: object
    shown: object
    tensors: list[Tensor]

    def answers_like(self, other: Contents) -> bool:
        """Whether the same answers are made from both."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return self.texts == other.texts and all(torch.equal(a, b) for a, b in pairs)


def read_all(folder: Path) -> Contents | None:
    """Everything that a reader can be given, or None if it is told of damage, or has something to compute."""
    try:
        store = CacheStore.open(folder)
    except CacheError:
        return None
    try:
        entries = store.documents()
        if None in [record for document in (A, B) for record in records_of(store, document)]:
            return None
        tensors = [t for d in (A, B) for chunk in load_all(store, d) for layer in chunk for t in layer]
        texts = [store.manifest, [(e.path, e.token_ids, e.chunks) for e in entries]]
        return Contents(texts, [store.stats(), [(e.sha256, e.size) for e in entries]], tensors)
    except CacheError:
        return None
    finally:
        store.close()


@pytest.mark.parametrize("count", [90, pytest.param(DAMAGES, marks=pytest.mark.slow)])
def test_random_damage_is_told_or_harmless(tmp_path: Path, count: int) -> None:
    whole = tmp_path / "whole"
    with CacheWriter(whole, MANIFEST, seal_bytes=1) as writer:
        write_prefix(writer)
        for document in (A, B):
            write_document(writer, document)
    folder = Path(shutil.copytree(whole, tmp_path / "damaged"))
    wanted = read_all(whole)
    assert wanted is not None
    files = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file() and p.stat().st_size)
    kinds = [[f for f in files if f.suffix == suffix] for suffix in (".safetensors", ".sqlite", ".json")]
    rng, told = random.Random(count), {"": 0, ".safetensors": 0, ".sqlite": 0, ".json": 0}
    for number in range(count):
        file = rng.choice(kinds[number % 3])
        data = bytearray((whole / file).read_bytes())
        place = rng.randrange(len(data))
        if rng.random() < 0.2:
            del data[place:]
        else:
            data[place] ^= 1 << rng.randrange(8)
        (folder / file).write_bytes(data)
        damaged, read = bool(verify(folder, lambda _: None).damaged), read_all(folder)
        assert read is None or read.answers_like(wanted), f"{file}, byte {place}: something else is read"
        assert damaged or (read is not None and read.shown == wanted.shown), f"{file}, byte {place}: not found"
        told[file.suffix if damaged else ""] += 1
        shutil.copyfile(whole / file, folder / file)
        for marker in folder.rglob("*.damaged"):
            marker.unlink()
    assert told[".safetensors"] > 0.98 * count / 3, "a frame has few bits that change nothing in what it holds"
    assert told[".json"] > 0.9 * count / 3
    assert told[".sqlite"] > 0.1 * count / 3
