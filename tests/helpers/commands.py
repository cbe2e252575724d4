"""The commands in processes of their own, and the files that they take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TEXTS = {
    "harbour.md": "".join(f"Berth {i} is signed by the harbour master before noon.\n" for i in range(60)),
    "code/total.py": "def total(rows):\n    return sum(rows)\n",
    "notes.txt": "The ledger lies in the tower.\n",
}


@dataclass(frozen=True)
class Command:
    """A command line and its environment."""

    line: list[str]
    environment: dict[str, str]


def command(*arguments: str | Path, **environment: str) -> Command:
    """How the command is started; keyword arguments are environment variables."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return Command([sys.executable, "-m", "lserve_tools", *map(str, arguments)], env)


def lserve(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own in `cwd`."""
    asked = command(*arguments, **environment)
    return subprocess.run(
        asked.line, cwd=cwd, env=asked.environment, capture_output=True, text=True, timeout=300, check=False
    )


def write_docs(folder: Path, texts: dict[str, str] = TEXTS) -> Path:
    """Write documents below a folder."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def write_batch(path: Path, *lines: dict[str, Any] | str) -> Path:
    """Write a batch file."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def results(path: Path) -> dict[str, dict[str, Any]]:
    """Results in the simple format, by id."""
    return {line["id"]: line for line in map(json.loads, path.read_text().splitlines())}
