"""Models are found by every form of their name, loaded as the engine needs them, or refused with reason and cure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lserve_tools.errors import ModelError, UsageError
from lserve_tools.models import attention
from lserve_tools.models.load import ModelSource, load_model, load_tokenizer, resolve_model
from tests.helpers.small_tokenizer import small_tokenizer
from tests.helpers.tiny import FAMILIES, WINDOW, tiny_model

_SMALL = {"vocab_size": 512, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
_SMALL |= {"num_attention_heads": 6}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LSERVE_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A model that may be changed."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def _source(folder: Path) -> ModelSource:
    return ModelSource("given", folder)


def _change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


# --- Finding -----------------------------------------------------------------------------------------------------


def test_a_folder_is_taken_as_it_is(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ModelSource(str(tiny_llama), tiny_llama)
    assert resolve_model(str(tiny_llama)) == wanted
    monkeypatch.setenv("LSERVE_MODEL", str(tiny_llama))
    assert resolve_model(None) == wanted


def test_no_name_at_all_offers_the_demo() -> None:
    with pytest.raises(UsageError, match=r"no model is named\. Give --model, or set LSERVE_MODEL; --model demo"):
        resolve_model(None)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"")
    for name, reason in [
        (tmp_path, "no config.json in it"),
        (tmp_path / "t.gguf", "no such file"),
        (tmp_path / "weights.safetensors", rf"Give its folder: --model {tmp_path}"),
        (tmp_path / "no" / "such" / "folder", "neither a folder, a .gguf file, nor an id on the hub"),
    ]:
        with pytest.raises(ModelError, match=reason):
            resolve_model(str(name))


def test_a_hub_id_that_is_not_there_says_how_to_fetch_it() -> None:
    with pytest.raises(ModelError, match=r"nobody/none: no such folder, .* hf download nobody/none --revision v1$"):
        resolve_model("nobody/none", revision="v1")


def test_a_hub_id_is_found_in_the_hubs_cache(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--tiny"
    shutil.copytree(tiny_llama, repository / "snapshots" / "0123abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    source = resolve_model("somebody/tiny")
    assert source == ModelSource("somebody/tiny", repository / "snapshots" / "0123abc")


# --- Loading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads(tiny_folder: Callable[..., Path], family: str) -> None:
    loaded = load_model(_source(tiny_folder(family)))
    assert loaded.model.config._attn_implementation == attention.NAME
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert (loaded.spec.num_layers, loaded.spec.head_dim) == (3, 8)
    assert loaded.spec.eos_token_ids == (small_tokenizer().eos_token_id,)
    assert loaded.tokenizer.encode("harbour") == small_tokenizer().encode("harbour")
    assert len(loaded.fingerprint) == len(loaded.tokenizer_fingerprint) == 64


def test_loaded_weights_are_those_of_the_files(tiny_llama: Path) -> None:
    loaded = load_model(_source(tiny_llama)).model.state_dict()
    written = load_file(tiny_llama / "model.safetensors")
    assert loaded.keys() == written.keys()
    assert all(torch.equal(loaded[name], written[name]) for name in written)


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_dtype(folder: Path, dtype: str, wanted: torch.dtype) -> None:
    _change_config(folder, dtype="bfloat16")
    loaded = load_model(_source(folder), dtype=dtype, device="cpu")
    assert loaded.dtype == loaded.model.dtype == wanted
    assert loaded.device == torch.device("cpu")


def test_unknown_dtypes_and_devices_are_usage_errors(tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match="--dtype int8 is none of auto, float32, bfloat16, float16"):
        load_model(_source(tiny_llama), dtype="int8")
    with pytest.raises(UsageError, match="--device gpu is none of"):
        load_model(_source(tiny_llama), device="gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match=r"torch sees no GPU here\. Use --device cpu"):
        load_model(_source(tiny_llama), device="cuda:1")


# --- Refusing ----------------------------------------------------------------------------------------------------


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _without_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


def _lacking_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _lacking_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    tiny_model().save_pretrained(folder, max_shard_size="100KB")
    (folder / "model-00002-of-00005.safetensors").unlink()


_DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (_without_weights, "no .safetensors weights in it, and nothing is unpickled here. Convert"),
    (_without_tokenizer, r"there is no tokenizer in it\. Copy tokenizer\.json"),
    (lambda f: (f / "tokenizer.json").write_text('{"a"'), "its tokenizer cannot be read"),
    (lambda f: (f / "config.json").write_text("{"), "its config.json cannot be used"),
    (lambda f: _change_config(f, model_type="unheard_of"), "its config.json cannot be used .*`unheard_of`"),
    (lambda f: _change_config(f, intermediate_size=100), r"weight is \[48, 96\] in the file and \[48, 100\] by config"),
    (lambda f: _change_config(f, model_type="t5"), "t5 is an encoder-decoder"),
    (lambda f: _change_config(f, model_type="x", auto_map={"AutoConfig": "x.Y"}), "add --trust-remote-code"),
    (_lacking_a_weight, r"its files lack 1 weights, model\.layers\.1\.self_attn\.q_proj\.weight among them"),
    (_lacking_a_shard, r"model-00002-of-00005\.safetensors"),
]


@pytest.mark.parametrize(("damage", "reason"), _DAMAGE, ids=[reason[:24] for _, reason in _DAMAGE])
def test_damaged_models_are_refused(folder: Path, damage: Callable[[Path], object], reason: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=f"^given: .*{reason}") as raised:
        load_model(_source(folder))
    assert "\n" not in str(raised.value)


def test_weights_that_break_off_are_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ModelError, match=r"model\.safetensors: holds \d+ bytes, its header speaks of"):
        load_model(_source(folder))


@pytest.mark.parametrize(
    ("family", "extra", "reason"),
    [
        ("bert", {}, "attends to later tokens too"),
        ("mamba", {}, "has layers of linear_attention"),
        ("falcon", {}, "does not use transformers' attention interface"),
        ("bloom", {"n_head": 6}, "0 of 2 layers use transformers' attention interface"),
        (
            "llama4_text",
            {**_GROUPED, "intermediate_size_mlp": 96, "num_local_experts": 2},
            "has layers of chunked_attention",
        ),
        ("gpt_oss", {**_GROUPED, "num_local_experts": 4}, "uses attention sinks as extra logits"),
        ("deepseek_v3", {}, "layers of unequal head counts or widths"),
        (
            "phimoe",
            {"num_local_experts": 2, "sliding_window": WINDOW, "num_key_value_heads": 2},
            f"does not tell .* a window of {WINDOW}",
        ),
    ],
)
def test_what_would_be_answered_wrongly_is_refused(
    tmp_path: Path, family: str, extra: dict[str, Any], reason: str
) -> None:
    config = AutoConfig.for_model(family, **{**_SMALL, **extra})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason):
        load_model(_source(tmp_path))


def test_a_tokenizer_can_be_had_alone(tiny_llama: Path) -> None:
    assert load_tokenizer(_source(tiny_llama)).eos_token == "<|im_end|>"
