"""Writing results, one line each, flushed: what is in the file survives whatever comes after."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Literal
from uuid import uuid4

from pydantic import BaseModel

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
    Usage,
)

if TYPE_CHECKING:
    from lserve_tools.engine.sequence import Completion

ResultFormat = Literal["openai", "simple"]
STDOUT = Path("-")


def default_output(batch: Path) -> Path:
    """`<stem>.results.jsonl` beside the batch file."""
    return batch.with_name(f"{batch.stem}.results.jsonl")


def check_output(path: Path, overwrite: bool) -> None:
    """Refuse, before any work is done, an output that `ResultWriter` would refuse.

    Raises:
        UsageError: if the file exists and may not be replaced.
    """
    if path.is_dir():
        raise UsageError(f"{path}: is a folder.", cure="Name a file with -o.")
    if path != STDOUT and path.exists() and not overwrite:
        raise _exists(path)


class ResultWriter:
    """Writes one line per request, in the order in which they come.

    Args:
        path: the file, or `-` for standard output.
        model: its name, as results give it.
        overwrite: whether an existing file may be replaced.

    Raises:
        UsageError: if the file exists and may not be replaced, or cannot be created.
    """

    def __init__(self, path: Path, *, model: str, result_format: ResultFormat, overwrite: bool = False) -> None:
        self.path = path
        self._model = model
        self._format = result_format
        self._file = _open(path, overwrite)

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path != STDOUT:
            self._file.close()

    def write_answer(self, completion: Completion, account: ReadingAccount) -> None:
        """Write the answer of one line."""
        if self._format == "simple":
            self._write(
                SimpleResultLine(
                    id=completion.id,
                    answer=completion.text,
                    finish_reason=completion.finish_reason,
                    completion_tokens=len(completion.token_ids),
                    **dict(account),
                )
            )
            return
        name = uuid4().hex
        body = ChatCompletion(
            id=f"chatcmpl-{name}",
            created=int(time.time()),
            model=self._model,
            choices=[ChatChoice(message=ChatMessage(content=completion.text), finish_reason=completion.finish_reason)],
            usage=_usage(completion, account),
            lserve=account,
        )
        response = ResultResponse(request_id=f"req_{name}", body=body)
        self._write(ResultLine(id=f"batch_req_{name}", custom_id=completion.id, response=response))

    def write_failure(self, line_id: str, code: str, message: str) -> None:
        """Write why a line has no answer."""
        failure = LineFailure(code=code, message=message)
        if self._format == "simple":
            self._write(SimpleResultLine(id=line_id, error=failure))
        else:
            self._write(ResultLine(id=f"batch_req_{uuid4().hex}", custom_id=line_id, error=failure))

    def _write(self, line: BaseModel) -> None:
        try:
            self._file.write(line.model_dump_json().encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise LServeError(f"{self.path}: cannot be written ({error.strerror}).") from None


def _open(path: Path, overwrite: bool) -> IO[bytes]:
    if path == STDOUT:
        return sys.stdout.buffer
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb" if overwrite else "xb")
    except OSError as error:
        if path.is_file() and not overwrite:
            raise _exists(path) from None
        raise UsageError(f"{path}: cannot be written ({error.strerror}).") from None


def _exists(path: Path) -> UsageError:
    return UsageError(f"{path}: exists already.", cure="Name another file with -o, or replace it with --overwrite.")


def _usage(completion: Completion, account: ReadingAccount) -> Usage:
    cached = account.tokens.exact + account.tokens.repaired
    written = len(completion.token_ids)
    return Usage(
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=written,
        total_tokens=completion.prompt_tokens + written,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )
