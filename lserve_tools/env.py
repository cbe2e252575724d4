"""Every environment variable that this package reads: one table, read at the moment of use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Variable:
    """One environment variable; an empty value counts as unset.

    Args:
        name: as it stands in the environment.
        default: what holds when it is unset, in words.
        doc: what it does, one sentence.
    """

    name: str
    default: str
    doc: str

    def get(self) -> str | None:
        """Its value, or None if it is unset or empty."""
        return os.environ.get(self.name) or None


MODEL = Variable("LSERVE_MODEL", "none", "The model of commands that are given no `--model`.")
HOME = Variable(
    "LSERVE_HOME",
    "`$HF_HOME/assets/lserve-tools`",
    "Folder of converted models and of their fingerprints; it may be deleted at any time.",
)
DEBUG = Variable("LSERVE_DEBUG", "0", "1 shows the traceback of known errors too.")
LOG_LEVEL = Variable("LSERVE_LOG_LEVEL", "warning", "debug, info, warning or error; `-v` and `-q` go before it.")
KERNELS = Variable(  # read by lserve_kernels, which knows nothing of this package
    "LSERVE_KERNELS", "auto", "auto runs Triton kernels on a GPU, torch never, triton always."
)

VARIABLES = (MODEL, HOME, DEBUG, LOG_LEVEL, KERNELS)


def home() -> Path:
    """Where converted models and fingerprints are kept; not created here."""
    if chosen := HOME.get():
        return Path(chosen).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    hub = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    return hub.expanduser() / "assets" / "lserve-tools"


def debug() -> bool:
    """Are tracebacks of known errors wanted?"""
    return (DEBUG.get() or "0").lower() not in ("0", "false", "no", "off")
