"""Digests that tell one model, or one tokenizer, from another.

A fingerprint covers what shapes KV and is cheap to read: the config, the headers and sizes of the weight files, and
blocks sampled over their bytes. It is remembered by path, size and modification time.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from lserve_tools import env
from lserve_tools.errors import ModelError

_VERSION = 1  # of what a fingerprint covers
_BLOCK = 1 << 16
_BLOCKS = 64
_MAX_HEADER = 100 << 20
_IRRELEVANT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)


def model_fingerprint(folder: Path) -> str:
    """Hex digest of the model in `folder`.

    Raises:
        ModelError: if its config is unreadable, or a weight file is no whole safetensors file.
    """
    config = _relevant_config(folder / "config.json")
    weights = sorted(folder.glob("*.safetensors"))
    memo = _memo(folder, [folder / "config.json", *weights])
    if memo.is_file():
        return memo.read_text(encoding="ascii")
    digest = hashlib.blake2b(config, digest_size=32)
    for file in weights:
        _add_weights(digest, file)
    fingerprint = digest.hexdigest()
    with suppress(OSError):  # remembering only saves time
        memo.parent.mkdir(parents=True, exist_ok=True)
        temporary = memo.with_suffix(f".{os.getpid()}")
        temporary.write_text(fingerprint, encoding="ascii")
        os.replace(temporary, memo)
    return fingerprint


def _memo(folder: Path, files: list[Path]) -> Path:
    """Where the fingerprint of these very files is remembered."""
    stamps = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    place = json.dumps([_VERSION, str(folder.resolve()), stamps])
    return env.home() / "fingerprints" / hashlib.blake2b(place.encode(), digest_size=16).hexdigest()


def tokenizer_fingerprint(folder: Path) -> str:
    """Hex digest of the tokenizer's files in `folder`; its chat template is not among them, the prefix ids tell it."""
    digest = hashlib.blake2b(digest_size=32)
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    return digest.hexdigest()


def _relevant_config(file: Path) -> bytes:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read ({error}).", cure="Download or copy the model again.") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file}: holds no JSON object.", cure="Download or copy the model again.")
    kept = {k: v for k, v in config.items() if k not in _IRRELEVANT}
    return json.dumps(kept, sort_keys=True).encode()


def _add_weights(digest: hashlib.blake2b, file: Path) -> None:
    """Add header, size and sampled blocks of a safetensors file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise ModelError(f"{file}: not a whole safetensors file.", cure="Download or copy the model again.")
        header = stream.read(length)
        try:
            ends = [v["data_offsets"][1] for k, v in json.loads(header).items() if k != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"{file}: its header is damaged.", cure="Download or copy the model again.") from error
        if 8 + length + max(ends, default=0) != size:
            raise ModelError(
                f"{file}: holds {size} bytes, its header speaks of {8 + length + max(ends, default=0)}.",
                cure="Download or copy the model again.",
            )
        digest.update(header + size.to_bytes(8, "little"))
        data = size - 8 - length
        for block in range(_BLOCKS):
            stream.seek(8 + length + block * max(0, data - _BLOCK) // max(1, _BLOCKS - 1))
            digest.update(stream.read(_BLOCK))
