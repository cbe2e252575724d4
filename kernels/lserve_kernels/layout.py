"""Where the bytes of a page lie: the one place that knows."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

_SCALE = 2 * torch.float32.itemsize  # step and low of a channel of keys, or of a token's value


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Shape of the KV pages of one layer and one kind of head.

    Heads are outermost, so that pages which follow each other are one `[tokens, D]` block of every head: plain views
    for the torch twins, and a single head stride for kernels. A token's slot is `page * page_size + offset`.

    Args:
        page_size: tokens of a physical page.
        head_dim: width of a key and of a value.
        dtype: of keys and values, as attention takes them.
        bits: 8 or 4 of a number in a page that is full; None keeps `dtype`.
        logical_size: tokens whose keys are bounded together, for page selection; None keeps no bounds.

    Raises:
        ValueError: if pages do not split into logical pages, or 4-bit codes of a head do not fill bytes.
    """

    page_size: int
    head_dim: int
    dtype: torch.dtype
    bits: int | None = None
    logical_size: int | None = None

    def __post_init__(self) -> None:
        if self.logical_size and self.page_size % self.logical_size:
            raise ValueError(f"pages of {self.page_size} tokens do not split into logical pages of {self.logical_size}")
        if self.bits not in (None, 8, 4):
            raise ValueError(f"pages have 8 or 4 bits, not {self.bits}")
        if self.bits == 4 and self.head_dim % 2:
            raise ValueError(f"heads of width {self.head_dim} cannot be packed to 4 bits")

    def bytes_per_page(self, num_heads: int) -> int:
        """Bytes of a page for `num_heads` heads: keys and values, and bounds of its logical pages if there are any."""
        numbers = self.page_size * self.head_dim
        kv = 2 * numbers * self.dtype.itemsize
        if self.bits:
            kv = 2 * numbers * self.bits // 8 + _SCALE * (self.head_dim + self.page_size)
        logical = self.page_size // self.logical_size if self.logical_size else 0
        return num_heads * (kv + 2 * logical * self.head_dim * self.dtype.itemsize)

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room that is all zero, because a slot without a token is hidden by a bias, and no bias hides a NaN.

    On a CPU the memory is taken from the system page by page as it is written.
    """
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)


def slots(pages: Tensor) -> Tensor:
    """View pages `[H, P, page_size, D]` as slots `[H, P * page_size, D]`."""
    heads, count, size, width = pages.shape
    return pages.view(heads, count * size, width)
