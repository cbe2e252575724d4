"""Going on with a file of results: what in it is an answer of this very run is kept, everything else is asked again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lserve_tools.batch.plan import PlannedLine
from lserve_tools.batch.setup import Setup
from lserve_tools.batch.writer import STDOUT, ResultFormat
from lserve_tools.engine.llm import EngineOptions
from lserve_tools.engine.sampling import SamplingParams
from lserve_tools.engine.sequence import Request
from lserve_tools.errors import UsageError
from lserve_tools.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from lserve_tools.schema import ReadingAccount, ResultLine, SimpleResultLine
from lserve_tools.text.segments import Segment

_DIGEST_BYTES = 12
_ANOTHER = "Name another file with -o, or replace it with --overwrite."


class ResumeKeys:
    """Digests that tie an answer to what it was made of.

    Args:
        setup: model, head profile and cache; documents of the cache count where they stand in a prompt.
        options: of the engine.
        sampling: for what lines leave open.
    """

    def __init__(self, setup: Setup, options: EngineOptions, sampling: SamplingParams) -> None:
        profile, source = setup.profile, setup.source
        self.run = _digest(
            json.dumps(
                {
                    "model": model_fingerprint(setup.model.path),
                    "tokenizer": tokenizer_fingerprint(setup.model.path),
                    "dtype": setup.choice.dtype,
                    "heads": None if profile is None else [profile.retrieval.tolist(), profile.sink, profile.recent],
                    "cache": None if source is None else source.root_key.hex(),
                    "kv_cache_dtype": options.kv_cache_dtype,
                    "selection": [options.token_budget, options.reuse_interval, options.page_size],
                    "sampling": [options.seed, asdict(sampling)],
                }
            ).encode()
        )
        self._segments: dict[int, bytes] = {}

    def of(self, request: Request) -> str:
        """The key of a request's answer: the run's digest, a dot, and that of prompt and sampling."""
        prompt = b"".join(map(self._segment, request.segments)) + _ids(request.suffix_ids)
        sampling = json.dumps(asdict(request.sampling)).encode()
        return f"{self.run}.{_digest(prompt + sampling)}"

    def _segment(self, segment: Segment) -> bytes:
        """The digest of a segment, made once: many lines read the same."""
        if id(segment) not in self._segments:
            self._segments[id(segment)] = hashlib.blake2b(_ids(segment.token_ids)).digest()
        return self._segments[id(segment)]


@dataclass(frozen=True, slots=True)
class Finished:
    """What a file of results holds of this run.

    Args:
        kept: lines that need no second answer, by id, with their accounts.
        outdated: answers to other prompts: their lines or documents have changed.
    """

    kept: dict[str, tuple[bytes, ReadingAccount]]
    outdated: int


def read_finished(
    path: Path, planned: Iterable[PlannedLine], known: set[str], keys: ResumeKeys, form: ResultFormat
) -> Finished:
    """Read what an earlier run has answered; failed lines, and one that was cut short, are asked again.

    Args:
        path: of the file; it may be missing.
        planned: the lines that can be asked.
        known: ids of all lines of the batch.

    Raises:
        UsageError: if the file holds anything but results of this batch, model, cache and parameters.
    """
    if path == STDOUT or form == "text" or not path.is_file():
        return Finished({}, 0)
    wanted = {p.question.id: keys.of(p.request) for p in planned}
    kept: dict[str, tuple[bytes, ReadingAccount]] = {}
    outdated = 0
    for number, raw in enumerate(_read(path).split(b"\n")[:-1], start=1):  # a torn last line has no line end
        line_id, account = _parse(raw, f"{path}:{number}", form)
        if line_id not in known:
            raise UsageError(f"{path}:{number}: id {line_id!r} is no line of the batch.", cure=_ANOTHER)
        if account is None:
            continue
        if account.resume_key.partition(".")[0] != keys.run:
            what = "was answered with another model, cache, head profile or other options"
            raise UsageError(f"{path}:{number}: {line_id!r} {what}.", cure=_ANOTHER)
        if account.resume_key == wanted.get(line_id):
            kept[line_id] = raw, account
        else:
            outdated += 1
    return Finished(kept, outdated)


def _parse(raw: bytes, place: str, form: ResultFormat) -> tuple[str, ReadingAccount | None]:
    """Id and account of a line of results; no account if it has no answer."""
    try:
        if form == "openai":
            line = ResultLine.model_validate_json(raw)
            if line.response is None and line.error is None:
                raise ValueError
            return line.custom_id, line.response.body.lserve if line.response else None
        simple = SimpleResultLine.model_validate_json(raw)
        fields: dict[str, Any] = {name: getattr(simple, name) for name in ReadingAccount.model_fields}
        return simple.id, None if simple.error else ReadingAccount(**fields)
    except ValueError:  # pydantic's are of this kind
        other = "--format simple" if form == "openai" else "--format openai"
        raise UsageError(f"{place}: no result of this format ({other} is the other one).", cure=_ANOTHER) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}).", cure=_ANOTHER) from None


def _ids(token_ids: tuple[int, ...]) -> bytes:
    return np.asarray(token_ids, dtype="<u4").tobytes() + b"|"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
