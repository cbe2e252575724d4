"""Known failures become one line on stderr and an exit code; anything else is a bug and keeps its traceback."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from lserve_tools.errors import LServeError


@dataclass(frozen=True, slots=True)
class Failure:
    """What the user is told, and the exit code."""

    message: str
    exit_code: int


_ERRNO = {
    errno.ENOSPC: "no space is left on the disk. Free some, or choose another folder with -o.",
    errno.EDQUOT: "your disk quota is used up. Free some space, or choose another folder with -o.",
    errno.EACCES: "permission denied. Choose a folder that you may write to, or mend the file's permissions.",
    errno.EPERM: "the system does not permit this. Choose another folder, or mend the file's permissions.",
    errno.EROFS: "the file system is read-only. Choose another folder.",
    errno.EMFILE: "too many files are open. Raise the limit: ulimit -n 4096",
}
_OUT_OF_MEMORY = (
    "out of {what} memory. Lower --max-num-seqs or --max-num-batched-tokens, or use fewer or shorter documents."
)
_ALLOCATOR = "DefaultCPUAllocator"  # torch raises a plain RuntimeError when the CPU's memory is used up


def explain(error: BaseException) -> Failure | None:
    """The failure that an exception stands for, or None if it is a bug of ours."""
    if isinstance(error, LServeError):
        return Failure(str(error), error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted.", 130)
    if isinstance(error, OSError) and error.errno in _ERRNO:
        place = f"{error.filename}: " if error.filename else ""
        return Failure(place + _ERRNO[error.errno], 1)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _ALLOCATOR in str(error)):
        return Failure(_OUT_OF_MEMORY.format(what="CPU"), 1)
    # By name, since this must not import torch.
    if any(kind.__name__ == "OutOfMemoryError" and kind.__module__ == "torch" for kind in type(error).__mro__):
        return Failure(_OUT_OF_MEMORY.format(what="GPU"), 1)
    return None
