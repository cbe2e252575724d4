"""`int8`: keys per channel in groups of 64 tokens, before RoPE; values per token.

Both are asymmetric: a number is `centre + code * step` with `code` in −128 … 127, so that the least number has the
least code and the greatest the greatest, and no intermediate is larger than the numbers themselves. Centre and step are
float32, which holds whatever a key may be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lserve_tools.quant.parts import PartSpec

GROUP = 64
_LEAST, _GREATEST = -128, 127


class Int8Codec:
    """See the module. Groups are counted from the first of the tokens that are encoded; the last may be short."""

    name = "int8"
    before_rope = True
    lossless = False

    def key_parts(self, shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, PartSpec]:
        """See `KVCodec`."""
        heads, tokens, dim = shape
        scale = PartSpec((heads, -(-tokens // GROUP), 1, dim), torch.float32)
        return {"step": scale, "centre": scale, "codes": PartSpec(shape, torch.int8)}

    def value_parts(self, shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, PartSpec]:
        """See `KVCodec`."""
        scale = PartSpec((*shape[:2], 1), torch.float32)
        return {"step": scale, "centre": scale, "codes": PartSpec(shape, torch.int8)}

    def encode_keys(self, keys: Tensor) -> dict[str, Tensor]:
        """See `KVCodec`."""
        heads, tokens, dim = keys.shape
        missing = -tokens % GROUP
        # Repeating the last token fills the last group without moving its bounds.
        filled = torch.cat([keys, keys[:, -1:].expand(heads, missing, dim)], dim=1) if missing else keys
        parts = _encode(filled.unflatten(1, (-(-tokens // GROUP), GROUP)), dim=2)
        parts["codes"] = parts["codes"].flatten(1, 2)[:, :tokens]
        return parts

    def encode_values(self, values: Tensor) -> dict[str, Tensor]:
        """See `KVCodec`."""
        return _encode(values, dim=2)

    def decode_keys(self, parts: dict[str, Tensor], out: Tensor) -> Tensor:
        """See `KVCodec`."""
        tokens = out.shape[1]
        whole = tokens // GROUP
        out.copy_(parts["codes"])
        if whole:
            groups = out[:, : whole * GROUP].unflatten(1, (whole, GROUP))
            groups.mul_(parts["step"][:, :whole]).add_(parts["centre"][:, :whole])
        if tokens % GROUP:
            out[:, whole * GROUP :].mul_(parts["step"][:, whole]).add_(parts["centre"][:, whole])
        return out

    def decode_values(self, parts: dict[str, Tensor], out: Tensor) -> Tensor:
        """See `KVCodec`."""
        return out.copy_(parts["codes"]).mul_(parts["step"]).add_(parts["centre"])


def _encode(x: Tensor, dim: int) -> dict[str, Tensor]:
    """Codes, steps and centres of `x` with one step for all along `dim`; in float64, where nothing overflows."""
    exact = x.double()
    low, high = exact.amin(dim, keepdim=True), exact.amax(dim, keepdim=True)
    step = ((high - low) / (_GREATEST - _LEAST)).float()
    centre = (low - _LEAST * step.double()).float()
    safe = torch.where(step > 0, step, 1).double()
    codes = ((exact - centre.double()) / safe).round_().clamp_(_LEAST, _GREATEST).to(torch.int8)
    return {"step": step, "centre": centre, "codes": codes}
