"""Reading one line of a batch: the short form or OpenAI's, told apart by `body`, into a question or an error."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lserve_tools.batch.question import Question
from lserve_tools.schema import (
    BATCH_ALIASES,
    CHAT_URL,
    COMPLETION_URL,
    BatchLine,
    ChatBody,
    CompletionBody,
)
from lserve_tools.text.prompts import Turn

_KEYS = (*BatchLine.model_fields, *BATCH_ALIASES)
_OPENAI_KEYS = ("custom_id", "id", "method", "url", "body")
# Of a request that asks for nothing that cannot be done; another value is an error, since it would shape the answer.
_NEUTRAL: dict[str, Any] = {
    "n": 1, "best_of": 1, "stream": False, "echo": False, "suffix": "", "logprobs": False, "top_logprobs": 0,
    "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "tools": [], "tool_choice": "none",
    "functions": [], "function_call": "none", "response_format": {"type": "text"}, "modalities": ["text"],
}  # fmt: skip
_WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_Body = TypeVar("_Body", bound=BaseModel)


class LineError(Exception):
    """What is wrong with a line, without its place; `id` is the line's own, or empty."""

    def __init__(self, code: str, message: str) -> None:
        self.code, self.id = code, ""
        super().__init__(message)


def parse_line(raw: bytes) -> Question:
    """The question of a line; its id is empty if the line has none.

    Raises:
        LineError: if it is none.
    """
    line_id = ""
    try:
        record = _parse_object(raw)
        line_id = _id_of(record)
        question = _from_openai(record, line_id) if "body" in record else _from_short(record, line_id)
        if not question.text.strip():
            raise LineError("empty_question", "the question is empty.")
        if "" in (question.stop or ()):
            raise LineError("invalid_field", "'stop' must not hold an empty string.")
        return question
    except LineError as error:
        error.id = line_id
        raise


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the known word that comes closest, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _parse_object(raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise LineError("invalid_json", "half of a surrogate pair (\\ud800 …) is no text.") from None
    except UnicodeDecodeError as error:
        raise LineError("invalid_json", f"not UTF-8 at byte {error.start + 1}.") from None
    except json.JSONDecodeError as error:
        raise LineError("invalid_json", f"not JSON: {error.msg} at column {error.colno}.") from None
    except (RecursionError, ValueError):  # nested too deep, or a number of thousands of digits
        raise LineError("invalid_json", "not JSON that can be read: nested too deep, or too long a number.") from None
    if not isinstance(record, dict):
        raise LineError("invalid_json", f"a line must be an object, not {_kind(record)}.")
    return record


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in [k for k, _ in pairs[:i]])
        raise LineError("duplicate_key", f"key {_shown(twice)} is given twice.")
    return record


def _id_of(record: dict[str, Any]) -> str:
    """The line's own id, or nothing if it has none."""
    key = "id" if "id" in record else "custom_id"
    given = record.get(key)
    if given is None:
        return ""
    shown = str(given) if isinstance(given, str | int) and not isinstance(given, bool) else ""
    if not shown or not shown.isprintable():
        raise LineError("invalid_field", f"{key!r} must be a text of printable characters.")
    return shown


def _from_short(record: dict[str, Any], line_id: str) -> Question:
    fields = _rename(record)
    fields.pop("id", None)
    for key in ("documents", "answer", "stop"):
        if isinstance(fields.get(key), str):
            fields[key] = [fields[key]]
    line = _validate(BatchLine, fields)
    return Question(
        id=line_id,
        text=line.question,
        documents=_tuple(line.documents),
        context=line.context,
        system=line.system,
        answer=_tuple(line.answer),
        max_tokens=line.max_tokens,
        temperature=line.temperature,
        top_p=line.top_p,
        seed=line.seed,
        stop=_tuple(line.stop),
    )


def _rename(record: dict[str, Any]) -> dict[str, Any]:
    """The record under its proper keys."""
    fields: dict[str, Any] = {}
    for key, value in record.items():
        if key not in _KEYS:
            raise LineError("unknown_key", f"unknown key {_shown(key)}{nearest(key, _KEYS)}")
        proper = BATCH_ALIASES.get(key, key)
        if proper in fields:
            raise LineError("duplicate_key", f"{proper!r} is given twice under different names.")
        fields[proper] = value
    return fields


