"""What the benchmarks print."""

from __future__ import annotations

from pydantic import BaseModel


class BenchContender(BaseModel):
    """One way of answering the questions; seconds, and bytes of resident memory at most.

    `seconds` is for the whole batch, `first_token_seconds` the median over single questions, `token_ids` the answers.
    """

    name: str
    seconds: float
    first_token_seconds: float
    peak_bytes: int | None
    token_ids: list[list[int]]


class BenchQa(BaseModel):
    """What `bench qa` measured; `contenders` are transformers in two ways, then this engine.

    `next_tokens` are those of the first contender's answers; `next_tokens_agreeing` of them are the engine's choice
    too, after the same tokens before them.
    """

    model: str
    dtype: str
    threads: int
    prompt_tokens: float
    questions: int
    contenders: list[BenchContender]
    build_seconds: float
    bytes_on_disk: int
    one_question_seconds: float
    sixteen_questions_seconds: float
    next_tokens: int
    next_tokens_agreeing: int
