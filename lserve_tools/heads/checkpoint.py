"""The file from which an interrupted training goes on: one safetensors file, replaced whole after every step."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lserve_tools.errors import ProfileError
from lserve_tools.schema import GateSettings, LossPoint

_PARTS = ("gates", "first", "second")
_CURE = "Give --overwrite instead of --resume to begin anew."


def write_checkpoint(
    path: Path, settings: GateSettings, gates: Tensor, first: Tensor, second: Tensor, curve: list[LossPoint]
) -> None:
    """Write gates, both moments of Adam, and the loss of the steps done."""
    described = {
        "settings": settings.model_dump_json(),
        "curve": json.dumps([point.model_dump() for point in curve]),
    }
    tensors = dict(zip(_PARTS, (x.cpu().contiguous() for x in (gates, first, second)), strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(save(tensors, described))
    os.replace(temporary, path)


def read_checkpoint(path: Path, settings: GateSettings, like: Tensor) -> tuple[Tensor, Tensor, Tensor, list[LossPoint]]:
    """Read what `write_checkpoint` wrote.

    Args:
        settings: of the run that shall go on.
        like: gives shape and device.

    Raises:
        ProfileError: if the file is damaged, or a setting differs.
    """
    try:
        with safe_open(path, framework="pt") as file:
            described = file.metadata() or {}
            tensors = [file.get_tensor(part) for part in _PARTS]
        before = GateSettings.model_validate_json(described["settings"])
        curve = [LossPoint.model_validate(point) for point in json.loads(described["curve"])]
    except (SafetensorError, OSError, KeyError, ValueError, ValidationError) as error:
        raise ProfileError(f"{path}: the checkpoint is damaged ({type(error).__name__}).", cure=_CURE) from error
    _require_same(path, before.model_dump(), settings.model_dump())
    if any(x.shape != like.shape or not torch.isfinite(x).all() for x in tensors):
        raise ProfileError(f"{path}: the checkpoint does not fit the model.", cure=_CURE)
    gates, first, second = (x.to(like.device) for x in tensors)
    return gates, first, second, curve


def _require_same(path: Path, before: dict[str, object], now: dict[str, object]) -> None:
    for name, value in now.items():
        was = before[name]
        if isinstance(was, dict) and isinstance(value, dict):
            _require_same(path, was, value)
        elif was != value:
            raise ProfileError(
                f"{path}: was made with {name.replace('_', ' ')} {was}, not {value}.",
                cure=f"Give the same options, or {_CURE[0].lower()}{_CURE[1:]}",
            )
