"""What this package needs of a tokenizer; every Hugging Face tokenizer has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of `PreTrainedTokenizerBase` that is used here."""

    chat_template: Any
    bos_token_id: Any

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any: ...

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any: ...


def encode(tokenizer: Tokenizer, text: str, *, plain: bool) -> tuple[int, ...]:
    """Token ids of `text` without added special tokens.

    Args:
        plain: whether the text is a reader's: a special token written out in it, such as an end-of-turn mark, is then
            ordinary text and cannot end the turn.
    """
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=plain, verbose=False)
    return tuple(encoded["input_ids"])


def token_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> dict[int, str]:
    """The text of each distinct token, decoded alone."""
    return {token: tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in set(token_ids)}
