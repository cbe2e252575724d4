"""A byte-level tokenizer made on the spot, with a chat template of the usual shape."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT
DROPS_SYSTEM = CHAT.replace("for m in messages", "for m in messages if m['role'] != 'system'")
_SAMPLE = ["The harbour master signs every permit before noon.\n", "def total(rows):\n    return sum(rows)\n\n"]


@cache
def small_tokenizer(chat_template: str | None = CHAT) -> Any:
    """A `PreTrainedTokenizerFast` of 300-odd tokens that can encode any text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(_SAMPLE * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|im_end|>")
    tokenizer.chat_template = chat_template
    return tokenizer
