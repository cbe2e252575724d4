"""Work in a process of its own, by fork: no import to wait for, and it may be killed or bound."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest

from lserve_tools.errors import LServeError

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def start(work: Callable[[], object]) -> tuple[int, int]:
    """Begin work in a process; gives its id and where its words come from."""
    source, sink = os.pipe()
    child = os.fork()
    if child:
        os.close(sink)
        return child, source
    try:
        said = str(work())
    except LServeError as error:
        said = f"error: {error}"
    except BaseException:
        said = f"bug: {traceback.format_exc()}"
    os.write(sink, said.encode())
    os._exit(0)


def finish(started: tuple[int, int]) -> str:
    """Wait for work to end; gives what it returned as text, or its error, or nothing if it was killed."""
    child, source = started
    with os.fdopen(source, "rb") as words:
        said = words.read().decode()
    os.waitpid(child, 0)
    return said


def in_child(work: Callable[[], object]) -> str:
    """Do work in a process; see `finish`."""
    return finish(start(work))
