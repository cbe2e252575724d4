"""Every error that a user can meet, each with the fields that its message is made of.

A message says what is wrong, where, and the command that mends it. The command line prints the message alone and
leaves with `exit_code`; anything that is not an `LServeError` is a bug and keeps its traceback.
"""

from __future__ import annotations

from pathlib import Path


class LServeError(Exception):
    """Base of all known errors.

    Args:
        message: what is wrong and where, one sentence.
        cure: what to do about it; printed after the message.
    """

    exit_code = 1

    def __init__(self, message: str, *, cure: str = "") -> None:
        self.message = message
        self.cure = cure
        super().__init__(f"{message} {cure}".strip())


class UsageError(LServeError):
    """Raised when options or inputs cannot be used as they are given; nothing was started."""

    exit_code = 2


class ModelError(LServeError):
    """Raised when a model cannot be found, read or run by this engine."""


class DocumentError(LServeError):
    """Raised when one document cannot be read; `path` is the document as the user named it."""

    def __init__(self, path: str | Path, message: str, *, cure: str = "") -> None:
        self.path = str(path)
        super().__init__(f"{path}: {message}", cure=cure)


class NotTextError(DocumentError):
    """Raised for a file that holds no text (binary, empty): it is left out, which is no failure."""


class ProfileError(LServeError):
    """Raised when a head profile cannot be read or does not fit the model or the cache."""


class CacheError(LServeError):
    """Raised when a cache folder is missing, unreadable or of another format."""


class CacheMismatchError(CacheError):
    """Raised when a cache was built with something else than what is asked for now.

    Args:
        field: what differs, such as `model` or `codec`.
        cached: its value in the cache.
        wanted: its value now.
    """

    exit_code = 2

    def __init__(self, field: str, cached: str, wanted: str, *, cure: str = "") -> None:
        self.field, self.cached, self.wanted = field, cached, wanted
        super().__init__(f"the cache was built with {field} {cached}, not {wanted}.", cure=cure)


class CorruptIndexError(CacheError):
    """Raised when the index of a cache is missing or damaged, in the words of `what`; shards hold all that it says."""

    def __init__(self, path: str | Path, what: str) -> None:
        self.what = what
        cure = "Run build-cache again, or `lserve-tools cache verify --rebuild`: it is made from the shards."
        super().__init__(f"{path} {what}.", cure=cure)


class CorruptShardError(CacheError):
    """Raised when bytes of a shard are not those that were written.

    Args:
        shard: its file; `where` the place in it.
        reason: what is wrong there.
    """

    def __init__(self, shard: str | Path, where: str, reason: str) -> None:
        self.shard, self.where, self.reason = str(shard), where, reason
        super().__init__(f"{shard}: {where} is damaged ({reason}).", cure="Run build-cache again to rebuild it.")


class CapacityError(LServeError):
    """Raised for a request that can never be admitted; both numbers are tokens.

    Args:
        what: there is too little of.
        who: needs it.
    """

    def __init__(self, needed: int, available: int, what: str, *, who: str = "the prompt", cure: str = "") -> None:
        self.needed, self.available = needed, available
        super().__init__(f"{who} needs {needed:,} tokens of {what}, and there are {available:,}.", cure=cure)


class RetrievalError(LServeError):
    """Raised when no document can be chosen for a question."""
