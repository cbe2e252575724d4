"""Clocks that stand still or go back: what a document says decides whether it has changed, never a time."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from lserve_tools.cli.main import main

HOUR = 3600 * 10**9


def build(docs: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    with pytest.raises(SystemExit) as left:
        main(["build-cache", str(docs), "--model", str(model), "-o", str(docs.parent / "cache"), "--json", "-q"])
    assert left.value.code == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("shift", [-HOUR, 0], ids=["goes back", "stands still"])
def test_a_changed_document_is_built_whatever_its_time(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    texts = {"a.md": "The ledger lies in the tower.\n", "b.md": "The tide is low at noon.\n"}
    for name, text in texts.items():
        (docs / name).write_text(text)
    assert build(docs, tiny_llama, capsys)["built"] == 2
    then = (docs / "a.md").stat().st_mtime_ns + shift
    (docs / "a.md").write_text(texts["a.md"].replace("tower", "vault"))  # as long as before
    for name in texts:
        os.utime(docs / name, ns=(then, then))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + shift / 1e9)
    second = build(docs, tiny_llama, capsys)
    assert (second["built"], second["unchanged"]) == (1, 1)
    assert build(docs, tiny_llama, capsys)["unchanged"] == 2
