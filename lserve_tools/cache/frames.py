"""What the bytes of a frame mean: KV of one chunk in one layer, part after part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lserve_tools.quant.kv import KVCodec
from lserve_tools.quant.parts import PartSpec

LAYOUT = (
    "keys and values of retrieval heads, then of streaming heads; the parts of each as the codec orders them,"
    " contiguous, little-endian, each at a multiple of 8 bytes"
)
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class ChunkLayer:
    """KV of one chunk in one layer; it may be overwritten by the next one.

    Args:
        keys, values: `[Hr, T, D]` of the retrieval heads.
        streaming_keys, streaming_values: `[Hs, n, D]` of the streaming heads' tokens.
    """

    keys: Tensor
    values: Tensor
    streaming_keys: Tensor
    streaming_values: Tensor


@dataclass(frozen=True)
class FrameLayout:
    """Where the parts of a layer lie in its frame.

    Args:
        codec: of its KV.
        dtype: of the model.
        shape: `(Hr, T, D)` of the retrieval heads; `streaming_shape` is `(Hs, n, D)`.
    """

    codec: KVCodec
    dtype: torch.dtype
    shape: tuple[int, int, int]
    streaming_shape: tuple[int, int, int]

    @cached_property
    def specs(self) -> tuple[dict[str, PartSpec], ...]:
        """Parts of keys, values, streaming keys and streaming values."""
        return tuple(
            parts(shape, self.dtype)
            for shape in (self.shape, self.streaming_shape)
            for parts in (self.codec.key_parts, self.codec.value_parts)
        )

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the frame before compression."""
        return sum(_aligned(spec.nbytes) for specs in self.specs for spec in specs.values())

    def encode(self, layer: ChunkLayer) -> bytes:
        """The bytes of a layer whose tensors have this layout's shapes."""
        codec = self.codec
        parts = (
            codec.encode_keys(layer.keys),
            codec.encode_values(layer.values),
            codec.encode_keys(layer.streaming_keys),
            codec.encode_values(layer.streaming_values),
        )
        frame = torch.zeros(self.nbytes, dtype=torch.uint8)
        for target, source in zip(self._views(frame), parts, strict=True):
            for name, view in target.items():
                view.copy_(source[name])
        return frame.numpy().tobytes()

    def decode(self, frame: Tensor, room: Room) -> ChunkLayer:
        """The layer of a frame, uint8 `[nbytes]`.

        Args:
            frame: its bytes; the layer may be a view of them.
            room: where decoded numbers may go.
        """
        keys, values, streaming_keys, streaming_values = self._views(frame)
        return ChunkLayer(
            self.codec.decode_keys(keys, room.take(0, self.shape)),
            self.codec.decode_values(values, room.take(1, self.shape)),
            self.codec.decode_keys(streaming_keys, room.take(2, self.streaming_shape)),
            self.codec.decode_values(streaming_values, room.take(3, self.streaming_shape)),
        )

    def _views(self, frame: Tensor) -> Iterator[dict[str, Tensor]]:
        """The parts as views of a frame."""
        first = 0
        for specs in self.specs:
            views = {}
            for name, spec in specs.items():
                views[name] = frame[first : first + spec.nbytes].view(spec.dtype).view(spec.shape)
                first += _aligned(spec.nbytes)
            yield views


class Room:
    """Memory for decoded numbers that is used again for every layer.

    Args:
        dtype: of the numbers.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._blocks = [torch.empty(0, dtype=dtype) for _ in range(4)]

    def take(self, place: int, shape: tuple[int, int, int]) -> Tensor:
        """Room of this shape in one of four places."""
        count = shape[0] * shape[1] * shape[2]
        if self._blocks[place].numel() < count:
            self._blocks[place] = torch.empty(count, dtype=self._blocks[place].dtype)
        return self._blocks[place][:count].view(shape)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
