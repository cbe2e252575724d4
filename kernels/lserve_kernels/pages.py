"""Pages of keys and values in the dtype of attention, and in 8 or 4 bits."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lserve_kernels.kv_quant.launch import quantize_keys, quantize_values
from lserve_kernels.kv_quant.reference import Codes, dequantize
from lserve_kernels.layout import PageLayout, slots, zeros
from lserve_kernels.page_stats.launch import update_bounds
from lserve_kernels.page_stats.reference import PageBounds
from lserve_kernels.written import Written


class KeyRotation(Protocol):
    """Rotation of keys to where they stand."""

    def rotate(self, keys: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Rotate keys `[..., T, D]` that carry no position, into `out` if it is given."""
        ...

    def unrotate(self, keys: Tensor) -> Tensor:
        """Take the rotation out of keys `[..., T, D]`."""
        ...


class KVPages(Protocol):
    """Key and value pages of some heads of one layer."""

    def write(self, written: Written, keys: Tensor, values: Tensor, rotation: KeyRotation | None = None) -> None:
        """Write keys (rotated) and values `[H, T, D]` of new tokens."""
        ...

    def read(self, pages: Tensor, first_page: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, P * page_size, D]` of pages `[P]`; `first_page` is set if they follow each other."""
        ...

    def gather(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, B, P * page_size, D]` of pages `[B, P]`, or `[H, B, P]` that each head chose."""
        ...

    def bound(self, bounds: PageBounds, written: Written) -> None:
        """Bound the keys of all logical pages that tokens were written to."""
        ...


class PlainPages:
    """Pages in the dtype of attention.

    Args:
        keys, values: `[H, P, page_size, D]`.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    @classmethod
    def allocate(cls, layout: PageLayout, num_heads: int, num_pages: int, device: torch.device) -> PlainPages:
        """All zero."""
        shape = (num_heads, num_pages, layout.page_size, layout.head_dim)
        return cls(zeros(shape, layout.dtype, device), zeros(shape, layout.dtype, device))

    def write(self, written: Written, keys: Tensor, values: Tensor, rotation: KeyRotation | None = None) -> None:
        """See `KVPages`; where slots follow each other, keys are rotated without a copy between."""
        key_slots, value_slots, places = slots(self.keys), slots(self.values), written.slots
        if isinstance(places, slice):
            value_slots[:, places] = values.to(value_slots)
            if rotation is not None:
                rotation.rotate(keys, out=key_slots[:, places])
            else:
                key_slots[:, places] = keys.to(key_slots)
        else:
            value_slots.index_copy_(1, places, values.to(value_slots))
            key_slots.index_copy_(1, places, (rotation.rotate(keys) if rotation is not None else keys).to(key_slots))

    def read(self, pages: Tensor, first_page: int | None = None) -> tuple[Tensor, Tensor]:
        """See `KVPages`; views where they can be."""
        if first_page is not None:
            last = first_page + pages.shape[0]
            return slots(self.keys[:, first_page:last]), slots(self.values[:, first_page:last])
        return self.keys.index_select(1, pages).flatten(1, 2), self.values.index_select(1, pages).flatten(1, 2)

    def gather(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """See `KVPages`."""
        return _gather(self.keys, pages).flatten(2, 3), _gather(self.values, pages).flatten(2, 3)

    def bound(self, bounds: PageBounds, written: Written) -> None:
        """See `KVPages`."""
        update_bounds(bounds, self.keys, written.logical, written.logical_counts)


class QuantizedPages:
    """Complete pages as codes; pages that more tokens will come to, in the dtype of attention.

    An open page belongs to whoever writes to it, so there are few of them. RoPE turns a constant bias of keys into
    waves along a page, which steps per channel fit badly. So keys are coded as if each page stood at position 0 with
    all its tokens: the rotation by a token's offset in its page is taken out before and put back after, the same for
    every page wherever it stands, and a bias is a constant again.

    Args:
        layout: of a page; it has `bits`.
        offsets: the rotation to positions 0 … page_size - 1, or None for keys that cannot be moved.
        keys, values: codes of all pages.
        open_keys, open_values: `[H, O, page_size, D]`.
        open_of: `[P]` int64, the open page that stands for a page, or −1; shared by all layers.
    """

    def __init__(
        self,
        layout: PageLayout,
        offsets: KeyRotation | None,
        keys: Codes,
        values: Codes,
        open_keys: Tensor,
        open_values: Tensor,
        open_of: Tensor,
    ) -> None:
        if layout.bits is None:
            raise ValueError("quantized pages need bits")
        self._offsets = offsets
        self._bits, self._dtype = layout.bits, layout.dtype
        self._keys, self._values, self._open_of = keys, values, open_of
        self._open_keys, self._open_values = open_keys, open_values

    @classmethod
    def allocate(
        cls,
        layout: PageLayout,
        offsets: KeyRotation | None,
        num_heads: int,
        num_pages: int,
        num_open: int,
        open_of: Tensor,
        device: torch.device,
    ) -> QuantizedPages:
        """All zero."""
        size, width = layout.page_size, layout.head_dim
        codes = (num_heads, num_pages, size, width * (layout.bits or 8) // 8)

        def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return zeros(shape, dtype, device)

        keys, values = (
            Codes(room(codes, torch.uint8), room(scale, torch.float32), room(scale, torch.float32))
            for scale in ((num_heads, num_pages, 1, width), (num_heads, num_pages, size, 1))
        )
        opened = (num_heads, num_open, size, width)
        return cls(layout, offsets, keys, values, room(opened, layout.dtype), room(opened, layout.dtype), open_of)

    def write(self, written: Written, keys: Tensor, values: Tensor, rotation: KeyRotation | None = None) -> None:
        """See `KVPages`."""
        if rotation is not None:
            keys = rotation.rotate(keys)
        closed = written.closed
        pages, counts = written.pages[closed], written.counts[closed]
        whole_keys = self._touch(self._open_keys, written, keys)[:, closed]
        whole_values = self._touch(self._open_values, written, values)[:, closed]
        if self._offsets is not None:
            whole_keys = self._offsets.unrotate(whole_keys)
        coded = quantize_keys(whole_keys, counts, self._bits), quantize_values(whole_values, self._bits)
        for target, codes in zip((self._keys, self._values), coded, strict=True):
            for room, found in zip(target, codes, strict=True):
                room[:, pages] = found

    @staticmethod
    def _touch(opened: Tensor, written: Written, new: Tensor) -> Tensor:
        """All pages `[H, N, S, D]` that new tokens were written to; what stays open is put back among `opened`."""
        heads, _, size, width = opened.shape
        touched = opened.new_zeros(heads, len(written.pages), size, width)
        touched[:, written.resumed[0]] = opened[:, written.resumed[1]]
        slots(touched).index_copy_(1, written.local, new.to(opened))
        opened[:, written.open[1]] = touched[:, written.open[0]]
        return touched

    def read(self, pages: Tensor, first_page: int | None = None) -> tuple[Tensor, Tensor]:
        """See `KVPages`."""
        keys, values = self.gather(pages[None])
        return keys[:, 0], values[:, 0]

    def gather(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """See `KVPages`."""
        keys, values = (Codes(*(_gather(x, pages) for x in codes)) for codes in (self._keys, self._values))
        if self._offsets is not None:
            rotated = self._offsets.rotate(dequantize(keys, self._bits, torch.float32)).to(self._dtype)
        else:
            rotated = dequantize(keys, self._bits, self._dtype)
        found = rotated, dequantize(values, self._bits, self._dtype)
        is_open = self._open_of[pages]
        places = (is_open >= 0).nonzero(as_tuple=True)
        for numbers, opened in zip(found, (self._open_keys, self._open_values), strict=True):
            if pages.dim() == 3:
                numbers[places] = opened[places[0], is_open[places]]
            else:
                numbers[:, places[0], places[1]] = opened[:, is_open[places]]
        return found[0].flatten(2, 3), found[1].flatten(2, 3)

    def bound(self, bounds: PageBounds, written: Written) -> None:
        """See `KVPages`; of the keys as attention will read them."""
        keys, _ = self.gather(written.pages[None])
        pages = keys.view(keys.shape[0], len(written.pages), -1, keys.shape[-1])
        update_bounds(bounds, pages, written.logical, written.logical_counts, written.local_logical)


def _gather(pages: Tensor, wanted: Tensor) -> Tensor:
    """`[H, B, P, ...]` of pages `[H, all, ...]` that are wanted: `[B, P]`, or `[H, B, P]`."""
    heads, total = pages.shape[:2]
    if wanted.dim() == 3:  # one list of all heads' pages, so that a whole page is copied at a time
        wanted = wanted + torch.arange(heads, device=wanted.device)[:, None, None] * total
        pages = pages.reshape(1, heads * total, *pages.shape[2:])
    shape = (heads, *wanted.shape[-2:], *pages.shape[2:])
    return pages.index_select(1, wanted.flatten()).view(shape)
