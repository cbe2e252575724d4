"""How KV of one layer is stored: the protocol of codecs, and the codecs there are.

A codec turns keys or values `[H, T, D]` into named tensors, its parts, and back. It knows nothing of files.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lserve_tools.errors import UsageError
from lserve_tools.quant.exact import ExactCodec
from lserve_tools.quant.int8 import Int8Codec
from lserve_tools.quant.parts import PartSpec


class KVCodec(Protocol):
    """One way to store keys and values."""

    @property
    def name(self) -> str:
        """As `--codec` and the manifest have it."""
        ...

    @property
    def before_rope(self) -> bool:
        """Whether it takes keys before RoPE; else as attention saw them."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back every bit."""
        ...

    def key_parts(self, shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, PartSpec]:
        """The parts that keys `[H, T, D]` of `dtype` become, in the order in which they are stored."""
        ...

    def value_parts(self, shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, PartSpec]:
        """The parts that values `[H, T, D]` of `dtype` become."""
        ...

    def encode_keys(self, keys: Tensor) -> dict[str, Tensor]:
        """Parts of keys `[H, T, D]`."""
        ...

    def encode_values(self, values: Tensor) -> dict[str, Tensor]:
        """Parts of values `[H, T, D]`."""
        ...

    def decode_keys(self, parts: dict[str, Tensor], out: Tensor) -> Tensor:
        """Keys `[H, T, D]` in the dtype of `out`, which is room of that shape; the result may be it or not."""
        ...

    def decode_values(self, parts: dict[str, Tensor], out: Tensor) -> Tensor:
        """Values `[H, T, D]` in the dtype of `out`, which is room of that shape; the result may be it or not."""
        ...


CODECS: dict[str, KVCodec] = {codec.name: codec for codec in (ExactCodec(), Int8Codec())}


def get_codec(name: str) -> KVCodec:
    """The codec of this name.

    Raises:
        UsageError: if there is none.
    """
    if name not in CODECS:
        raise UsageError(f"no codec is named {name!r}.", cure=f"Codecs are {', '.join(CODECS)}.")
    return CODECS[name]
