"""Tiny models with random weights, saved as ordinary folders that every command takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.small_tokenizer import small_tokenizer

WINDOW = 70
_SHAPE = {
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,  # wide enough that outputs differ from token to token
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
    "qwen3": {},
    "phi3": {},
    "gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 20.0, "sliding_window": WINDOW},
    "gemma3_text": {"query_pre_attn_scalar": 8, **_SLIDING},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "granite": {"attention_multiplier": 0.3},
    "olmo2": {},
    "cohere2": {**_SLIDING, "logit_scale": 0.5},
    "glm4": {},
    "starcoder2": {"sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4, **_EXPERTS},
    "qwen3_moe": {"num_experts": 4, **_EXPERTS},
    "ministral": _SLIDING,
    "exaone4": _SLIDING,
    "gpt_neox": {},
    "nemotron": {},
    "stablelm": {},
}
FAMILIES = tuple(_FAMILIES)


def tiny_config(family: str = "llama", **overrides: Any) -> Any:
    """The configuration of a tiny model: 3 layers, 6 query and 2 KV heads of 8 (gpt_neox has no groups)."""
    tokenizer = small_tokenizer()
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    grouped = {} if family == "gpt_neox" else _GROUPED
    return AutoConfig.for_model(family, **{**_SHAPE, **grouped, **_FAMILIES[family], **ids, **overrides})


def tiny_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    """A tiny model in memory: float32, eval, the same weights for the same arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=torch.float32)
    return model.eval().requires_grad_(False)


def tiny_model_folder(folder: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Save a tiny model with a tokenizer and return its folder.

    Args:
        folder: made if it is not there.
        family: one of `FAMILIES`.
        overrides: of the model's configuration.
    """
    tiny_model(family, seed=seed, **overrides).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder
