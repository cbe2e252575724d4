"""A GGUF file written from a tiny Llama, as llama.cpp's converter does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from torch import Tensor

from tests.helpers.small_tokenizer import small_tokenizer

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, model: Any, *, leave_out: str = "") -> Path:
    """Write a Llama and the small tokenizer in fp32, but for tensors with `leave_out` in their names."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, config.vocab_size)
    for name, weight in model.state_dict().items():
        if not (leave_out and leave_out in name):
            writer.add_tensor(_name(name), _permuted(name, weight, config).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name(name: str) -> str:
    whole = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in whole:
        return f"{whole[name]}.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _permuted(name: str, weight: Tensor, config: Any) -> Tensor:
    """Rows of queries and keys for RoPE on neighbouring pairs, which llama.cpp uses."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for projection, count in heads.items():
        if projection in name:
            halves = weight.reshape(count, 2, weight.shape[0] // count // 2, weight.shape[1])
            return halves.swapaxes(1, 2).reshape(weight.shape)
    return weight


def _add_tokenizer(writer: Any, size: int) -> None:
    tokenizer = small_tokenizer()
    core = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(core["vocab"], key=core["vocab"].get)
    special = set(tokenizer.all_special_tokens) | {"<|im_start|>"}
    kinds = [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    unused = size - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens + [f"<unused{i}>" for i in range(unused)])
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * unused)
    writer.add_token_merges([" ".join(pair) for pair in core["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
