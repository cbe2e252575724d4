"""Reading a batch file: every line becomes a request or an error that names its place; nothing is dropped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from lserve_tools.batch.lines import LineError, parse_line
from lserve_tools.batch.question import Question
from lserve_tools.errors import UsageError

STDIN = Path("-")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be answered.

    Args:
        number: of the line.
        id: the line's own, or made of its number.
        message: begins with the line's place, such as `batch.jsonl:17: `.
    """

    number: int
    id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Batch:
    """A whole batch file.

    Args:
        name: of the file, as messages give it.
        lines: the questions, by line number.
        bad: the other lines, in order.
    """

    name: str
    lines: dict[int, Question]
    bad: list[BadLine]

    def place(self, number: int) -> str:
        """Where a line stands; number 0 is a question that stands in no file."""
        return f"{self.name}:{number}" if number else self.name

    def fail(self, number: int, code: str, message: str) -> None:
        """Move line `number` to the bad ones."""
        line = self.lines.pop(number)
        self.bad.append(BadLine(number, line.id, code, f"{self.place(number)}: {message}"))


def read_batch(path: Path) -> Batch:
    """Read and validate a whole file; `-` is standard input.

    Raises:
        UsageError: if the file cannot be read, changes meanwhile, holds no lines, or uses an id twice.
    """
    if path == STDIN:
        return parse_batch(sys.stdin.buffer.read().split(b"\n"), "stdin")
    try:
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            data = file.read()
            after = os.fstat(file.fileno())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}).", cure="Name a JSONL file.") from None
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
        raise UsageError(f"{path}: changed while it was read.", cure="Run again when it is complete.")
    return parse_batch(data.split(b"\n"), path.name)


def parse_batch(raw_lines: Iterable[bytes], name: str) -> Batch:
    """Validate lines of JSON; blank ones are passed over. A line without an id of its own gets its number.

    Raises:
        UsageError: if there is no line, or an id is used twice.
    """
    parsed: dict[int, Question | LineError] = {}
    owner: dict[str, int] = {}
    for number, raw in enumerate(raw_lines, start=1):
        raw = raw.removeprefix(_BOM) if number == 1 else raw
        if not raw.strip():
            continue
        parsed[number] = line = _parse(raw)
        if line.id and line.id in owner:
            message = f"{name}:{number}: id {line.id!r} is used by line {owner[line.id]} already."
            raise UsageError(message, cure="Give every line an id of its own.")
        if line.id:
            owner[line.id] = number
    if not parsed:
        raise UsageError(f"{name}: holds no lines.", cure='A line is an object such as {"id": "1", "question": "…"}.')
    batch = Batch(name, {}, [])
    for number, line in parsed.items():
        line_id = line.id or (str(number) if str(number) not in owner else f"line {number}")
        if isinstance(line, Question):
            batch.lines[number] = replace(line, id=line_id)
        else:
            batch.bad.append(BadLine(number, line_id, line.code, f"{batch.place(number)}: {line}"))
    return batch


def _parse(raw: bytes) -> Question | LineError:
    try:
        return parse_line(raw)
    except LineError as error:
        return error
