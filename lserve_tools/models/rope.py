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
from functools import cached_property
from itertools import product

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lserve_tools.errors import ModelError
from lserve_tools.models.spec import observe_token

_LENGTH_DEPENDENT = ("dynamic", "longrope")
_PROBES = (3, 57)

Pairing = Callable[[int], tuple[tuple[slice, slice], ...]]


class Rope:
    """Makes the rotations that take keys to positions and back.

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
        self._recent: list[tuple[Tensor, dict[str, Rotation]]] = []
        self._width: int | None = None  # of what the model rotates; None is that of its cosines
        self._pairing: Pairing = _halves
        self.movable = self._probe(model)

    def identity(self) -> str:
        """Digest of all that shapes the rotation: equal digests rotate alike."""
        text = f"{self._model_type} {self._parameters} {type(self._rotary).__name__} {self._layer_types} {self.movable}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def at(self, layer: int, positions: Tensor) -> Rotation:
        """The rotation of a layer to `positions` `[T]`; made once for the same tensor and kind of layer."""
        if not self.movable:
            raise ModelError(
                f"keys of a {self._model_type} model cannot be moved to another position.",
                cure="Use --codec exact.",
            )
        if not self._rotated_layers[layer]:
            return Rotation(None, self._pairing)
        made = next((made for known, made in self._recent if known is positions), None)
        if made is None:
            made = {}
            self._recent = [(positions, made), *self._recent[:1]]  # a chunk has one for each kind of head
        kind = self._layer_types[layer] if self._layer_types else ""
        if kind not in made:
            made[kind] = Rotation(self._compute_tables(kind, positions), self._pairing)
        return made[kind]

    @torch.inference_mode()
    def _compute_tables(self, kind: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tables of one kind of layer: what the model's own code makes of ones, without sines and without cosines."""
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        assert self._rotary is not None
        assert self._apply is not None
        extra = {"layer_type": kind} if "layer_type" in inspect.signature(self._rotary.forward).parameters else {}
        cos, sin = self._rotary(like, positions[None], **extra)
        ones = torch.ones(1, 1, len(positions), self._width or cos.shape[-1], device=positions.device)
        no_queries, nothing = ones[:, :0], torch.zeros_like(cos)
        straight, crossed = (self._apply(no_queries, ones, *x)[1][0, 0] for x in ((cos, nothing), (nothing, sin)))
        return straight, crossed

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
        for self._width, self._pairing in product((None, near[0].key.shape[-1]), (_halves, _neighbours)):
            self._recent = []
            try:
                if all(self._moves(i, a, b) for i, (a, b) in enumerate(keys)):
                    return True
            except (RuntimeError, TypeError):  # tables of another width than the keys
                continue
        return False

    def _moves(self, layer: int, near: Tensor, far: Tensor) -> bool:
        here, there = (torch.tensor([p], device=near.device) for p in _PROBES)
        moved = self.at(layer, there).rotate(self.at(layer, here).unrotate(near))
        tolerance = 4 * torch.finfo(near.dtype).eps if near.dtype == torch.float32 else 2.0**-6
        return bool((moved - far).norm() <= max(tolerance, 1e-5) * far.norm())


class Rotation:
    """Rotation of one layer's keys to some positions, in fp32.

    Args:
        tables: what a channel and its partner are multiplied by, `[T, D]` each; None leaves keys as they are.
        pairing: tells channels and their partners.
    """

    def __init__(self, tables: tuple[Tensor, Tensor] | None, pairing: Pairing) -> None:
        self._tables, self._pairing = tables, pairing

    def rotate(self, keys: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Rotate keys `[..., T, D]` that carry no position.

        Args:
            out: room for them in any dtype, on any device; None makes some in fp32.
        """
        return self._multiply(keys, self._tables, out)

    def unrotate(self, keys: Tensor) -> Tensor:
        """Take the rotation out of keys `[..., T, D]`; fp32 out."""
        return self._multiply(keys, self._inverse, None)

    @cached_property
    def _inverse(self) -> tuple[Tensor, Tensor] | None:
        if self._tables is None:
            return None
        straight, crossed = self._tables
        scaling = straight.square() + crossed.square()  # yarn's attention scaling: divide it out
        return straight / scaling, -crossed / scaling

    def _multiply(self, keys: Tensor, tables: tuple[Tensor, Tensor] | None, out: Tensor | None) -> Tensor:
        indirect = out is None or out.dtype != torch.float32 or out.device != keys.device
        sums = torch.empty(keys.shape, device=keys.device) if out is None or indirect else out
        if tables is None:
            sums.copy_(keys)
        else:
            straight, crossed = tables
            keys, width = keys.float(), straight.shape[-1]
            torch.mul(keys[..., :width], straight, out=sums[..., :width])
            for mine, partner in self._pairing(width):
                sums[..., mine].addcmul_(keys[..., partner], crossed[..., mine])
            sums[..., width:] = keys[..., width:]
        return sums if out is None or out is sums else out.copy_(sums)


def _halves(width: int) -> tuple[tuple[slice, slice], ...]:
    """Channels and their partners where the first half is rotated with the second."""
    first, second = slice(0, width // 2), slice(width // 2, width)
    return (first, second), (second, first)


def _neighbours(width: int) -> tuple[tuple[slice, slice], ...]:
    """Channels and their partners where each is rotated with the one beside it."""
    even, odd = slice(0, width, 2), slice(1, width, 2)
    return (even, odd), (odd, even)


def _find_apply(model: nn.Module) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The model file's own `apply_rotary_pos_emb`."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            return getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    return None
