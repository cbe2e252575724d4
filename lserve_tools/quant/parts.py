"""Shape and dtype of a part of encoded KV."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True, slots=True)
class PartSpec:
    """What a part is before its bytes are read, so that their count is known."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return prod(self.shape) * self.dtype.itemsize
