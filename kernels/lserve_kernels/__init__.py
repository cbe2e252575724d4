"""Attention over paged, shared and windowed keys. Imports torch (and triton) only."""

from lserve_kernels.block_sparse_prefill.reference import BandMask, band_mask, causal_attention, streaming_attention
from lserve_kernels.layout import PageLayout, slots
from lserve_kernels.paged_decode.reference import OwnRuns, SharedRun, paged_attention
from lserve_kernels.partial import NOTHING, Partial, attend, hidden, merge, merge_into

__all__ = [
    "NOTHING",
    "BandMask",
    "OwnRuns",
    "PageLayout",
    "Partial",
    "SharedRun",
    "attend",
    "band_mask",
    "causal_attention",
    "hidden",
    "merge",
    "merge_into",
    "paged_attention",
    "slots",
    "streaming_attention",
]
