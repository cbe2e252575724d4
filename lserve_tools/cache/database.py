"""An SQLite file of a cache: opening it, transactions, and errors that tell damage from what the system refuses."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from lserve_tools.errors import CacheError, CorruptIndexError

# What these say is about the disk or other processes, not about the bytes of the file.
_REFUSED = {
    sqlite3.SQLITE_BUSY: "Another process holds it; try again when that is done.",
    sqlite3.SQLITE_LOCKED: "Another process holds it; try again when that is done.",
    sqlite3.SQLITE_FULL: "No space is left on the disk; free some, what is sealed stays.",
    sqlite3.SQLITE_IOERR: "The disk refuses; free some space there, or look after the disk.",
    sqlite3.SQLITE_PERM: "Permission is denied; mend the file's permissions.",
    sqlite3.SQLITE_CANTOPEN: "It cannot be opened; mend the permissions of the file and its folder.",
    sqlite3.SQLITE_READONLY: "It cannot be written; mend the permissions of the file and its folder.",
}
_PRIMARY = 0xFF  # of an extended error code
_WAIT = 30  # seconds for another process to end its transaction


class Database:
    """An open SQLite file with a rollback journal: a folder on a network or without leave to write can be read.

    Args:
        path: its file.
        schema: statements that make its tables; `version` of them.
        writable: it is made if it is not there; else it is only read.

    Raises:
        CorruptIndexError: here and later, if it is damaged or not there.
        CacheError: if the system refuses.
    """

    def __init__(self, path: Path, schema: str, version: int, *, writable: bool = False) -> None:
        self.path = path
        if not writable and not path.is_file():
            raise CorruptIndexError(path, "is not there")
        with self._reading():
            uri = f"{path.absolute().as_uri()}?mode={'rwc' if writable else 'ro'}"
            self._connection = sqlite3.connect(
                uri, uri=True, timeout=_WAIT, isolation_level=None, check_same_thread=False
            )
            try:
                found = self._one("PRAGMA user_version")
                if writable and not found:
                    self._connection.executescript(f"BEGIN; {schema} PRAGMA user_version = {version}; COMMIT;")
                elif found != version:
                    raise ValueError(f"version {found}")
            except (sqlite3.Error, ValueError):
                self._connection.close()
                raise

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def check(self) -> None:
        """Read all of the file, and make sure that what SQLite derives from its rows agrees with them."""
        with self._reading():
            found = self._one("PRAGMA integrity_check(1)")
            if found != "ok":
                raise ValueError(found)

    def shrink(self) -> None:
        """Give the room of deleted rows back to the disk."""
        with self._reading():
            self._connection.execute("VACUUM")

    def _rows(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        with closing(self._connection.execute(query, values)) as cursor:
            yield from cursor

    def _row(self, query: str, *values: object) -> tuple[Any, ...] | None:
        return next(iter(list(self._rows(query, *values))), None)

    def _one(self, query: str) -> Any:
        row = self._row(query)
        return row[0] if row else None

    @contextmanager
    def steady(self) -> Iterator[None]:
        """What is read within is of one moment; builders wait until it is done."""
        with self._reading():
            self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.execute("ROLLBACK")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction: all of it or nothing."""
        with self._reading():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # a full disk has ended it already
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn SQLite's errors, and what damaged rows lead to, into errors that name the file."""
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code == sqlite3.SQLITE_READONLY_ROLLBACK:
                raise CorruptIndexError(self.path, "was left by a killed build in the middle of a change") from None
            if code is not None and code & _PRIMARY in _REFUSED:
                raise CacheError(f"{self.path}: {error}.", cure=_REFUSED[code & _PRIMARY]) from None
            raise CorruptIndexError(self.path, f"is damaged or not an index ({error})") from None


def delete_database(path: Path) -> None:
    """Delete a file with its journal, which would be rolled back into the next file of this name."""
    for old in (path, path.with_name(path.name + "-journal")):
        old.unlink(missing_ok=True)
