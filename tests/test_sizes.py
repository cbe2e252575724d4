"""Files and functions stay small enough to be read at once."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("lserve_tools", "kernels", "tests", "recipes")
FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 300, 40, 120


def _too_long(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT)
    found = [f"{name} has {lines} lines"] if (lines := len(text.splitlines())) > FILE_LINES else []
    allowed = KERNEL_LINES if path.name == "kernel.py" else FUNCTION_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # Counted from the body, so that neither a long list of options nor a docstring counts.
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            if lines > allowed:
                found.append(f"{name}:{node.lineno} {node.name} has {lines} lines")
    return found


def test_files_and_functions_are_short() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 50
    assert not [problem for path in paths for problem in _too_long(path)]
