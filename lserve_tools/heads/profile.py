"""The head profile: which KV heads retrieve and which only stream, as a folder that DuoAttention's tools read too."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor

from lserve_tools.errors import ProfileError
from lserve_tools.schema import ProfileRecord, StreamingWindows

SCORES_FILE, WINDOWS_FILE, RECORD_FILE = "full_attention_heads.tsv", "config.json", "profile.json"
PUBLISHED_SPARSITY = 0.5  # of a folder that says nothing of it; DuoAttention's own for models with grouped heads
Schema = TypeVar("Schema", StreamingWindows, ProfileRecord)
_MAKE = "Make it again with profile-heads, or copy it again."


@dataclass(frozen=True, slots=True, eq=False)
class HeadProfile:
    """Scores of all KV heads, the choice made from them, and the windows of those that stream.

    Args:
        scores: `[num_layers, num_kv_heads]` float32 in [0, 1]; high for heads that retrieve.
        sink, recent: windows of streaming heads, in tokens.
        retrieval: `[num_layers, num_kv_heads]` bool, True for a retrieval head.
        model_fingerprint: of the model that it was made for; None if the folder does not say.
        record: how it was made; None for a folder of another tool.
        windows: `config.json` as it was read, with the other tool's keys.
    """

    scores: Tensor
    sink: int
    recent: int
    retrieval: Tensor
    model_fingerprint: str | None = None
    record: ProfileRecord | None = None
    windows: StreamingWindows | None = None

    @property
    def sparsity(self) -> float:
        """Fraction of KV heads that stream."""
        return float((~self.retrieval).double().mean())

    @property
    def id(self) -> str:
        """Hex digest of all that shapes KV: the mask and the windows."""
        shape = "x".join(map(str, self.retrieval.shape))
        bits = "".join("1" if retrieves else "0" for retrieves in self.retrieval.flatten().tolist())
        text = f"head profile 1 {shape} {bits} sink {self.sink} recent {self.recent}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @classmethod
    def load(cls, folder: str | Path, *, sparsity: float | None = None) -> HeadProfile:
        """Read a profile of ours or a published DuoAttention folder.

        Args:
            sparsity: fraction of heads that shall stream; None takes the folder's own choice, or half of them.

        Raises:
            ProfileError: if files are missing or damaged.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ProfileError(f"{folder}: no such folder.", cure="Make a head profile with profile-heads.")
        scores = _read_scores(folder / SCORES_FILE)
        windows = _parse(StreamingWindows, folder / WINDOWS_FILE)
        record = _parse(ProfileRecord, folder / RECORD_FILE) if (folder / RECORD_FILE).exists() else None
        if record is not None and [len(row) for row in record.mask] != [scores.shape[1]] * scores.shape[0]:
            raise ProfileError(f"{folder}: {RECORD_FILE} and {SCORES_FILE} are of different shapes.", cure=_MAKE)
        if sparsity is None and record is not None:
            retrieval = torch.tensor(record.mask)
        else:
            retrieval = choose_retrieval(scores, PUBLISHED_SPARSITY if sparsity is None else sparsity)
        fingerprint = record.settings.model_fingerprint if record else None
        return cls(scores, windows.sink_size, windows.recent_size, retrieval, fingerprint, record, windows)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the profile's files and return them; each is whole at any moment."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        rows = ["\t".join(f"{score:.18e}" for score in row) + "\n" for row in self.scores.tolist()]
        windows = self.windows or StreamingWindows(sink_size=self.sink, recent_size=self.recent)
        texts = {SCORES_FILE: "".join(rows), WINDOWS_FILE: json.dumps(windows.model_dump(), indent=4)}
        if self.record is not None:
            texts[RECORD_FILE] = self.record.model_dump_json(indent=1) + "\n"
        for name, text in texts.items():
            temporary = folder / f".{name}.{os.getpid()}"
            temporary.write_text(text, encoding="utf-8", newline="\n")
            os.replace(temporary, folder / name)
        return [folder / name for name in texts]


def choose_retrieval(scores: Tensor, sparsity: float) -> Tensor:
    """Let the heads with the lowest scores stream; equal scores stream in the order of layers, then heads.

    Args:
        scores: `[num_layers, num_kv_heads]`.
        sparsity: fraction that streams, rounded to whole heads.

    Returns:
        `[num_layers, num_kv_heads]` bool, True for a retrieval head.
    """
    order = torch.argsort(scores.flatten(), stable=True)
    retrieval = torch.ones(scores.numel(), dtype=torch.bool)
    retrieval[order[: math.floor(sparsity * scores.numel() + 0.5)]] = False
    return retrieval.view(scores.shape)


def _read_scores(path: Path) -> Tensor:
    rows: list[list[float]] = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        try:
            row = [float(field) for field in line.split("\t")]
        except ValueError:
            raise ProfileError(f"{path}:{number}: not numbers separated by tabs.", cure=_MAKE) from None
        if not all(map(math.isfinite, row)):
            raise ProfileError(f"{path}:{number}: holds a score that is no finite number.", cure=_MAKE)
        if rows and len(row) != len(rows[0]):
            raise ProfileError(f"{path}:{number}: {len(row)} scores, the rows above have {len(rows[0])}.", cure=_MAKE)
        rows.append(row)
    if not rows:
        raise ProfileError(f"{path}: empty.", cure=_MAKE)
    return torch.tensor(rows, dtype=torch.float32).clamp(0, 1)


def _parse(schema: type[Schema], path: Path) -> Schema:
    try:
        return schema.model_validate_json(_read(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ProfileError(f"{path}: {place + ': ' if place else ''}{first['msg']}.", cure=_MAKE) from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ProfileError(
            f"{path}: missing, so {path.parent} is no head profile.", cure="Make one with profile-heads."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read ({error}).", cure=_MAKE) from None
