"""Where the bytes of a page lie: the one place that knows."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Shape of the KV pages of one layer and one kind of head.

    Heads are outermost, so that pages which follow each other are one `[tokens, D]` block of every head: plain views
    for the torch twins, and a single head stride for kernels. A token's slot is `page * page_size + offset`.

    Args:
        page_size: tokens of a physical page.
        head_dim: width of a key and of a value.
        dtype: of keys and values.
    """

    page_size: int
    head_dim: int
    dtype: torch.dtype

    def bytes_per_page(self, num_heads: int, logical_size: int | None = None) -> int:
        """Bytes of a page for `num_heads` heads: keys and values, and bounds of its logical pages if there are any."""
        bounds = self.page_size // logical_size if logical_size else 0
        return 2 * num_heads * (self.page_size + bounds) * self.head_dim * self.dtype.itemsize

    def allocate(self, num_heads: int, num_pages: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Key and value pages, each `[num_heads, num_pages, page_size, head_dim]`, all zero.

        Zero, because a slot without a token is hidden by a bias, and no bias hides a NaN. On a CPU the memory is taken
        from the system page by page as it is written.
        """
        shape = (num_heads, num_pages, self.page_size, self.head_dim)
        return self._zeros(shape, device), self._zeros(shape, device)

    def _zeros(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        num_bytes = self.dtype.itemsize
        for size in shape:
            num_bytes *= size
        if device.type != "cpu" or num_bytes == 0:
            return torch.zeros(shape, dtype=self.dtype, device=device)
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=self.dtype).view(shape)

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)


def slots(pages: Tensor) -> Tensor:
    """View pages `[H, P, page_size, D]` as slots `[H, P * page_size, D]`."""
    heads, count, size, width = pages.shape
    return pages.view(heads, count * size, width)
