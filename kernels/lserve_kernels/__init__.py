"""Attention over paged, shared and windowed keys. Imports torch (and triton) only."""

from lserve_kernels.block_sparse_prefill.reference import BandMask, band_mask, causal_attention, streaming_attention
from lserve_kernels.dispatch import use_triton
from lserve_kernels.layout import PageLayout, slots, zeros
from lserve_kernels.page_score.launch import score_pages
from lserve_kernels.page_score.reference import choose_pages
from lserve_kernels.page_stats.launch import update_bounds
from lserve_kernels.page_stats.reference import PageBounds
from lserve_kernels.paged_decode.reference import OwnRuns, SharedRun, paged_attention
from lserve_kernels.pages import KeyRotation, KVPages, PlainPages, QuantizedPages
from lserve_kernels.partial import NOTHING, Partial, attend, hidden, merge, merge_into
from lserve_kernels.written import Written

__all__ = [
    "NOTHING",
    "BandMask",
    "KVPages",
    "KeyRotation",
    "OwnRuns",
    "PageBounds",
    "PageLayout",
    "Partial",
    "PlainPages",
    "QuantizedPages",
    "SharedRun",
    "Written",
    "attend",
    "band_mask",
    "causal_attention",
    "choose_pages",
    "hidden",
    "merge",
    "merge_into",
    "paged_attention",
    "score_pages",
    "slots",
    "streaming_attention",
    "update_bounds",
    "use_triton",
    "zeros",
]
