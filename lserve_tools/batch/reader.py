"""Reading a batch file: every line becomes a request or an error that names its place; nothing is dropped."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lserve_tools.errors import UsageError
from lserve_tools.schema import BATCH_ALIASES, BatchLine

_KEYS = (*BatchLine.model_fields, *BATCH_ALIASES)
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be answered.

    Args:
        id: the line's own, or its number.
        message: begins with the line's place, such as `batch.jsonl:17: `.
    """

    id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Batch:
    """A whole batch file.

    Args:
        name: of the file, as messages give it.
        lines: the requests, by line number.
        bad: the other lines, in order.
    """

    name: str
    lines: dict[int, BatchLine]
    bad: list[BadLine]

    def fail(self, number: int, code: str, message: str) -> None:
        """Move line `number` to the bad ones."""
        line = self.lines.pop(number)
        self.bad.append(BadLine(line.id, code, f"{self.name}:{number}: {message}"))


def read_batch(path: Path) -> Batch:
    """Read and validate a whole file.

    Raises:
        UsageError: if the file cannot be read, holds no lines, or uses an id twice.
    """
    try:
        with path.open("rb") as file:
            return parse_batch(file, path.name)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}).", cure="Name a JSONL file.") from None


def parse_batch(raw_lines: Iterable[bytes], name: str) -> Batch:
    """Validate lines of JSON; blank ones are passed over.

    Raises:
        UsageError: if there is no line, or an id is used twice.
    """
    batch = Batch(name, {}, [])
    seen: dict[str, int] = {}
    for number, raw in enumerate(raw_lines, start=1):
        if number == 1:
            raw = raw.removeprefix(_BOM)
        if not raw.strip():
            continue
        line_id = _read_line(batch, number, raw)
        if line_id in seen:
            message = f"{name}:{number}: id {line_id!r} is used by line {seen[line_id]} already."
            raise UsageError(message, cure="Give every line an id of its own.")
        seen[line_id] = number
    if not seen:
        raise UsageError(f"{name}: holds no lines.", cure='A line is an object such as {"id": "1", "question": "…"}.')
    return batch


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the known word that comes closest, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _read_line(batch: Batch, number: int, raw: bytes) -> str:
    """Add one line to the batch; returns its id."""
    line_id = str(number)
    try:
        record = _parse_object(raw)
        line_id = _id_of(record, number)
        batch.lines[number] = _validate(record, line_id)
    except _LineError as error:
        batch.bad.append(BadLine(line_id, error.code, f"{batch.name}:{number}: {error}"))
    return line_id


class _LineError(Exception):
    """What is wrong with a line, without its place."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


def _parse_object(raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise _LineError("invalid_json", "half of a surrogate pair (\\ud800 …) is no text.") from None
    except UnicodeDecodeError as error:
        raise _LineError("invalid_json", f"not UTF-8 at byte {error.start + 1}.") from None
    except json.JSONDecodeError as error:
        raise _LineError("invalid_json", f"not JSON: {error.msg} at column {error.colno}.") from None
    except (RecursionError, ValueError):  # nested too deep, or a number of thousands of digits
        raise _LineError("invalid_json", "not JSON that can be read: nested too deep, or too long a number.") from None
    if not isinstance(record, dict):
        raise _LineError("invalid_json", f"a line must be an object, not {_kind(record)}.")
    return record


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in [k for k, _ in pairs[:i]])
        raise _LineError("duplicate_key", f"key {_shown(twice)} is given twice.")
    return record


def _id_of(record: dict[str, Any], number: int) -> str:
    """The line's id if it has a usable one, else its number."""
    given = record.get("id", record.get("custom_id"))
    if isinstance(given, int) and not isinstance(given, bool):
        return str(given)
    return given if isinstance(given, str) and given and given.isprintable() else str(number)


def _validate(record: dict[str, Any], line_id: str) -> BatchLine:
    if "body" in record:
        message = 'OpenAI lines (with "body") cannot be read yet; use {"id": …, "question": …, "documents": […]}.'
        raise _LineError("unsupported", message)
    fields = _rename(record)
    for key in ("documents", "answer", "stop"):
        if isinstance(fields.get(key), str):
            fields[key] = [fields[key]]
    given = fields.get("id")
    if given is not None and str(given) != line_id:
        raise _LineError("invalid_field", "'id' must be a text of printable characters.")
    fields["id"] = line_id
    try:
        line = BatchLine.model_validate(fields)
    except ValidationError as error:
        raise _LineError("invalid_field", _describe(error)) from None
    if not line.question.strip():
        raise _LineError("empty_question", "the question is empty.")
    if "" in (line.stop or ()):
        raise _LineError("invalid_field", "'stop' must not hold an empty string.")
    return line


def _rename(record: dict[str, Any]) -> dict[str, Any]:
    """The record under its proper keys."""
    fields: dict[str, Any] = {}
    for key, value in record.items():
        if key not in _KEYS:
            raise _LineError("unknown_key", f"unknown key {_shown(key)}{nearest(key, _KEYS)}")
        proper = BATCH_ALIASES.get(key, key)
        if proper in fields:
            raise _LineError("duplicate_key", f"{proper!r} is given twice under different names.")
        fields[proper] = value
    return fields


def _describe(error: ValidationError) -> str:
    """The first thing that is wrong, in words."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{place!r} is missing."
    return f"{place!r}: {first['msg'][0].lower()}{first['msg'][1:]}."


def _shown(key: str) -> str:
    """A key as it can be printed anywhere, lone surrogates and control characters escaped."""
    return ascii(key) if not key.isprintable() else repr(key)


def _kind(value: object) -> str:
    names = {list: "a list", str: "a text", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), "null")
