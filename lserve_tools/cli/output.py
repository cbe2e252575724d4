"""Where words go: stdout is data, stderr is talk."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from pydantic import BaseModel

from lserve_tools import env
from lserve_tools.errors import UsageError

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_HANDLER = logging.StreamHandler()
_HANDLER.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))


@dataclass(frozen=True, slots=True)
class Output:
    """How one command speaks; made once, at its start, by `start`.

    Args:
        as_json: print one JSON object on stdout instead of a table.
        quiet: errors only.
        verbose: say more.
    """

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False

    @classmethod
    def start(cls, *, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> Output:
        """Set up logging and progress bars for this process, before transformers is imported.

        Raises:
            UsageError: if `quiet` and `verbose` are both given, or `LSERVE_LOG_LEVEL` is no level.
        """
        if quiet and verbose:
            raise UsageError("-q and -v exclude each other.", cure="Give one of them.")
        _set_up_logging(_level(quiet, verbose))
        if quiet or not sys.stderr.isatty():
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
            os.environ.setdefault("TQDM_DISABLE", "1")
        return cls(as_json, quiet, verbose)

    def talk(self, text: str) -> None:
        """Tell the user something, on stderr, unless -q."""
        if not self.quiet:
            _write(sys.stderr, text)

    def detail(self, text: str) -> None:
        """Tell the user something only with -v."""
        if self.verbose:
            _write(sys.stderr, text)

    def result(self, summary: BaseModel, rows: Iterable[tuple[str, str]]) -> None:
        """Print what a command did: the whole summary as JSON, or `rows` of name and value."""
        if self.as_json:
            _write(sys.stdout, summary.model_dump_json())
            return
        shown = [] if self.quiet else list(rows)
        width = max((len(name) for name, _ in shown), default=0)
        for name, value in shown:
            _write(sys.stdout, f"{name:<{width}}  {value}")

    def table(self, result: BaseModel, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print many things of one kind: all as one JSON object, or a line each under `titles`; numbers go right."""
        if self.as_json:
            _write(sys.stdout, result.model_dump_json())
            return
        lines = [] if self.quiet else [tuple(titles), *map(tuple, rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
            _write(sys.stdout, "  ".join([line[0].ljust(widths[0]), *cells]))


def print_data(text: str) -> None:
    """Print a line of data on stdout."""
    _write(sys.stdout, text)


def print_error(text: str) -> None:
    """Print a line on stderr, whatever -q says."""
    _write(sys.stderr, text)


def _write(stream: TextIO, text: str) -> None:
    # Names of files may hold what the terminal's encoding cannot show.
    encoding = stream.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def _level(quiet: bool, verbose: bool) -> int:
    if quiet or verbose:
        return logging.ERROR if quiet else logging.INFO
    name = (env.LOG_LEVEL.get() or "warning").lower()
    if name not in _LEVELS:
        raise UsageError(f"{env.LOG_LEVEL.name}={name} is no level.", cure=f"It is one of {', '.join(_LEVELS)}.")
    return _LEVELS[name]


def _set_up_logging(level: int) -> None:
    logger = logging.getLogger("lserve_tools")
    logger.setLevel(level)
    logger.propagate = False
    logger.addHandler(_HANDLER)  # the same object is added once only
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "info" if level <= logging.DEBUG else "error")
