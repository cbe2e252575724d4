"""The text in which facts are planted: the user's, or some prose that comes with the package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from lserve_tools.text.documents import find_documents

BUILT_IN = "built-in"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text to plant facts in.

    Args:
        name: as the user gave it, or `built-in`.
    """

    name: str
    text: str

    @property
    def sha256(self) -> str:
        """Hex digest of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def load_corpus(path: Path | None) -> Corpus:
    """Read all documents of a folder, or one file, or the package's own text.

    Raises:
        UsageError: if the folder is missing or holds no text.
    """
    if path is None:
        return Corpus(BUILT_IN, files("lserve_tools.heads").joinpath("corpus.txt").read_text(encoding="utf-8"))
    documents, _ = find_documents(path)
    return Corpus(str(path), "\n\n".join(document.text for document in documents))
