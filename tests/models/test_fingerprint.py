"""Fingerprints change with what shapes KV, and with nothing else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lserve_tools.errors import ModelError
from lserve_tools.models import fingerprint
from lserve_tools.models.fingerprint import model_fingerprint, tokenizer_fingerprint


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which fingerprints are remembered."""
    monkeypatch.setenv("LSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A model that may be changed."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def _change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_place_and_times_do_not_matter(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    assert model_fingerprint(copy) == model_fingerprint(folder)
    assert tokenizer_fingerprint(copy) == tokenizer_fingerprint(folder)


def test_config_matters_but_for_notes(folder: Path) -> None:
    before = model_fingerprint(folder)
    _change_config(folder, transformers_version="5.99", _name_or_path="elsewhere")
    assert model_fingerprint(folder) == before
    _change_config(folder, rms_norm_eps=1e-3)
    assert model_fingerprint(folder) != before


def test_every_byte_of_small_weights_matters(folder: Path) -> None:
    file = folder / "model.safetensors"
    seen = {model_fingerprint(folder)}
    content = bytearray(file.read_bytes())
    places = [len(content) - 1, len(content) // 2, len(content) // 3]
    for place in places:
        content[place] ^= 1
        file.write_bytes(content)
        os.utime(file, ns=(place, place))  # a clock may be too coarse to tell the versions apart
        seen.add(model_fingerprint(folder))
    assert len(seen) == 1 + len(places)


def test_tensor_names_matter(folder: Path) -> None:
    before = model_fingerprint(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weighT"] = weights.pop("lm_head.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert model_fingerprint(folder) != before


def test_blocks_are_sampled_over_the_whole_of_large_files(folder: Path) -> None:
    size = fingerprint._BLOCK * fingerprint._BLOCKS * 3
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    file = folder / "model.safetensors"
    seen = set()
    for time, place in enumerate((None, 0, size - 1, size // (fingerprint._BLOCKS - 1) * 20 + 1000)):
        content = bytearray(size)
        if place is not None:
            content[place] = 1
        file.write_bytes(len(header).to_bytes(8, "little") + header + content)
        os.utime(file, ns=(time, time))
        seen.add(model_fingerprint(folder))
    assert len(seen) == 4


def test_it_is_remembered_until_a_file_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    add = fingerprint._add_weights

    def count(digest: Any, file: Path) -> None:
        read.append(file)
        add(digest, file)

    monkeypatch.setattr(fingerprint, "_add_weights", count)
    first = model_fingerprint(folder)
    assert model_fingerprint(folder) == first
    assert len(read) == 1
    os.utime(folder / "model.safetensors", (5, 5))
    assert model_fingerprint(folder) == first
    assert len(read) == 2


def test_a_home_that_cannot_be_written_costs_only_time(folder: Path, home: Path) -> None:
    before = model_fingerprint(folder)
    shutil.rmtree(home)
    home.write_text("a file, not a folder")
    assert model_fingerprint(folder) == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a whole safetensors file"),
        (b"\x10\0\0", "not a whole safetensors file"),
        (b"\xff" * 64, "not a whole safetensors file"),
        ((20).to_bytes(8, "little") + b"{" * 20, "its header is damaged"),
        ((2).to_bytes(8, "little") + b"[]", "its header is damaged"),
        ((13).to_bytes(8, "little") + b'{"w": {"x":1}}'[:13], "its header is damaged"),
    ],
)
def test_damaged_weight_files_are_named(folder: Path, content: bytes, reason: str) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=rf"model\.safetensors: {reason}"):
        model_fingerprint(folder)


def test_torn_weight_files_are_named_with_both_sizes(folder: Path) -> None:
    file = folder / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match=rf"model\.safetensors: holds {size - 1} bytes, its header speaks of {size}"):
        model_fingerprint(folder)


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff"])
def test_damaged_configs_are_named(folder: Path, content: bytes | None) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json: "):
        model_fingerprint(folder)


def test_tokenizers_differ_by_their_files_not_by_the_template(folder: Path) -> None:
    before = tokenizer_fingerprint(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert tokenizer_fingerprint(folder) == before
    file = folder / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    assert tokenizer_fingerprint(folder) != before
