"""Finding the documents that a line names: in a cache, or, without one, in the batch file's own folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Protocol

from lserve_tools.batch.lines import nearest
from lserve_tools.errors import DocumentError
from lserve_tools.text.documents import read_document
from lserve_tools.text.prompts import document_segment
from lserve_tools.text.segments import Segment
from lserve_tools.text.tokenizer import Tokenizer


class Library(Protocol):
    """The documents that lines may name."""

    def find(self, names: Sequence[str] | None) -> list[Segment]:
        """The documents of one line in order; None stands for all there are.

        Raises:
            DocumentError: if a name or glob has no document.
        """
        ...


class CachedLibrary:
    """Documents of a cache, as the token ids that it holds.

    Args:
        segments: of all documents.
    """

    def __init__(self, segments: Iterable[Segment]) -> None:
        self._segments = {s.name: s for s in sorted(segments, key=lambda s: s.name)}

    def find(self, names: Sequence[str] | None) -> list[Segment]:
        """See `Library`; names are paths relative to the folder that was built."""
        if names is None:
            return list(self._segments.values())
        found: dict[int, str] = {}
        for name in names:
            for path in self._paths(name, set(found.values())):
                found[len(found)] = path
        return [self._segments[path] for path in found.values()]

    def _paths(self, name: str, taken: set[str]) -> list[str]:
        """What a name stands for; a glob leaves out what is taken already."""
        path = str(PurePosixPath(name))
        if path in self._segments:
            return [path]
        if is_glob(path):
            matching = [p for p in self._segments if matches(p.split("/"), path.split("/"))]
            if matching:
                return [p for p in matching if p not in taken]
            raise DocumentError(name, "no document of the cache matches.")
        raise DocumentError(name, f"no such document in the cache{self._nearest(path)}")

    def _nearest(self, path: str) -> str:
        same_name = [p for p in self._segments if PurePosixPath(p).name == PurePosixPath(path).name]
        return nearest(path, same_name or self._segments) or "."


class FolderLibrary:
    """Documents read from disk.

    Args:
        folder: what paths are relative to.
        tokenizer: cuts their text into tokens.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._segments: dict[str, Segment] = {}

    def find(self, names: Sequence[str] | None) -> list[Segment]:
        """See `Library`; names are paths relative to the folder, and there is no whole."""
        return [self._segment(path) for name in names or [] for path in self._paths(name)]

    def _paths(self, name: str) -> list[str]:
        if is_glob(name) and not (self._folder / name).exists():
            matching = sorted(p.relative_to(self._folder).as_posix() for p in self._glob(name) if p.is_file())
            if matching:
                return matching
            raise DocumentError(name, f"no file in {self._folder} matches.")
        return [str(PurePosixPath(name))]

    def _glob(self, name: str) -> list[Path]:
        try:
            return list(self._folder.glob(name))
        except (ValueError, NotImplementedError) as error:  # an absolute or malformed pattern
            raise DocumentError(name, f"cannot be used as a glob ({error}).") from None

    def _segment(self, path: str) -> Segment:
        if path not in self._segments:
            text = read_document(self._folder / path, path).text
            self._segments[path] = document_segment(self._tokenizer, path, text)
        return self._segments[path]


def is_glob(name: str) -> bool:
    """Whether a name holds `*`, `?` or `[`."""
    return any(c in name for c in "*?[")


def matches(path: Sequence[str], glob: Sequence[str]) -> bool:
    """Whether the parts of a path match those of a glob: `**` stands for any number of folders, `*` stays in one."""
    if not glob:
        return not path
    if glob[0] == "**":
        return any(matches(path[i:], glob[1:]) for i in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], glob[0]) and matches(path[1:], glob[1:])
