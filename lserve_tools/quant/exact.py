"""`exact`: KV in the model's dtype, bit for bit, keys as attention saw them."""

from __future__ import annotations

import torch
from torch import Tensor

from lserve_tools.quant.parts import PartSpec


class ExactCodec:
    """See the module."""

    name = "exact"
    before_rope = False
    lossless = True

    def key_parts(self, shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, PartSpec]:
        """See `KVCodec`."""
        return {"data": PartSpec(shape, dtype)}

    def value_parts(self, shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, PartSpec]:
        """See `KVCodec`."""
        return {"data": PartSpec(shape, dtype)}

    def encode_keys(self, keys: Tensor) -> dict[str, Tensor]:
        """See `KVCodec`."""
        return {"data": keys}

    def encode_values(self, values: Tensor) -> dict[str, Tensor]:
        """See `KVCodec`."""
        return {"data": values}

    def decode_keys(self, parts: dict[str, Tensor], out: Tensor) -> Tensor:
        """See `KVCodec`."""
        return parts["data"].to(out.dtype)

    def decode_values(self, parts: dict[str, Tensor], out: Tensor) -> Tensor:
        """See `KVCodec`."""
        return parts["data"].to(out.dtype)
