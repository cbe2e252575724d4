"""Moving keys between positions with the model's own rotary code.

Whether keys can be moved is found by trying: one token is run at three positions, and the rotation found in the model
must turn the keys of one into those of another in every layer. A model for which that fails (frequencies that change
with length, learned positions) may reuse keys only where they were computed.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lserve_tools.errors import ModelError
from lserve_tools.models.spec import observe_token

_LENGTH_DEPENDENT = ("dynamic", "longrope")
_PROBES = (3, 57)


class Rope:
    """Rotates keys to positions and back, in fp32.

    Args:
        model: a model whose attention implementation is `lserve`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        self._model_type = str(config.model_type)
        self._parameters = getattr(config, "rope_parameters", None)
        self._rotary = next((m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)
        self._apply = _find_apply(model)
        self._layer_types: list[str] = list(getattr(config, "layer_types", None) or [])
        self._device = model.device
        self._rotated_layers: list[bool] = []
        self._cached: tuple[Tensor, dict[str, tuple[Tensor, Tensor]]] | None = None
        self._whole = True
        self.movable = self._probe(model)

    def identity(self) -> str:
        """Digest of all that shapes the rotation: equal digests rotate alike."""
        text = f"{self._model_type} {self._parameters} {type(self._rotary).__name__} {self._layer_types} {self.movable}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def rotate(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotate keys `[H, T, D]` that carry no position to `positions` `[T]`; fp32 out."""
        cos_sin = self._tables(layer, positions)
        return keys.float() if cos_sin is None else self._turn(keys, *cos_sin)

    def unrotate(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        """Take the rotation to `positions` `[T]` out of keys `[H, T, D]`; fp32 out."""
        cos_sin = self._tables(layer, positions)
        if cos_sin is None:
            return keys.float()
        cos, sin = cos_sin
        scaling = cos.square() + sin.square()  # cos and sin carry yarn's attention scaling: divide it out
        return self._turn(keys, cos / scaling, -sin / scaling)

    def _tables(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosine and sine of a layer for `positions`, or None where the layer does not rotate."""
        if not self.movable:
            raise ModelError(
                f"keys of a {self._model_type} model cannot be moved to another position.",
                cure="Use --codec exact.",
            )
        if not self._rotated_layers[layer]:
            return None
        return self._compute_tables(layer, positions)

    def _compute_tables(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self._cached is None or self._cached[0] is not positions:
            self._cached = (positions, {})
        kind = self._layer_types[layer] if self._layer_types else ""
        tables = self._cached[1]
        if kind not in tables:
            like = torch.empty(0, dtype=torch.float32, device=positions.device)
            assert self._rotary is not None
            extra: dict[str, Any] = {}
            if "layer_type" in inspect.signature(self._rotary.forward).parameters:
                extra["layer_type"] = kind
            with torch.inference_mode():
                tables[kind] = self._rotary(like, positions[None], **extra)
        return tables[kind]

    def _turn(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        keys = keys.float()[None]
        turned = keys if self._whole else keys[..., : cos.shape[-1]]
        assert self._apply is not None
        _, out = self._apply(turned[:, :0], turned, cos, sin)  # no query heads: only keys are wanted
        if not self._whole:
            out = torch.cat([out, keys[..., cos.shape[-1] :]], dim=-1)
        return out[0]

    def _probe(self, model: PreTrainedModel) -> bool:
        """Find how this model's keys turn and check it in every layer."""
        if any(kind in str(self._parameters) for kind in _LENGTH_DEPENDENT):
            return False
        near, far = (observe_token(model, position) for position in _PROBES)
        keys = [(near[i].key.float(), far[i].key.float()) for i in range(len(near))]
        self._rotated_layers = [not torch.equal(a, b) for a, b in keys]
        if not any(self._rotated_layers):
            return True
        if self._rotary is None or self._apply is None:
            return False
        self.movable = True  # so that the trials below may rotate
        for self._whole in (True, False):
            try:
                if all(self._moves(i, a, b) for i, (a, b) in enumerate(keys)):
                    return True
            except (RuntimeError, TypeError):  # tables of another width than the keys
                continue
        return False

    def _moves(self, layer: int, near: Tensor, far: Tensor) -> bool:
        here, there = (torch.tensor([p], device=near.device) for p in _PROBES)
        moved = self.rotate(layer, self.unrotate(layer, near, here), there)
        tolerance = 4 * torch.finfo(near.dtype).eps if near.dtype == torch.float32 else 2.0**-6
        return bool((moved - far).norm() <= max(tolerance, 1e-5) * far.norm())


def _find_apply(model: nn.Module) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The model file's own `apply_rotary_pos_emb`."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            return getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    return None