def _from_openai(record: dict[str, Any], line_id: str) -> Question:
    for key in record:
        if key not in _OPENAI_KEYS:
            raise LineError("unknown_key", f"unknown key {_shown(key)}{nearest(key, _OPENAI_KEYS)}")
    if record.get("method", "POST") != "POST":
        raise LineError("invalid_field", "'method' must be POST.")
    body = record["body"]
    if not isinstance(body, dict):
        raise LineError("invalid_field", f"'body' must be an object, not {_kind(body)}.")
    match record.get("url"):
        case url if url == CHAT_URL:
            return _from_chat(_validate(ChatBody, _supported(body, ChatBody), "body"), line_id)
        case url if url == COMPLETION_URL:
            return _from_completion(_validate(CompletionBody, _supported(body, CompletionBody), "body"), line_id)
        case _:
            raise LineError("unsupported", f"'url' must be {CHAT_URL} or {COMPLETION_URL}.")


def _supported(body: dict[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """What of a body shapes the answer; what asks for something that cannot be done is an error."""
    fields: dict[str, Any] = {}
    for key, value in body.items():
        if value is None or key in _WITHOUT_EFFECT:
            continue
        if key in kind.model_fields:
            fields[key] = value
        elif key not in _NEUTRAL:
            known = [*kind.model_fields, *_NEUTRAL]
            raise LineError("unknown_key", f"unknown key {_shown('body.' + key)}{nearest(key, known)}")
        elif value != _NEUTRAL[key]:
            raise LineError("unsupported", f"'body.{key}' is not supported with this value; leave it out.")
    return fields


def _from_chat(body: ChatBody, line_id: str) -> Question:
    turns = [Turn("system" if t.role == "developer" else t.role, t.text) for t in body.messages]
    system = turns.pop(0).text if turns[0].role == "system" else None
    if any(turn.role == "system" for turn in turns):
        raise LineError("unsupported", "'body.messages': only the first one may be a system message.")
    if not turns or turns[-1].role != "user":
        raise LineError("invalid_field", "'body.messages': the last one must be the user's.")
    most = [n for n in (body.max_tokens, body.max_completion_tokens) if n is not None]
    if len(set(most)) > 1:
        raise LineError("invalid_field", "'body.max_tokens' and 'body.max_completion_tokens' differ.")
    return Question(
        line_id, turns[-1].text, tuple(turns[:-1]), system=system, max_tokens=next(iter(most), None), **_shared(body)
    )


def _from_completion(body: CompletionBody, line_id: str) -> Question:
    return Question(line_id, body.prompt, raw=True, max_tokens=body.max_tokens, **_shared(body))


def _shared(body: ChatBody | CompletionBody) -> dict[str, Any]:
    """Fields of a question that both kinds of bodies give."""
    extra = body.lserve
    return {
        "documents": _tuple(extra.documents),
        "context": extra.context,
        "answer": _tuple(extra.answer),
        "model": body.model,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "seed": body.seed,
        "stop": _tuple(body.stop),
    }


def _validate(kind: type[_Body], fields: dict[str, Any], inside: str = "") -> _Body:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise LineError("invalid_field", _describe(error, inside)) from None


def _describe(error: ValidationError, inside: str) -> str:
    """The first thing that is wrong, in words."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    kinds = (".str", ".list[TextPart]")  # a union's branches, which pydantic adds to the place
    place = ".".join(str(part) for part in (inside, *first["loc"]) if part != "")
    for kind in kinds:
        place = place.replace(kind, "")
    if first["type"] == "missing":
        return f"{place!r} is missing."
    return f"{place!r}: {first['msg'][0].lower()}{first['msg'][1:]}."


def _tuple(values: list[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)


def _shown(key: str) -> str:
    """A key as it can be printed anywhere, lone surrogates and control characters escaped."""
    return ascii(key) if not key.isprintable() else repr(key)


def _kind(value: object) -> str:
    names = {list: "a list", str: "a text", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), "null")
