"""`int8`: keys per channel in groups of 64 tokens, before RoPE; values per token.

Both are asymmetric: a number is `centre + code * step` with `code` in −128 … 127, so that the least number has the
least code and the greatest the greatest, and no intermediate is larger than the numbers themselves. Centre and step are
float32, which holds whatever a key may be.
"""

from __future__ import annotations

import numpy as np
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
        codes, step, centre = parts["codes"], parts["step"], parts["centre"]
        if whole:
            first = slice(0, whole * GROUP)
            groups = [x[:, first].unflatten(1, (whole, GROUP)) for x in (codes, out)]
            _decode(groups[0], step[:, :whole], centre[:, :whole], groups[1])
        if tokens % GROUP:
            last = slice(whole * GROUP, tokens)
            _decode(codes[:, last], step[:, whole], centre[:, whole], out[:, last])
        return out

    def decode_values(self, parts: dict[str, Tensor], out: Tensor) -> Tensor:
        """See `KVCodec`."""
        _decode(parts["codes"], parts["step"], parts["centre"], out)
        return out


def _decode(codes: Tensor, step: Tensor, centre: Tensor, out: Tensor) -> None:
    """Write `centre + codes * step` to `out`.

    NumPy does it in the calling thread alone, and many of them may do so at a time; torch would wake a team of threads
    in each, for little work.
    """
    room = out if out.dtype == torch.float32 else torch.empty(out.shape)
    numbers = room.numpy()
    np.copyto(numbers, codes.numpy())
    np.multiply(numbers, step.numpy(), out=numbers)
    np.add(numbers, centre.numpy(), out=numbers)
    if room is not out:
        out.copy_(room)


def _encode(x: Tensor, dim: int) -> dict[str, Tensor]:
    """Codes, steps and centres of `x` with one step for all along `dim`; bounds in float64, where nothing overflows."""
    exact = x.float()
    low, high = exact.amin(dim, keepdim=True).double(), exact.amax(dim, keepdim=True).double()
    step = ((high - low) / (_GREATEST - _LEAST)).float()
    centre = (low - _LEAST * step.double()).float()
    codes = (exact - centre).div_(torch.where(step > 0, step, 1)).round_().clamp_(_LEAST, _GREATEST)
    return {"step": step, "centre": centre, "codes": codes.to(torch.int8)}
