"""Twenty ways in which a line of a batch can be broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_USER = [{"role": "user", "content": "Who?"}]


def _line(**fields: Any) -> Callable[[int], Any]:
    return lambda place: {"id": f"q{place}", "question": "Who?", "documents": [], **fields}


def _chat(url: str = "/v1/chat/completions", **body: Any) -> Callable[[int], Any]:
    return lambda place: {"custom_id": f"q{place}", "method": "POST", "url": url, "body": {"messages": _USER, **body}}


def _bytes(text: str) -> Callable[[int], Any]:
    return lambda place: text.replace("ID", f"q{place}").encode("latin-1")


BROKEN: list[Callable[[int], Any]] = [
    _bytes('{"id": "ID", "question": "torn'),
    _bytes('{"id": "ID", "question": "na\xefve"}'),
    _bytes('["ID"]'),
    _bytes("null"),
    _bytes('{"id": "ID", "question": "a", "question": "b"}'),
    _bytes('{"id": "ID", "question": "\\ud800"}'),
    lambda place: ("[" * 20_000).encode(),
    _line(question="  "),
    _line(question=7),
    _line(docments="notes.txt"),
    _line(documents="notes.md"),
    _line(documents="nothing/*.md"),
    _line(documents=[3]),
    _line(max_tokens=0),
    _line(temperature=-1),
    _line(stop=[""]),
    _line(documents=None, context="far too long. " * 2000),
    _chat(n=2),
    _chat(url="/v1/embeddings"),
    _chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
]
