from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lserve_tools.batch.question import Question
from lserve_tools.batch.reader import Batch, parse_batch, read_batch
from lserve_tools.errors import UsageError
from lserve_tools.text.prompts import Turn


def parse(*lines: str | bytes | dict[str, Any]) -> Batch:
    raw = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
    return parse_batch([line.encode() if isinstance(line, str) else line for line in raw], "batch.jsonl")


def test_a_full_line_is_read() -> None:
    documents, answer = ["a.md", "b/*.md"], ["x", "y"]
    full = {"id": "a", "question": "Who?", "documents": documents, "system": "Be brief.", "answer": answer}
    (line,) = parse({**full, "max_tokens": 5, "temperature": 0.5, "top_p": 1, "seed": 7, "stop": "\n"}).lines.values()
    assert line == Question(
        id="a",
        text="Who?",
        documents=("a.md", "b/*.md"),
        system="Be brief.",
        answer=("x", "y"),
        max_tokens=5,
        temperature=0.5,
        top_p=1,
        seed=7,
        stop=("\n",),
    )


@pytest.mark.parametrize("key", ["question", "prompt", "input"])
def test_other_spellings_and_single_values_are_taken(key: str) -> None:
    (line,) = parse({"custom_id": "a", key: "Who?", "document": "a.md", "answer": "x"}).lines.values()
    assert (line.id, line.text, line.documents, line.answer) == ("a", "Who?", ("a.md",), ("x",))


def test_ids_may_be_numbers_or_missing() -> None:
    batch = parse({"id": 12, "question": "a"}, "", {"question": "b"}, {"id": None, "question": "c"})
    assert [line.id for line in batch.lines.values()] == ["12", "3", "4"]
    assert list(batch.lines) == [1, 3, 4]


@pytest.mark.parametrize(
    ("line", "code", "expected"),
    [
        ('{"id": "x", ', "invalid_json", "not JSON: "),
        ("[1]", "invalid_json", "a line must be an object, not a list."),
        ("null", "invalid_json", "a line must be an object, not null."),
        (b'{"question": "na\xefve"}', "invalid_json", "not UTF-8 at byte 17."),
        ("[" * 100_000, "invalid_json", "nested too deep"),
        ('{"question": "a", "seed": ' + "9" * 5000 + "}", "invalid_json", "too long a number"),
        (
            {"id": "x", "question": "a", "docments": ["a"]},
            "unknown_key",
            "'docments'; did you mean 'documents'?",
        ),
        ({"id": "x", "question": "a", "zzz": 1}, "unknown_key", "unknown key 'zzz'"),
        (
            {"id": "x", "question": "a", "prompt": "b"},
            "duplicate_key",
            "'question' is given twice under",
        ),
        ('{"question": "a", "question": "b"}', "duplicate_key", "key 'question' is given twice."),
        ({"id": "x"}, "invalid_field", "'question' is missing."),
        ({"id": "x", "question": " \n"}, "empty_question", "the question is empty."),
        ({"id": "x", "question": 7}, "invalid_field", "'question': input should be a valid string."),
        ({"id": "x", "question": "a", "max_tokens": 0}, "invalid_field", "'max_tokens': input should be greater than"),
        (
            {"id": "x", "question": "a", "max_tokens": "12"},
            "invalid_field",
            "input should be a valid integer.",
        ),
        ({"id": "x", "question": "a", "max_tokens": True}, "invalid_field", "'max_tokens'"),
        ('{"question": "a", "temperature": NaN}', "invalid_field", "'temperature'"),
        ({"id": "x", "question": "a", "top_p": 0}, "invalid_field", "'top_p'"),
        ({"id": "x", "question": "a", "documents": [1]}, "invalid_field", "'documents.0'"),
        ({"id": "x", "question": "a", "stop": ["", "b"]}, "invalid_field", "'stop' must not hold an empty string."),
        ({"id": "", "question": "a"}, "invalid_field", "'id' must be"),
        ({"id": "a\nb", "question": "a"}, "invalid_field", "'id' must be"),
        ({"id": ["a"], "question": "a"}, "invalid_field", "'id' must be"),
        ('{"question": "lone \\ud800"}', "invalid_json", "surrogate"),
    ],
)
def test_a_bad_line_says_where_and_why_and_spares_the_others(line: Any, code: str, expected: str) -> None:
    batch = parse({"id": "good", "question": "a"}, line)
    assert list(batch.lines) == [1]
    (bad,) = batch.bad
    assert bad.code == code
    assert bad.message.startswith("batch.jsonl:2: ")
    assert expected in bad.message
    assert "\n" not in bad.message
    bad.message.encode("utf-8")


USER = {"role": "user", "content": "Who?"}


def chat(**body: Any) -> dict[str, Any]:
    return {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [USER], **body}}


