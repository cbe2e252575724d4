"""The command `env`: what a bug report needs, whatever is broken, and no secret."""

from __future__ import annotations

import json
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lserve_tools import env
from lserve_tools.cli.main import main
from tests.helpers.stored import TinyDocument, build, tiny_manifest


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    with pytest.raises(SystemExit) as left:
        main(["env", "--json"])
    assert left.value.code == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_versions_and_settings_are_there_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("LSERVE_MODEL", "demo")
    with pytest.raises(SystemExit):
        main(["env"])
    shown = capsys.readouterr().out
    assert "hf_secret" not in shown
    for line in ("HF_TOKEN", "none in .lserve/cache", torch.__version__):
        assert line in shown
    found = report(capsys)
    assert "hf_secret" not in json.dumps(found)
    variables = found["variables"]
    assert isinstance(variables, dict)
    assert (variables["HF_TOKEN"], variables["LSERVE_MODEL"], variables["LSERVE_DEBUG"]) == ("set", "demo", None)
    assert {v.name for v in env.VARIABLES} <= variables.keys()


def test_what_is_missing_or_broken_is_told_in_its_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = import_module

    def break_torch(name: str) -> ModuleType:
        if name in ("torch", "zstandard", "psutil"):
            raise OSError("libtorch.so: cannot open shared object file\nand more")
        return whole(name)

    def lose_triton(name: str) -> str:
        if name == "triton":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("lserve_tools.cli.env.import_module", break_torch)
    monkeypatch.setattr("lserve_tools.cli.env.metadata.version", lose_triton)
    found = report(capsys)
    packages = found["packages"]
    assert isinstance(packages, dict)
    assert packages["torch"] == "1.0, broken (libtorch.so: cannot open shared object file)"
    assert packages["triton"] == "missing"
    assert (found["threads"], found["kernels"]) == (None, "no: torch cannot be imported")


def test_the_cache_in_its_place_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path / ".lserve" / "cache", tiny_manifest(), TinyDocument("a.md", (30,)))
    assert str(report(capsys)["cache"]).startswith(".lserve/cache: 1 documents, ")
    (tmp_path / ".lserve" / "cache" / "manifest.json").write_text("{")
    assert "is damaged" in str(report(capsys)["cache"])
