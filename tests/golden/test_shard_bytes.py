"""The format of shards on disk: what older releases wrote is read, and the same is written again.

`tiny.safetensors` was written once and is never written anew under the same format version. Its KV is random and small,
which zstd stores as it is, so that its bytes depend on no release of zstd.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import safetensors
import torch

from lserve_tools.cache.keys import chain_keys
from lserve_tools.cache.store import CacheStore
from lserve_tools.cache.writer import CacheWriter
from lserve_tools.schema import Manifest, ShardContents
from tests.helpers.stored import tiny_manifest

GOLDEN = Path(__file__).with_name("tiny.safetensors")
IDS = (7, 70_000, 5)


def golden_manifest() -> Manifest:
    return tiny_manifest(num_layers=2, num_kv_heads=2, head_dim=4, head_mask=((True, False), (False, False)), recent=2)


def golden_kv(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[2, 3, 4]`: floats whose bits are digests."""
    halves = []
    for what in "kv":
        digest = hashlib.shake_256(f"{what}{layer}".encode()).digest(96)
        bits = torch.frombuffer(bytearray(digest), dtype=torch.int32) & 0x3FFFFFFF  # no infinity, no NaN
        halves.append(bits.view(torch.float32).view(2, 3, 4))
    return halves[0], halves[1]


def write_golden(folder: Path) -> Path:
    """Write the golden shard anew; gives where it is."""
    with CacheWriter(folder, golden_manifest()) as writer:
        writer.begin_document("a.md", "00ff", 12, 99, IDS, (3,))
        writer.begin_chunk(chain_keys(writer.document_root, IDS, (3,))[0], IDS, 3)
        for layer in range(2):
            writer.add_layer(layer, *golden_kv(layer))
        writer.end_document()
    (path,) = (folder / "shards").iterdir()
    return path


def test_the_same_bytes_are_written_again(tmp_path: Path) -> None:
    path = write_golden(tmp_path)
    assert path.read_bytes() == GOLDEN.read_bytes()
    header = path.read_bytes()
    length = 8 + int.from_bytes(header[:8], "little")
    assert path.name == f"000001-{hashlib.sha256(header[:length]).hexdigest()[:32]}.safetensors"


def test_an_old_shard_is_read(tmp_path: Path) -> None:
    path = write_golden(tmp_path)
    path.write_bytes(GOLDEN.read_bytes())
    store = CacheStore.open(tmp_path)
    record = store.find(chain_keys(store.document_root, IDS, (3,))[0], IDS)
    assert record is not None
    assert record.streaming_ranges == ((1, 3),)
    for layer, kv in enumerate(store.load(record)):
        keys, values = golden_kv(layer)
        retrieval, streaming = ([0], [1]) if layer == 0 else ([], [0, 1])
        assert torch.equal(kv.keys, keys[retrieval])
        assert torch.equal(kv.values, values[retrieval])
        assert torch.equal(kv.streaming_keys, keys[streaming][:, 1:])
        assert torch.equal(kv.streaming_values, values[streaming][:, 1:])


def test_any_safetensors_reader_opens_a_shard() -> None:
    with safetensors.safe_open(GOLDEN, framework="np") as shard:
        assert sorted(shard.keys()) == ["0/0/kv", "0/1/kv", "0/ids"]
        for name in shard.keys():  # noqa: SIM118
            frame = shard.get_tensor(name)
            assert (frame.dtype, frame.ndim) == ("uint8", 1)
            assert bytes(frame[:4]) == b"\x28\xb5\x2f\xfd", "not a zstd frame"
        contents = ShardContents.model_validate_json(shard.metadata()["lserve"])
    assert contents.documents[0].path == "a.md"
    assert json.loads(contents.model_dump_json())["chunks"][0]["streaming_ranges"] == [[1, 3]]
