"""The first SIGINT or SIGTERM lets running lines finish, the second one stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def finishing(stop: Callable[[], None], talk: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Call `stop` at the first signal; gives a function that tells whether there was one.

    Raises:
        KeyboardInterrupt: inside, at the second signal.
    """
    met: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        met.append(number)
        if len(met) > 1:
            raise KeyboardInterrupt
        stop()
        talk("Interrupted: the lines that are being answered are finished. Again stops at once.")

    if threading.current_thread() is not threading.main_thread():  # only the main one may handle signals
        yield lambda: False
        return
    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield lambda: bool(met)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
