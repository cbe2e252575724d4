"""Shapes of a cache's KV, as its manifest has them."""

from __future__ import annotations

import torch
from torch import Tensor

from lserve_tools.cache.frames import ChunkLayer, FrameLayout
from lserve_tools.cache.windows import Ranges
from lserve_tools.errors import CacheError
from lserve_tools.quant.kv import get_codec
from lserve_tools.schema import Manifest


class CacheGeometry:
    """Heads of each kind in each layer, and the layout of frames that follows.

    Args:
        manifest: of the cache.

    Raises:
        CacheError: if it names a dtype that does not exist.
    """

    def __init__(self, manifest: Manifest) -> None:
        dtype = getattr(torch, manifest.dtype, None)
        if not isinstance(dtype, torch.dtype):
            cure = "Build the cache again with --overwrite."
            raise CacheError(f"the manifest has an unknown dtype {manifest.dtype!r}.", cure=cure)
        self.dtype = dtype
        self.codec = get_codec(manifest.codec)
        self.num_layers, self.head_dim = manifest.num_layers, manifest.head_dim
        mask = manifest.head_mask or ((True,) * manifest.num_kv_heads,) * manifest.num_layers
        rows = [torch.tensor(row, dtype=torch.bool) for row in mask]
        self.retrieval = [row.nonzero().flatten() for row in rows]
        self.streaming = [(~row).nonzero().flatten() for row in rows]
        self.has_streaming = any(len(heads) for heads in self.streaming)

    def layout(self, layer: int, num_tokens: int, ranges: Ranges) -> FrameLayout:
        """Layout of the frame of a chunk in one layer."""
        kept = sum(stop - start for start, stop in ranges)
        return FrameLayout(
            self.codec,
            self.dtype,
            (len(self.retrieval[layer]), num_tokens, self.head_dim),
            (len(self.streaming[layer]), kept, self.head_dim),
        )

    def split(self, layer: int, keys: Tensor, values: Tensor, ranges: Ranges) -> ChunkLayer:
        """What is stored of the KV `[Hkv, T, D]` of a chunk."""
        kept = torch.cat([torch.arange(a, b) for a, b in ranges]) if ranges else torch.empty(0, dtype=torch.int64)
        retrieval, streaming = self.retrieval[layer].to(keys.device), self.streaming[layer].to(keys.device)
        kept = kept.to(keys.device)
        return ChunkLayer(keys[retrieval], values[retrieval], keys[streaming][:, kept], values[streaming][:, kept])
