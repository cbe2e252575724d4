"""Finding and reading documents: every UTF-8 text file below a folder, in path order.

Hidden files and folders are left out, links to folders are followed unless they lead back into themselves. The text is
kept as it is, line ends included; a byte order mark is taken off.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lserve_tools.errors import DocumentError, NotTextError, UsageError

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_CONTROLS = bytes(c for c in range(32) if c not in b"\t\n\v\f\r\x1b")  # escape: logs of terminals are text
_LISTED = 3


@dataclass(frozen=True, slots=True)
class Document:
    """One source file.

    Args:
        path: posix, relative to the root of the build.
        text: decoded, without a byte order mark.
        sha256: of the file's bytes, hex.
        size: of the file in bytes.
        mtime_ns: its time of change.
    """

    path: str
    text: str
    sha256: str
    size: int
    mtime_ns: int


def find_documents(root: Path, *, exclude: Sequence[Path] = ()) -> tuple[list[Document], list[DocumentError]]:
    """Read all documents below `root`, a folder or a single file.

    Args:
        exclude: folders that are not entered, such as the cache's own.

    Returns:
        The documents in path order, and one error for each file that gave none: `NotTextError` for binary and empty
        files, which are left out by design, a plain `DocumentError` for those that should have been readable.

    Raises:
        UsageError: if `root` is missing, or holds no document at all.
    """
    if not root.exists():
        raise UsageError(f"{root}: no such file or folder.", cure="Name the folder that holds the documents.")
    documents: list[Document] = []
    errors: list[DocumentError] = []
    for path, name in _walk(root, [folder.resolve() for folder in exclude]):
        try:
            documents.append(read_document(path, name))
        except DocumentError as error:
            errors.append(error)
    if not documents:
        raise UsageError(_no_documents(root, errors), cure="Documents are UTF-8 text files: txt, md, code.")
    return documents, errors


def _walk(root: Path, excluded: list[Path]) -> Iterator[tuple[Path, str]]:
    """Files below `root` with their names relative to it, sorted by name."""
    if not root.is_dir():
        yield root, root.name
        return
    found: list[tuple[Path, str]] = []
    pending: list[tuple[Path, tuple[Path, ...]]] = [(root, ())]
    while pending:
        folder, ancestors = pending.pop()
        real = folder.resolve()
        if real in ancestors or real in excluded:
            continue
        for entry in sorted(folder.iterdir()):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                pending.append((entry, (*ancestors, real)))
            else:
                found.append((entry, entry.relative_to(root).as_posix()))
    yield from sorted(found, key=lambda item: item[1])


def read_document(path: Path, name: str) -> Document:
    """Read one file that prompts call `name`.

    Raises:
        DocumentError: if it cannot be read as UTF-8 text; `NotTextError` if it holds no text.
    """
    shown = os.fsencode(name).decode("utf-8", errors="replace")
    if shown != name:
        raise DocumentError(shown, "the file's name is not UTF-8.", cure="Rename it.")
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise NotTextError(name, "not a regular file.")
        data = path.read_bytes()
    except OSError as error:
        raise DocumentError(name, f"cannot be read ({error.strerror}).") from None
    text = _decode(name, data)
    return Document(name, text, hashlib.sha256(data).hexdigest(), len(data), status.st_mtime_ns)


def _decode(name: str, data: bytes) -> str:
    if not data.strip():
        raise NotTextError(name, "empty.")
    if data.startswith(_UTF16):
        raise DocumentError(name, "is UTF-16, not UTF-8.", cure=f"Convert it: iconv -f utf-16 -t utf-8 {name}")
    if data.startswith(b"%PDF-") or len(data.translate(None, _CONTROLS)) < len(data):
        raise NotTextError(name, "binary.")
    try:
        return data.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        where = f"is not UTF-8 (byte 0x{data[error.start]:02x} in line {line})."
        raise DocumentError(name, where, cure=f"Convert it: iconv -f latin1 -t utf-8 {name}") from None


def _no_documents(root: Path, errors: list[DocumentError]) -> str:
    if not errors:
        return f"{root}: holds no files."
    listed = "; ".join(str(error.message) for error in errors[:_LISTED])
    more = f"; and {len(errors) - _LISTED} more" if len(errors) > _LISTED else ""
    return f"{root}: holds no document ({listed}{more})."
