"""Everything that touches disk or wire, as pydantic models; nothing else reads or writes JSON by hand."""

from __future__ import annotations

from lserve_tools.schema.batch import (
    BATCH_ALIASES,
    BatchLine,
    BuildSummary,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    LeftOut,
    LineFailure,
    PromptTokensDetails,
    ReadingAccount,
    ResultLine,
    ResultResponse,
    RunSummary,
    SimpleResultLine,
    TokenAccount,
    Usage,
)
from lserve_tools.schema.bench import BenchContender, BenchQa
from lserve_tools.schema.cache import (
    CACHE_FORMAT_VERSION,
    CacheStats,
    Manifest,
    ShardChunk,
    ShardContents,
    ShardDocument,
)
from lserve_tools.schema.heads import (
    GateSettings,
    LossPoint,
    ProfileData,
    ProfileRecord,
    ProfileSummary,
    QualityPoint,
    StreamingWindows,
)

__all__ = [
    "BATCH_ALIASES",
    "CACHE_FORMAT_VERSION",
    "BatchLine",
    "BenchContender",
    "BenchQa",
    "BuildSummary",
    "CacheStats",
    "ChatChoice",
    "ChatCompletion",
    "ChatMessage",
    "GateSettings",
    "LeftOut",
    "LineFailure",
    "LossPoint",
    "Manifest",
    "ProfileData",
    "ProfileRecord",
    "ProfileSummary",
    "PromptTokensDetails",
    "QualityPoint",
    "ReadingAccount",
    "ResultLine",
    "ResultResponse",
    "RunSummary",
    "ShardChunk",
    "ShardContents",
    "ShardDocument",
    "SimpleResultLine",
    "StreamingWindows",
    "TokenAccount",
    "Usage",
]