def test_openai_lines_are_read() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "When?"}, {"type": "text", "text": "Where?"}]}
    turns = [{"role": "developer", "content": "Be brief."}, USER, {"role": "assistant", "content": "He."}, parts]
    unused = {"n": 1, "stream": False, "tools": None, "user": "me", "metadata": {"a": "b"}, "presence_penalty": 0.0}
    body = {"model": "demo", "messages": turns, "max_completion_tokens": 5, "stop": "x", **unused}
    extra = {"lserve": {"documents": "a.md", "context": "c", "answer": ["y"]}}
    raw = {"custom_id": "r", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 3, "temperature": 1}}
    first, second = parse({**chat(), "body": {**body, **extra}}, raw).lines.values()
    assert first == Question(
        id="x",
        text="When?\nWhere?",
        earlier=(Turn("user", "Who?"), Turn("assistant", "He.")),
        documents=("a.md",),
        context="c",
        system="Be brief.",
        answer=("y",),
        model="demo",
        max_tokens=5,
        stop=("x",),
    )
    assert second == Question("r", "Once", raw=True, max_tokens=3, temperature=1)


@pytest.mark.parametrize(
    ("line", "code", "expected"),
    [
        (chat(n=2), "unsupported", "'body.n' is not supported with this value; leave it out."),
        (chat(stream=True), "unsupported", "'body.stream'"),
        (chat(tools=[{"type": "function"}]), "unsupported", "'body.tools'"),
        (chat(response_format={"type": "json_object"}), "unsupported", "'body.response_format'"),
        (chat(logprobs=True), "unsupported", "'body.logprobs'"),
        (chat(temprature=1), "unknown_key", "'body.temprature'; did you mean 'temperature'?"),
        (chat(lserve={"document": "a"}), "invalid_field", "'body.lserve.document'"),
        (chat(max_tokens=1, max_completion_tokens=2), "invalid_field", "differ"),
        (chat(messages=[]), "invalid_field", "'body.messages'"),
        (chat(messages=[{"role": "assistant", "content": "a"}]), "invalid_field", "the last one must be the user's"),
        (chat(messages=[USER, {"role": "system", "content": "a"}, USER]), "unsupported", "only the first one"),
        (chat(messages=[{"role": "tool", "content": "a"}]), "invalid_field", "'body.messages.0.role'"),
        (chat(messages=[{"role": "system", "content": "a"}]), "invalid_field", "the last one must be the user's"),
        (
            chat(messages=[{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]),
            "invalid_field",
            "'body.messages.0.content",
        ),
        (chat(messages=[{"role": "user", "content": ""}]), "empty_question", "empty"),
        ({**chat(), "url": "/v1/embeddings"}, "unsupported", "'url' must be /v1/chat/completions or"),
        ({**chat(), "method": "GET"}, "invalid_field", "'method' must be POST."),
        ({**chat(), "bodyy": 1}, "unknown_key", "'bodyy'; did you mean 'body'?"),
        ({**chat(), "body": []}, "invalid_field", "'body' must be an object, not a list."),
        ({"custom_id": "x", "url": "/v1/completions", "body": {}}, "invalid_field", "'body.prompt' is missing."),
        ({"custom_id": "x", "url": "/v1/completions", "body": {"prompt": ["a"]}}, "invalid_field", "'body.prompt'"),
    ],
)
def test_what_an_openai_line_asks_and_cannot_have_is_named(line: Any, code: str, expected: str) -> None:
    (bad,) = parse(line).bad
    assert (bad.id, bad.code) == ("x", code)
    assert bad.message.startswith("batch.jsonl:1: ")
    assert expected in bad.message


def test_a_number_that_another_line_has_for_its_id_is_not_given_twice() -> None:
    batch = parse("torn", {"id": "1", "question": "a"}, {"question": "b"})
    assert [bad.id for bad in batch.bad] == ["line 1"]
    assert [question.id for question in batch.lines.values()] == ["1", "3"]


def test_a_bad_line_keeps_its_id_where_it_can_be_read() -> None:
    batch = parse({"id": "mine", "question": ""}, '{"id": "torn')
    assert [bad.id for bad in batch.bad] == ["mine", "2"]


@pytest.mark.parametrize("second", [{"id": "a", "question": "b"}, {"custom_id": "a", "question": ""}])
def test_an_id_used_twice_stops_everything(second: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"batch.jsonl:3: id 'a' is used by line 1 already"):
        parse({"id": "a", "question": "a"}, "", second)


@pytest.mark.parametrize("lines", [[], ["", "  \n"]])
def test_a_file_without_lines_is_refused(lines: list[str]) -> None:
    with pytest.raises(UsageError, match="holds no lines"):
        parse(*lines)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none.jsonl: cannot be read \(No such file"):
        read_batch(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="cannot be read"):
        read_batch(tmp_path)


def test_a_byte_order_mark_and_crlf_are_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "a"}\r\n{"question": "b"}\r\n')
    assert [line.text for line in read_batch(path).lines.values()] == ["a", "b"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*"ab", "id", "question", "stop"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=60), _JSON.map(lambda value: json.dumps(value).encode())))
def test_any_line_gives_a_request_or_an_error(raw: bytes) -> None:
    raw = raw.replace(b"\n", b" ")
    batch = parse_batch([b'{"id": "first", "question": "a"}', raw], "b")
    assert len(batch.lines) + len(batch.bad) == (2 if raw.strip() else 1)
    for bad in batch.bad:
        assert bad.message.startswith("b:2: ")
