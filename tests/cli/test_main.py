"""The command line as a whole: help, version, errors and exit codes."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import typer

from lserve_tools import __version__
from lserve_tools.cli import main as main_module
from lserve_tools.cli.errors import explain
from lserve_tools.cli.main import main
from lserve_tools.cli.options import parse_bytes, parse_device, parse_sparsity
from lserve_tools.errors import CacheError, UsageError


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lserve_tools", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make the command line fail with an exception, as if a command had raised it."""

    def fail_with(error: BaseException) -> None:
        app = typer.Typer(pretty_exceptions_enable=False)

        @app.command()
        def fails() -> None:
            raise error

        monkeypatch.setattr(main_module, "app", app)

    return fail_with


def test_version_goes_to_stdout() -> None:
    done = _run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"lserve-tools {__version__}\n", "")


def test_bare_command_shows_help_and_fails() -> None:
    done = _run()
    assert done.returncode == 2
    assert "Usage: lserve-tools" in done.stdout + done.stderr


def test_unknown_option_is_a_usage_error() -> None:
    done = _run("--modle", "demo")
    assert done.returncode == 2
    assert "--modle" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["", "profile-heads", "build-cache", "run", "env", "cache", "cache verify"])
def test_help_imports_neither_torch_nor_transformers(command: str) -> None:
    code = (
        "import sys\n"
        "from lserve_tools.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as left:\n"
        "    heavy = {'torch', 'transformers', 'triton', 'numpy', 'rich'} & set(sys.modules)\n"
        "    sys.exit(left.code or (f'imported {heavy}' if heavy else 0))\n"
    )
    arguments = [sys.executable, "-c", code, *command.split(), "--help"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: lserve-tools" in done.stdout


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (UsageError("No model was named.", cure="Try --model demo."), "No model was named. Try --model demo.", 2),
        (CacheError(".lserve/cache holds no cache."), ".lserve/cache holds no cache.", 1),
        (OSError(errno.ENOSPC, "No space left on device", "x.safetensors"), "x.safetensors: no space is left", 1),
        (PermissionError(errno.EACCES, "Permission denied", "/root"), "/root: permission denied", 1),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of GPU memory", 1),
        (MemoryError(), "out of CPU memory", 1),
    ],
)
def test_known_error_is_one_line(
    failing: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    line: str,
    code: int,
) -> None:
    failing(error)
    with pytest.raises(SystemExit) as left:
        main([])
    out, err = capsys.readouterr()
    assert left.value.code == code
    assert out == ""
    assert err.startswith(f"error: {line}")
    assert err.count("\n") == 1


def test_cpu_allocator_failure_is_known() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    failure = explain(raised.value)
    assert failure is not None
    assert failure.message.startswith("out of CPU memory")


def test_debug_shows_the_traceback(
    failing: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LSERVE_DEBUG", "1")
    failing(UsageError("No model was named."))
    with pytest.raises(SystemExit):
        main([])
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: No model was named.\n")


def test_interrupt_leaves_with_130(failing: Callable[[BaseException], None]) -> None:
    failing(KeyboardInterrupt())
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 130


def test_bug_keeps_its_traceback(failing: Callable[[BaseException], None]) -> None:
    failing(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        main([])


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("800M", 800 * 2**20), ("4GiB", 2**32), ("1.5 gb", 3 * 2**29), ("2t", 2**41)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "4 GiBs", "four", "1e9", "."])
def test_not_a_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no size"):
        parse_bytes(text)


@pytest.mark.parametrize("option", ["--temperature", "--top-p"])
def test_nan_is_no_number(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["run", "batch.jsonl", option, "nan"])
    assert left.value.code == 2
    assert f"Invalid value for '{option}'" in capsys.readouterr().err


def test_devices_and_sparsities() -> None:
    assert [parse_device(d) for d in ("auto", "cpu", "cuda", "cuda:12")] == ["auto", "cpu", "cuda", "cuda:12"]
    assert [parse_sparsity(s) for s in ("auto", "0", "0.5", "1")] == [None, 0.0, 0.5, 1.0]
    for device in ("gpu", "cuda:", "cuda:x", "CPU"):
        with pytest.raises(typer.BadParameter, match="is no device"):
            parse_device(device)
    for sparsity in ("", "half", "1.1", "-0.1", "nan"):
        with pytest.raises(typer.BadParameter, match="is no sparsity"):
            parse_sparsity(sparsity)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("lserve-tools ", {"profile-heads", "build-cache", "run", "cache", "bench", "env"}),
        ("lserve-tools cache ", {"ls", "stats", "verify", "prune"}),
        ("lserve-tools cache verify --re", {"--rebuild"}),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_complete_commands_and_options(shell: str, words: str, offered: set[str]) -> None:
    def complete(what: str) -> str:
        typed = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_TYPER_COMPLETE_ARGS": words}
        env = {**os.environ, **typed, "_LSERVE_TOOLS_COMPLETE": f"{what}_{shell}"}
        command = [sys.executable, "-m", "lserve_tools"]
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=True).stdout

    said = complete("complete")
    found = set(re.findall(r'"([^"]+)":', said)) if shell == "zsh" else set(said.split())
    assert found >= offered
    assert "lserve-tools" in complete("source")
