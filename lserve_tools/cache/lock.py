"""One builder at a time: the lock of a cache folder. Readers take none."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from lserve_tools.cache.shard import SHARDS, writing
from lserve_tools.errors import CacheError

_LOCK = "build.lock"


class BuildLock:
    """The leave to change a cache; a context manager. It ends with the process, however that ends.

    Args:
        folder: of the cache; it is made.

    Raises:
        CacheError: on entering, if another process holds it, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = FileLock(folder / _LOCK, timeout=0)

    def __enter__(self) -> BuildLock:
        with writing(self._folder):
            (self._folder / SHARDS).mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire()
            except Timeout:
                cure = "Wait until it is done, or build into another folder with -o."
                raise CacheError(f"another build is writing to {self._folder}.", cure=cure) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()
