"""stdout is data, stderr is talk."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest
from pydantic import BaseModel

from lserve_tools.cli.output import Output, print_data
from lserve_tools.errors import UsageError

ROWS = [("lines", "3"), ("peak memory", "12 MB")]


class _Summary(BaseModel):
    lines: int = 3


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(name, "")  # so that what `start` sets is undone afterwards
        monkeypatch.delenv(name)


def test_rows_are_aligned_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    Output.start().result(_Summary(), ROWS)
    assert capsys.readouterr() == ("lines        3\npeak memory  12 MB\n", "")


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output.start(as_json=True)
    out.talk("reading")
    out.result(_Summary(), ROWS)
    stdout, stderr = capsys.readouterr()
    assert json.loads(stdout) == {"lines": 3}
    assert stderr == "reading\n"


def test_quiet_says_nothing_but_json(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output.start(quiet=True)
    out.talk("reading")
    out.detail("a.md")
    out.result(_Summary(), ROWS)
    assert capsys.readouterr() == ("", "")
    Output.start(quiet=True, as_json=True).result(_Summary(), ROWS)
    assert json.loads(capsys.readouterr().out) == {"lines": 3}


def test_verbose_says_more(capsys: pytest.CaptureFixture[str]) -> None:
    Output.start().detail("hidden")
    Output.start(verbose=True).detail("shown")
    assert capsys.readouterr() == ("", "shown\n")


def test_quiet_and_verbose_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        Output.start(quiet=True, verbose=True)


@pytest.mark.parametrize(("name", "level"), [("debug", logging.DEBUG), ("ERROR", logging.ERROR)])
def test_log_level(monkeypatch: pytest.MonkeyPatch, name: str, level: int) -> None:
    monkeypatch.setenv("LSERVE_LOG_LEVEL", name)
    Output.start()
    Output.start()
    logger = logging.getLogger("lserve_tools")
    assert logger.level == level
    assert [type(h) for h in logger.handlers].count(logging.StreamHandler) == 1


def test_unknown_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSERVE_LOG_LEVEL", "loud")
    with pytest.raises(UsageError, match=r"LSERVE_LOG_LEVEL=loud is no level\. It is one of debug"):
        Output.start()


def test_names_that_the_terminal_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    print_data("caf\u00e9 \udcff")
    assert raw.getvalue() == b"caf\\xe9 \\udcff\n"
