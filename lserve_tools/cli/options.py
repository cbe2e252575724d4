"""Options that commands share, each once: the same name means the same everywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str | int) -> int:
    """Bytes of a size such as `800M` or `4GiB`; units are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
    if not found or not float(found[1]):
        raise typer.BadParameter(f"{text!r} is no size. Write it like 800M or 4GiB.")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def parse_device(text: str) -> str:
    """A device by torch's name, or `auto`."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise typer.BadParameter(f"{text!r} is no device. It is auto, cpu, cuda or cuda:N.")
    return text


def parse_sparsity(text: str | float) -> float | None:
    """A fraction of heads, or None for `auto`."""
    if text == "auto":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise typer.BadParameter(f"{text!r} is no sparsity. It is auto, or a fraction of heads from 0 to 1.")
    return value


# --- The model ---------------------------------------------------------------------------------------------------

ModelName = Annotated[
    str | None,
    typer.Option("--model", help="Local folder, hub id, .gguf file or `demo`; without it, $LSERVE_MODEL."),
]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a model on the hub.")]
DType = Annotated[DTypeName, typer.Option("--dtype", help="Dtype of weights and KV; auto takes the model's own.")]
Device = Annotated[
    str, typer.Option("--device", parser=parse_device, metavar="auto|cpu|cuda[:N]", help="Where to run.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that the model's folder brings.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]

# --- Folders and files -------------------------------------------------------------------------------------------

CacheFolder = Annotated[Path, typer.Option("--cache", metavar="FOLDER", help="Folder of the cache.")]
HeadsFolder = Annotated[
    Path | None, typer.Option("--heads", metavar="FOLDER", help="Head profile: which heads stream.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, do nothing.")]

# --- What is said ------------------------------------------------------------------------------------------------

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more, on stderr.")]

# --- The engine --------------------------------------------------------------------------------------------------

KVMemory = Annotated[
    int | None,
    typer.Option(
        "--kv-memory",
        parser=parse_bytes,
        metavar="SIZE",
        help="Memory for KV, such as 4GiB; else half of what is free.",
    ),
]
KVCacheDType = Annotated[
    Literal["auto", "int8", "int4"],
    typer.Option("--kv-cache-dtype", help="KV pages of heads that retrieve: the model's dtype, 8 or 4 bits."),
]
TokenBudget = Annotated[
    int | None,
    typer.Option(
        "--token-budget", min=128, help="Tokens that a retrieval head reads for each token of an answer; else all."
    ),
]
ReuseInterval = Annotated[
    int, typer.Option("--reuse-interval", min=1, help="Tokens of an answer that one choice of pages serves.")
]
MaxNumSeqs = Annotated[int, typer.Option("--max-num-seqs", min=1, help="Questions answered at a time.")]
MaxNumBatchedTokens = Annotated[
    int, typer.Option("--max-num-batched-tokens", min=1, help="Tokens computed in one step.")
]
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", min=1, help="Longest prompt plus answer, in tokens; else the model's.")
]
Sparsity = Annotated[
    float | None,
    typer.Option("--sparsity", parser=parse_sparsity, metavar="auto|X", help="Fraction of KV heads that stream."),
]
