"""Prompts as token ids: prefix | document … document | suffix, cut out of the model's chat template once.

The template is rendered with marks where documents and question go, and cut at the marks. All parts are tokenized on
their own, so that the ids of one never depend on its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from jinja2 import TemplateError

from lserve_tools.errors import ModelError
from lserve_tools.text.chunking import cut_chunks
from lserve_tools.text.segments import Segment
from lserve_tools.text.tokenizer import Tokenizer, encode

PREFIX = "prefix"
_DOCUMENTS, _QUESTION = "@@lserve-documents@@", "@@lserve-question@@"
_TURN = "@@lserve-turn-{}@@"
_PLAIN_TURNS = {"user": "\n\nQuestion: ", "assistant": "\nAnswer: "}


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    text: str


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """The fixed parts of every prompt of one model and system text.

    Args:
        prefix_text: all before the first document.
        prefix_ids: its tokens.
        lead: text between the last document and the question.
        tail: text behind the question that opens the answer.
        system: the system text that was asked for; None is the template's own.
        system_in_user: the template takes no system role, so its text stands before the documents.
        raw: there is no template: the question is the prompt, and special tokens written in it are meant.
    """

    prefix_text: str
    prefix_ids: tuple[int, ...]
    lead: str
    tail: str
    system: str | None
    system_in_user: bool
    tokenizer: Tokenizer = field(repr=False, compare=False)
    raw: bool = False

    def prefix_segment(self) -> Segment:
        """The prefix as the engine takes it."""
        return Segment.of(PREFIX, self.prefix_ids)

    def suffix_ids(self, question: str, earlier: Sequence[Turn] = ()) -> tuple[int, ...]:
        """Tokens of the question and of what opens the answer.

        Args:
            earlier: turns before the question; documents stand before the first of them.

        Raises:
            ModelError: if the chat template does not take these turns.
        """
        between, texts = [self.lead, self.tail], [question]
        if earlier:
            between, texts = self._conversation([*earlier, Turn("user", question)])
        ids = encode(self.tokenizer, between[0] + texts[0], plain=not self.raw)
        for gap, text in zip(between[1:-1], texts[1:], strict=True):
            ids += encode(self.tokenizer, gap, plain=False) + encode(self.tokenizer, text, plain=True)
        return ids + encode(self.tokenizer, between[-1], plain=False)

    def _conversation(self, turns: list[Turn]) -> tuple[list[str], list[str]]:
        """What stands before, between and behind the turns' texts, and these texts."""
        texts = [turn.text for turn in turns]
        if not self.tokenizer.chat_template:
            return [self.lead, *(_PLAIN_TURNS[turn.role] for turn in turns[1:]), self.tail], texts
        marks = [_TURN.format(i) for i in range(len(turns))]
        marked = [(turn.role, mark) for turn, mark in zip(turns, marks, strict=True)]
        opening = f"{self.system}\n\n" if self.system_in_user else ""
        marked[0] = (marked[0][0], opening + _DOCUMENTS + marks[0])
        rendered = _render(self.tokenizer, None if self.system_in_user else self.system, marked) or ""
        pieces = re.split("|".join(map(re.escape, marks)), rendered.partition(_DOCUMENTS)[2])
        if turns[0].role != "user" or re.findall(_TURN.format(r"\d+"), rendered) != marks:
            raise ModelError("the model's chat template does not take these messages in this order.")
        return pieces, texts


def render_prompt_format(tokenizer: Tokenizer, system: str | None = None) -> PromptFormat:
    """Cut the tokenizer's chat template into prefix and suffix; without a template, use a plain form.

    Raises:
        ModelError: if the template does not put the user's text into the prompt once, as it is.
    """
    if not tokenizer.chat_template:
        return _plain_format(tokenizer, system)
    system_in_user = False
    rendered = _render(tokenizer, system, [("user", _DOCUMENTS + _QUESTION)])
    if system is not None and (rendered is None or system.strip() not in rendered):
        system_in_user = True
        rendered = _render(tokenizer, None, [("user", f"{system}\n\n{_DOCUMENTS}{_QUESTION}")])
    if rendered is None or rendered.count(_DOCUMENTS + _QUESTION) != 1:
        raise ModelError(
            "the tokenizer's chat template does not put a user message into the prompt as it is.",
            cure="Give the model folder another chat_template.jinja, or remove it for plain prompts.",
        )
    before, after = rendered.split(_DOCUMENTS + _QUESTION)
    ids = encode(tokenizer, before, plain=False)
    return PromptFormat(before, ids, "", after, system, system_in_user, tokenizer)


def raw_prompt_format(tokenizer: Tokenizer) -> PromptFormat:
    """Prompts that stand as they are given, after the beginning-of-text token if the tokenizer adds one."""
    bos = _opening(tokenizer)
    shown = "".join(tokenizer.decode([token]) for token in bos)
    return PromptFormat(shown, bos, "", "", None, False, tokenizer, raw=True)


def document_text(path: str, text: str) -> str:
    """A document as it stands in a prompt; no running number, which would tie it to a place."""
    return f"[{path}]\n{text}\n\n"


def document_segment(tokenizer: Tokenizer, path: str, text: str) -> Segment:
    """A document's tokens and chunks."""
    ids = encode(tokenizer, document_text(path, text), plain=True)
    return Segment(path, ids, cut_chunks(ids, tokenizer))


def _render(tokenizer: Tokenizer, system: str | None, turns: Sequence[tuple[str, str]]) -> str | None:
    """The rendered template, or None if it refuses these roles."""
    messages = [("system", system), *turns] if system is not None else turns
    conversation = [{"role": role, "content": text} for role, text in messages]
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    except TemplateError:
        return None


def _plain_format(tokenizer: Tokenizer, system: str | None) -> PromptFormat:
    """For models without a chat template: the beginning-of-text token if the tokenizer adds one, then plain text."""
    bos = _opening(tokenizer)
    text = "" if system is None else f"{system}\n\n"
    ids = bos + encode(tokenizer, text, plain=False) if text else bos
    shown = "".join(tokenizer.decode([token]) for token in bos) + text
    return PromptFormat(shown, ids, "Question: ", "\nAnswer:", system, False, tokenizer)


def _opening(tokenizer: Tokenizer) -> tuple[int, ...]:
    first = tokenizer("a", add_special_tokens=True)["input_ids"][:1]
    return tuple(first) if first == [tokenizer.bos_token_id] else ()
