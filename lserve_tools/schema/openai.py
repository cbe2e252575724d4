"""OpenAI's wire: the bodies of batch lines, and the answers to them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from lserve_tools.schema.batch import LineFailure, ReadingAccount

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(_as_list)]


class TextPart(BaseModel):
    """A part of a message; only text can be read."""

    model_config = _STRICT

    type: Literal["text"]
    text: str


class ChatTurn(BaseModel):
    """A message of a request."""

    model_config = _STRICT

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """Its content, parts joined by line ends."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class LServeBody(BaseModel):
    """What is asked beyond OpenAI's API, under `body.lserve`; the keys mean what they mean in `BatchLine`."""

    model_config = _STRICT

    documents: Texts | None = None
    context: str | None = None
    answer: Texts | None = None


class _Body(BaseModel):
    """What both kinds of bodies share."""

    model_config = _STRICT

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = None
    stop: Texts | None = None
    lserve: LServeBody = LServeBody()


class ChatBody(_Body):
    """The body of a line for `/v1/chat/completions`."""

    messages: list[ChatTurn] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)


class CompletionBody(_Body):
    """The body of a line for `/v1/completions`: a prompt without chat template."""

    prompt: str


class PromptTokensDetails(BaseModel):
    """OpenAI's place for cache hits."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatMessage(BaseModel):
    """The message of an answer."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """The one choice of an answer."""

    index: Literal[0] = 0
    message: ChatMessage
    finish_reason: str


class ChatCompletion(BaseModel):
    """An answer as OpenAI's API gives it, with `lserve` added."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    lserve: ReadingAccount


class TextChoice(BaseModel):
    """The one choice of an answer to a raw prompt."""

    index: Literal[0] = 0
    text: str
    finish_reason: str


class TextCompletion(BaseModel):
    """The answer to a raw prompt, with `lserve` added."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    lserve: ReadingAccount


class ResultResponse(BaseModel):
    """The response of an answered line."""

    status_code: Literal[200] = 200
    request_id: str
    body: ChatCompletion | TextCompletion


class ResultLine(BaseModel):
    """One line of `run`'s output as OpenAI's batches have it: either `response` or `error`."""

    model_config = ConfigDict(extra="forbid")

    id: str
    custom_id: str
    response: ResultResponse | None = None
    error: LineFailure | None = None
