"""Finding a model by whatever name the user gave it, and loading it for the engine."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from lserve_tools import env
from lserve_tools.errors import ModelError, UsageError
from lserve_tools.models import attention
from lserve_tools.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from lserve_tools.models.gguf import converted_folder, demo_file
from lserve_tools.models.spec import ModelSpec

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model lies.

    Args:
        name: as the user gave it.
        path: an ordinary Hugging Face folder.
        revision: of a model from the hub.
    """

    name: str
    path: Path
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, its attention answered by the engine."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec
    source: ModelSource
    fingerprint: str
    tokenizer_fingerprint: str
    dtype: torch.dtype
    device: torch.device


def resolve_model(name: str | None, *, revision: str | None = None) -> ModelSource:
    """Find a model: a local folder, a `.gguf` file, `demo`, or an id on the Hugging Face hub.

    Args:
        name: None takes the environment variable `LSERVE_MODEL`.

    Raises:
        UsageError: if no model is named.
        ModelError: if it cannot be found.
    """
    name = name or env.MODEL.get()
    if not name:
        raise UsageError(
            "no model is named.", cure="Give --model, or set LSERVE_MODEL; --model demo tries a small one."
        )
    path = Path(name).expanduser()
    if name == "demo" and not path.is_dir():
        return ModelSource(name, converted_folder(demo_file()))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{name}: no such file.")
        return ModelSource(name, converted_folder(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{name}: no config.json in it, so it is not a Hugging Face model folder.")
        return ModelSource(name, path)
    return ModelSource(name, _from_hub(name, revision), revision)


def load_tokenizer(source: ModelSource, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        ModelError: if there is none, or it cannot be read.
    """
    try:
        return AutoTokenizer.from_pretrained(source.path, trust_remote_code=trust_remote_code)  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{source.name}: its tokenizer cannot be read ({_first_line(error)}).") from error


def load_model(
    source: ModelSource, *, dtype: str = "auto", device: str = "auto", trust_remote_code: bool = False
) -> LoadedModel:
    """Load a model for the engine.

    Args:
        dtype: `auto`, `float32`, `bfloat16` or `float16`; auto is the model's own on a GPU and float32 on a CPU.
        device: `auto`, `cuda`, `cuda:N` or `cpu`; auto takes a GPU if there is one.

    Raises:
        ModelError: if its files are missing, broken or pickled, or its architecture cannot run here.
    """
    place = _device(device)
    fingerprint = model_fingerprint(source.path)
    attention.register()
    config = _config(source, trust_remote_code)
    kind = _dtype(dtype, config, place)
    if not list(source.path.glob("*.safetensors")):
        raise ModelError(
            f"{source.name}: no .safetensors weights in it (pickled weights are not read).",
            cure="Convert them with transformers' save_pretrained.",
        )
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.path,
            config=config,
            dtype=kind,
            attn_implementation=attention.NAME,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"{source.name}: cannot be loaded ({_first_line(error)}).") from error
    model = model.to(place).eval().requires_grad_(False)
    return LoadedModel(
        model=model,
        tokenizer=load_tokenizer(source, trust_remote_code=trust_remote_code),
        spec=ModelSpec.observe(model),
        source=source,
        fingerprint=fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint(source.path),
        dtype=kind,
        device=model.device,
    )


def _config(source: ModelSource, trust_remote_code: bool) -> Any:
    try:
        config = AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ModelError(f"{source.name}: its config.json cannot be used ({_first_line(error)}).") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{source.name}: {config.model_type} is an encoder-decoder; this engine runs decoder models.")
    return config


def _dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    if name != "auto":
        if name not in DTYPES:
            raise UsageError(f"--dtype {name} is none of auto, {', '.join(DTYPES)}.")
        return DTYPES[name]
    own = getattr(config, "dtype", None)
    if device.type == "cpu":
        return torch.float32
    return own if own in (torch.bfloat16, torch.float16) else torch.bfloat16


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name} is none of auto, cuda, cuda:N, cpu.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: torch sees no GPU here.", cure="Use --device cpu.")
    return device


def _from_hub(name: str, revision: str | None) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_HUB_FILES)))
    except HFValidationError as error:
        raise ModelError(f"{name}: neither a folder, a .gguf file, nor an id on the hub.") from error
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{name}: no such folder, and it could not be had from the hub ({type(error).__name__}).",
            cure=f"Check the name, or fetch it where there is a network: hf download {name}",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
