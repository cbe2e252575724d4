"""Taking the KV of documents from the engine to the writer of a cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lserve_tools.cache.keys import chain_keys
from lserve_tools.cache.writer import CacheWriter
from lserve_tools.models.rope import Rope
from lserve_tools.quant.kv import get_codec
from lserve_tools.text.documents import Document
from lserve_tools.text.segments import Segment


class DocumentCapture:
    """Stores the KV of one document, and that of the prefix if the cache has none yet.

    Args:
        rope: takes positions out of keys for codecs that store them without.
        prefix: the segments before the document: one, or none.
        advance: called with the number of tokens of each stored chunk.
    """

    def __init__(
        self,
        writer: CacheWriter,
        rope: Rope,
        prefix: list[Segment],
        document: Document,
        segment: Segment,
        advance: Callable[[int], object],
    ) -> None:
        self._writer, self._rope, self._document, self._segment = writer, rope, document, segment
        self._segments = [*prefix, segment]
        self._advance = advance
        self._unrotate = get_codec(writer.manifest.codec).before_rope
        self._last_layer = writer.manifest.num_layers - 1
        self._wants_prefix = not writer.has_prefix
        self._positions = torch.empty(0, dtype=torch.int64)
        self._keys: list[bytes] = []

    def __call__(self, segment: int, chunk: int, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take one layer of a chunk; see `LLM.prefill`."""
        is_document = segment == len(self._segments) - 1
        if not is_document and not self._wants_prefix:
            return
        if layer == 0:
            self._begin(segment, chunk, keys.device)
        if self._unrotate:
            keys = self._rope.at(layer, self._positions).unrotate(keys)
        self._writer.add_layer(layer, keys, values)
        if layer == self._last_layer and is_document:
            self._advance(self._segment.chunks[chunk])
        elif layer == self._last_layer:
            self._writer.end_document()
            self._wants_prefix = False

    def _begin(self, segment: int, chunk: int, device: torch.device) -> None:
        """Begin a chunk, and before the first one what it belongs to."""
        tokens = self._segments[segment]
        first = sum(tokens.chunks[:chunk])
        ids = tokens.token_ids[first : first + tokens.chunks[chunk]]
        position = sum(len(s.token_ids) for s in self._segments[:segment]) + first
        self._positions = torch.arange(position, position + len(ids), device=device)
        root = self._writer.root_key if segment < len(self._segments) - 1 else self._writer.document_root
        if chunk == 0:
            self._keys = chain_keys(root, tokens.token_ids, tokens.chunks)
        if chunk == 0 and segment < len(self._segments) - 1:
            self._writer.begin_prefix()
        elif chunk == 0:
            file = self._document
            self._writer.begin_document(
                file.path, file.sha256, file.size, file.mtime_ns, tokens.token_ids, tokens.chunks
            )
        self._writer.begin_chunk(self._keys[chunk], ids, position)
