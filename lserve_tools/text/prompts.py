"""Prompts as token ids: prefix | document … document | suffix, cut out of the model's chat template once.

The template is rendered with marks where documents and question go, and cut at the marks. All parts are tokenized on
their own, so that the ids of one never depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jinja2 import TemplateError

from lserve_tools.errors import ModelError
from lserve_tools.text.chunking import cut_chunks
from lserve_tools.text.segments import Segment
from lserve_tools.text.tokenizer import Tokenizer, encode

PREFIX = "prefix"
_DOCUMENTS, _QUESTION = "@@lserve-documents@@", "@@lserve-question@@"


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
    """

    prefix_text: str
    prefix_ids: tuple[int, ...]
    lead: str
    tail: str
    system: str | None
    system_in_user: bool
    tokenizer: Tokenizer = field(repr=False, compare=False)

    def prefix_segment(self) -> Segment:
        """The prefix as the engine takes it."""
        return Segment.of(PREFIX, self.prefix_ids)

    def suffix_ids(self, question: str) -> tuple[int, ...]:
        """Tokens of the question and of what opens the answer."""
        asked = encode(self.tokenizer, self.lead + question, plain=True)
        return asked + encode(self.tokenizer, self.tail, plain=False)

    def suffix_text(self, question: str) -> str:
        """What `suffix_ids` are the tokens of."""
        return self.lead + question + self.tail


def render_prompt_format(tokenizer: Tokenizer, system: str | None = None) -> PromptFormat:
    """Cut the tokenizer's chat template into prefix and suffix; without a template, use a plain form.

    Raises:
        ModelError: if the template does not put the user's text into the prompt once, as it is.
    """
    if not tokenizer.chat_template:
        return _plain_format(tokenizer, system)
    system_in_user = False
    rendered = _render(tokenizer, system, _DOCUMENTS + _QUESTION)
    if system is not None and (rendered is None or system.strip() not in rendered):
        system_in_user = True
        rendered = _render(tokenizer, None, f"{system}\n\n{_DOCUMENTS}{_QUESTION}")
    if rendered is None or rendered.count(_DOCUMENTS + _QUESTION) != 1:
        raise ModelError(
            "the tokenizer's chat template does not put a user message into the prompt as it is.",
            cure="Give the model folder another chat_template.jinja, or remove it for plain prompts.",
        )
    before, after = rendered.split(_DOCUMENTS + _QUESTION)
    ids = encode(tokenizer, before, plain=False)
    return PromptFormat(before, ids, "", after, system, system_in_user, tokenizer)


def document_text(path: str, text: str) -> str:
    """A document as it stands in a prompt; no running number, which would tie it to a place."""
    return f"[{path}]\n{text}\n\n"


def document_segment(tokenizer: Tokenizer, path: str, text: str) -> Segment:
    """A document's tokens and chunks."""
    ids = encode(tokenizer, document_text(path, text), plain=True)
    return Segment(path, ids, cut_chunks(ids, tokenizer))


def _render(tokenizer: Tokenizer, system: str | None, user: str) -> str | None:
    """The rendered template, or None if it refuses a system role."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": user})
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError:
        return None


def _plain_format(tokenizer: Tokenizer, system: str | None) -> PromptFormat:
    """For models without a chat template: the beginning-of-text token if the tokenizer adds one, then plain text."""
    first = tokenizer("a", add_special_tokens=True)["input_ids"][:1]
    bos = tuple(first) if first == [tokenizer.bos_token_id] else ()
    text = "" if system is None else f"{system}\n\n"
    ids = bos + encode(tokenizer, text, plain=False) if text else bos
    shown = "".join(tokenizer.decode([token]) for token in bos) + text
    return PromptFormat(shown, ids, "Question: ", "\nAnswer:", system, False, tokenizer)
