"""Environment variables: one table, the same in the README, and where things are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from lserve_tools import env

ROOT = Path(__file__).resolve().parents[1]


def test_readme_lists_every_variable() -> None:
    rows = [f"| `{v.name}` | {v.default} | {v.doc} |" for v in env.VARIABLES]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Environment variables\n")[2].partition("\n## ")[0]
    shown = [line for line in section.splitlines() if line.startswith("|")]
    assert shown[2:] == rows, "Put these rows, and no others, into README.md:\n" + "\n".join(rows)


def test_nothing_else_reads_our_variables() -> None:
    names = {v.name for v in env.VARIABLES}
    for path in (ROOT / "lserve_tools").rglob("*.py"):
        if path.name != "env.py":
            text = path.read_text(encoding="utf-8")
            assert not [n for n in names if f'"{n}"' in text], f"{path} names a variable; use lserve_tools.env"


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("LSERVE_HOME", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert env.home() == Path("~/.cache/huggingface/assets/lserve-tools").expanduser()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.home() == tmp_path / "huggingface/assets/lserve-tools"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert env.home() == tmp_path / "hf/assets/lserve-tools"
    monkeypatch.setenv("LSERVE_HOME", "~/models")
    assert env.home() == Path("~/models").expanduser()


@pytest.mark.parametrize(("value", "wanted"), [("", False), ("0", False), ("no", False), ("1", True), ("yes", True)])
def test_debug(monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool) -> None:
    monkeypatch.setenv("LSERVE_DEBUG", value)
    assert env.debug() is wanted
