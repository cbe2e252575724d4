"""`manifest.json`: reading, writing and comparing it, and the key that follows from it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lserve_tools.cache.keys import RootIdentity, chain_keys
from lserve_tools.cache.shard import TEMPORARY, sync_folder
from lserve_tools.errors import CacheError, CacheMismatchError
from lserve_tools.schema import CACHE_FORMAT_VERSION, Manifest

MANIFEST = "manifest.json"
_SHOWN = 60
_CHECKSUM = "checksum"  # of all other fields: not every one of them shapes a key that would tell
_NAMES = {"prefix_ids": "prefix", "head_mask": "head profile"}


def root_identity(manifest: Manifest) -> RootIdentity:
    """What the root key of a cache is the digest of.

    Raises:
        CacheMismatchError: if it has a codec that this version does not know.
    """
    from lserve_tools.quant.kv import CODECS, get_codec  # torch is slow to import, and listing a cache needs none

    if manifest.codec not in CODECS:
        again = "Build the cache again with --overwrite, or use a newer version of lserve-tools."
        raise CacheMismatchError("codec", manifest.codec, f"one of {', '.join(CODECS)}", cure=again)
    return RootIdentity(
        model=manifest.model_fingerprint,
        tokenizer=manifest.tokenizer_fingerprint,
        dtype=manifest.dtype if get_codec(manifest.codec).lossless else None,
        weight_quantization=manifest.weight_quantization,
        rope=manifest.rope,
        sink=manifest.sink,
        recent=manifest.recent,
        head_mask=manifest.head_mask,
        streaming=manifest.streaming,
        codec=manifest.codec,
        format_version=manifest.format_version,
        prefix_ids=manifest.prefix_ids,
    )


def roots(manifest: Manifest) -> tuple[bytes, bytes]:
    """The root key of a cache, and the key that documents follow: that of the prefix, if there is one."""
    root_key, ids = root_identity(manifest).digest(), manifest.prefix_ids
    return root_key, chain_keys(root_key, ids, (len(ids),))[-1] if ids else root_key


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a cache.

    Raises:
        CacheError: if there is none, or it is damaged.
        CacheMismatchError: if it is of another format.
    """
    path = folder / MANIFEST
    again = f"Build it again: `lserve-tools build-cache DOCS -o {folder} --overwrite`."
    anew = (
        f"Delete it and run build-cache with the same options, which keeps the shards, or with -o {folder} --overwrite."
    )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        missing = "there is no such folder" if not folder.exists() else f"{MANIFEST} {_why(error)}"
        make = f"Make a cache with `lserve-tools build-cache DOCS -o {folder}`."
        raise CacheError(f"{folder} is not a cache: {missing}.", cure=make) from None
    except UnicodeDecodeError:
        raise CacheError(f"{path} is damaged (not UTF-8).", cure=anew) from None
    try:
        fields = json.loads(text)
        if fields["format_version"] != CACHE_FORMAT_VERSION:
            found = str(fields["format_version"])
            raise CacheMismatchError("format version", found, str(CACHE_FORMAT_VERSION), cure=again)
        checksum = fields.pop(_CHECKSUM, None)  # caches of early versions have none
        if checksum not in (None, _checksum(fields)):
            raise ValueError("its checksum is another")
        return Manifest.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CacheError(f"{path} is damaged ({f'{where}: ' if where else ''}{first['msg']}).", cure=anew) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(f"{path} is damaged ({error}).", cure=anew) from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put a manifest in its place, safe from power loss."""
    path = folder / MANIFEST
    temporary = path.with_suffix(TEMPORARY)
    fields = manifest.model_dump(mode="json")
    text = json.dumps({**fields, _CHECKSUM: _checksum(fields)}, indent=2, ensure_ascii=False)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)
    sync_folder(folder)


def compare(cached: Manifest, wanted: Manifest, folder: Path) -> None:
    """Make sure that KV of two manifests is the same.

    Raises:
        CacheMismatchError: naming the first field in which they differ.
    """
    before, now = root_identity(cached), root_identity(wanted)
    names = [field.name for field in fields(RootIdentity)]
    # Whether a dtype counts depends on the codec, and a head profile sets its windows.
    for name in sorted(names, key=lambda name: (name != "codec", name != "head_mask")):
        if getattr(before, name) != getattr(now, name):
            cure = f"Name another folder with -o, or replace the cache in {folder} with --overwrite."
            said = _NAMES.get(name, name.replace("_", " "))
            raise CacheMismatchError(said, _shown(cached, name), _shown(wanted, name), cure=cure)


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _shown(manifest: Manifest, field: str) -> str:
    """A field of the identity for people."""
    match field:
        case "model":
            return f"{manifest.model} ({manifest.model_fingerprint[:12]})"
        case "tokenizer":
            return manifest.tokenizer_fingerprint[:12]
        case "head_mask":
            return manifest.head_profile or ("none" if manifest.head_mask is None else "another")
        case "prefix_ids":
            text = manifest.prefix_text
            return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
        case _:
            return str(getattr(manifest, field))


def _why(error: OSError) -> str:
    return "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
