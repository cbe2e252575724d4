"""What README and recipes show can be typed: commands and options exist, batch lines are lines that `run` takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from lserve_tools.batch.reader import read_batch
from lserve_tools.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "recipes/README.md")
_COMMAND = re.compile(r"^(?:\$ )?(?:\S+=\S+ )*(?:\.venv/bin/)?lserve-tools (?P<rest>.*)$")


def fenced_lines(page: str) -> list[str]:
    """Lines of a page's fenced blocks."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def commands(page: str) -> list[str]:
    """What is shown after `lserve-tools`, in fenced blocks and between backticks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    shown = fenced_lines(page) + re.findall(r"`(lserve-tools [^`\n]+)`", prose)
    return [found["rest"] for line in shown if (found := _COMMAND.match(line))]


def parse(line: str) -> None:
    """Parse a command line without running it."""
    words = shlex.split(line, comments=True)
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no command {words[0]!r}: {line}"
        command = command.commands[words.pop(0)]
    if hasattr(command, "commands"):
        known = {name for parameter in command.params for name in parameter.opts}
        assert words, line
        assert set(words) <= known, line
    else:
        command.make_context("lserve-tools", words)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_is_shown_parses(page: str) -> None:
    shown = commands(page)
    assert shown
    for line in shown:
        parse(line)


def test_all_commands_are_shown_somewhere() -> None:
    shown = " ".join(f"lserve-tools {line}" for page in PAGES for line in commands(page))
    group: Any = typer.main.get_command(app)
    assert [name for name in group.commands if f"lserve-tools {name}" not in shown] == []
    cache = group.commands["cache"].commands
    assert [name for name in cache if f"cache {name}" not in shown] == []


@pytest.mark.parametrize("line", ["build-cache docs --cdec int8", "cache lst", "build-cache", "--instal-completion"])
def test_what_does_not_exist_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r"no command|No such option|Missing parameter|--instal"):
        parse(line)


def test_batch_lines_that_are_shown_are_taken(tmp_path: Path) -> None:
    lines = [line for line in fenced_lines("README.md") if line.startswith("{")]
    assert lines
    (tmp_path / "batch.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    batch = read_batch(tmp_path / "batch.jsonl")
    assert (len(batch.lines), batch.bad) == (len(lines), [])
