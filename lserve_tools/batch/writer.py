"""Writing results, one line each, flushed: what is in the file survives whatever comes after."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal
from uuid import uuid4

from lserve_tools.errors import LServeError, UsageError
from lserve_tools.schema import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    LineFailure,
    PromptTokensDetails,
    ReadingAccount,
    ResultLine,
    ResultResponse,
    SimpleResultLine,
    TextChoice,
    TextCompletion,
    Usage,
)

if TYPE_CHECKING:
    from lserve_tools.engine.sequence import Completion

ResultFormat = Literal["openai", "simple", "text"]
STDOUT = Path("-")


def default_output(batch: Path) -> Path:
    """`<stem>.results.jsonl` beside the batch file; standard output for standard input."""
    return batch if batch == STDOUT else batch.with_name(f"{batch.stem}.results.jsonl")


def check_output(path: Path) -> None:
    """Refuse, before any work is done, an output that cannot be a file.

    Raises:
        UsageError: if it is a folder.
    """
    if path.is_dir():
        raise UsageError(f"{path}: is a folder.", cure="Name a file with -o.")


class ResultWriter:
    """Writes one line per request, in the order in which they come.

    Args:
        path: the file, or `-` for standard output; what is in it is replaced.
        model: its name, as results give it.
        result_format: `text` writes answers alone.
        kept: lines of an earlier run, which come first.

    Raises:
        UsageError: if the file cannot be written.
    """

    def __init__(self, path: Path, *, model: str, result_format: ResultFormat, kept: Iterable[bytes] = ()) -> None:
        self.path = path
        self._model = model
        self._format = result_format
        self._file = _open(path, kept)

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path != STDOUT:
            self._file.close()

    def write_answer(self, completion: Completion, account: ReadingAccount, *, raw: bool = False) -> None:
        """Write the answer of one line; `raw` is one without chat template."""
        if self._format == "text":
            self._write(completion.text)
        elif self._format == "simple":
            line = SimpleResultLine(
                id=completion.id,
                answer=completion.text,
                finish_reason=completion.finish_reason,
                completion_tokens=len(completion.token_ids),
                **dict(account),
            )
            self._write(line.model_dump_json())
        else:
            self._write(self._openai_line(completion, account, raw).model_dump_json())

    def write_failure(self, line_id: str, code: str, message: str) -> None:
        """Write why a line has no answer."""
        failure = LineFailure(code=code, message=message)
        if self._format == "simple":
            self._write(SimpleResultLine(id=line_id, error=failure).model_dump_json())
        elif self._format == "openai":
            line = ResultLine(id=f"batch_req_{uuid4().hex}", custom_id=line_id, error=failure)
            self._write(line.model_dump_json())

    def _openai_line(self, completion: Completion, account: ReadingAccount, raw: bool) -> ResultLine:
        name, reason = uuid4().hex, completion.finish_reason
        shared: dict[str, Any] = {
            "created": int(time.time()),
            "model": self._model,
            "usage": _usage(completion, account),
            "lserve": account,
        }
        body: ChatCompletion | TextCompletion
        if raw:
            choice = TextChoice(text=completion.text, finish_reason=reason)
            body = TextCompletion(id=f"cmpl-{name}", choices=[choice], **shared)
        else:
            message = ChatMessage(content=completion.text)
            body = ChatCompletion(
                id=f"chatcmpl-{name}", choices=[ChatChoice(message=message, finish_reason=reason)], **shared
            )
        response = ResultResponse(request_id=f"req_{name}", body=body)
        return ResultLine(id=f"batch_req_{name}", custom_id=completion.id, response=response)

    def _write(self, line: str) -> None:
        try:
            left = line.encode() + b"\n"
            while left:  # unbuffered: a nearly full disk takes a part
                left = left[self._file.write(left) :]
            self._file.flush()
        except OSError as error:
            cure = "What is in it stays; run again to go on." if self.path != STDOUT else ""
            raise LServeError(f"{self.path}: cannot be written ({error.strerror}).", cure=cure) from None


def _open(path: Path, kept: Iterable[bytes]) -> BinaryIO | FileIO:
    if path == STDOUT:
        return sys.stdout.buffer
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() or not path.exists():  # else a device or a pipe
            _replace(path.resolve(), b"".join(line + b"\n" for line in kept))
        return path.open("ab", buffering=0)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}).") from None


def _replace(path: Path, data: bytes) -> None:
    """Give a file other contents all at once: killed at any moment, either the old or the new ones are there."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _usage(completion: Completion, account: ReadingAccount) -> Usage:
    cached = account.tokens.exact + account.tokens.repaired
    written = len(completion.token_ids)
    return Usage(
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=written,
        total_tokens=completion.prompt_tokens + written,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )
