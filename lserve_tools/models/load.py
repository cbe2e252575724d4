"""Finding a model by whatever name the user gave it, and loading it for the engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lserve_tools import env
from lserve_tools.errors import ModelError, UsageError
from lserve_tools.models import attention
from lserve_tools.models.checks import check_config, check_model, check_weights
from lserve_tools.models.fingerprint import TOKENIZER_FILES, model_fingerprint, tokenizer_fingerprint
from lserve_tools.models.gguf import converted_folder, demo_file
from lserve_tools.models.spec import ModelSpec, kv_numbers, max_positions

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
_NOT_OF_TRANSFORMERS = ["original/*", "consolidated*"]  # the same weights once more, in the authors' own form


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
    if path.is_file():
        raise ModelError(f"{name}: neither a folder nor a .gguf file.", cure=f"Give its folder: --model {path.parent}")
    return ModelSource(name, _from_hub(name, revision), revision)


def load_tokenizer(source: ModelSource, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        ModelError: if there is none, or it cannot be read.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the Rust parser of tokenizer.json raises plain Exceptions
        if not any((source.path / file).is_file() for file in TOKENIZER_FILES):
            raise ModelError(
                f"{source.name}: there is no tokenizer in it.", cure="Copy tokenizer.json from the original model."
            ) from error
        raise ModelError(f"{source.name}: its tokenizer cannot be read ({_first_line(error)}).") from error
    return cast(PreTrainedTokenizerBase, tokenizer)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What is known of a model before it is loaded.

    Args:
        max_positions: longest prompt plus answer, in tokens.
        kv_bytes: of the KV of one token in all layers.
    """

    max_positions: int
    kv_bytes: int


def read_limits(source: ModelSource, *, dtype: str, device: str, trust_remote_code: bool = False) -> ModelLimits:
    """Limits of a model from its config; the arguments are those of `load_model`.

    Raises:
        ModelError: if its architecture cannot run here.
    """
    config = _config(source, trust_remote_code)
    text = config.get_text_config()
    return ModelLimits(max_positions(text), kv_numbers(text) * _dtype(dtype, config, _device(device)).itemsize)


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
    attention.register()
    config = _config(source, trust_remote_code)
    kind = _dtype(dtype, config, place)
    fingerprint = model_fingerprint(source.path)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    model = _read_weights(source, config, kind, trust_remote_code)
    cast(Any, model).eval().requires_grad_(False).to(place)  # in place
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        spec=_observe(source.name, model),
        source=source,
        fingerprint=fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint(source.path),
        dtype=kind,
        device=model.device,
    )


def _read_weights(source: ModelSource, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    if not list(source.path.glob("*.safetensors")):
        raise ModelError(
            f"{source.name}: no .safetensors weights in it, and nothing is unpickled here.",
            cure="Convert them with transformers: from_pretrained, then save_pretrained.",
        )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.path,
            config=config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # so that they can be named
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except KeyError as error:
        if error.args != (attention.NAME,):
            raise ModelError(f"{source.name}: cannot be loaded ({error} is not known).") from error
        reason = "does not use transformers' attention interface, which this engine answers"
        raise ModelError(f"{source.name}: {config.model_type} {reason}.") from error
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"{source.name}: cannot be loaded ({_first_line(error)}).") from error
    model, info = loaded
    check_weights(source.name, info["missing_keys"], info["mismatched_keys"])
    return cast(PreTrainedModel, model)


def _observe(name: str, model: PreTrainedModel) -> ModelSpec:
    try:
        spec = ModelSpec.observe(model)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError, TypeError, ValueError, IndexError) as error:
        raise ModelError(f"{name}: {model.config.model_type} cannot run here ({_first_line(error)}).") from error
    check_model(name, model, spec)
    return spec


def _config(source: ModelSource, trust_remote_code: bool) -> Any:
    try:
        config = AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            cure = f"Read the code in {source.path}; if you trust it, add --trust-remote-code."
            raise ModelError(f"{source.name}: it can only be run by Python code of its own.", cure=cure) from error
        raise ModelError(f"{source.name}: its config.json cannot be used ({_first_line(error)}).") from error
    check_config(source.name, config)
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
    fetch = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_OF_TRANSFORMERS
        )
    except HFValidationError as error:
        raise ModelError(
            f"{name}: neither a folder, a .gguf file, nor an id on the hub.",
            cure="Give a model's folder, a .gguf file, a hub id, or `demo`.",
        ) from error
    except GatedRepoError as error:
        cure = f"Accept its terms at https://huggingface.co/{name} and log in: hf auth login"
        raise ModelError(f"{name}: the hub gives it only to those who accepted its terms.", cure=cure) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{name}: the hub has no revision {revision} of it.") from error
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{name}: no such folder, and it could not be had from the hub ({type(error).__name__}).",
            cure=f"Check the name, or fetch it where there is a network: {fetch}",
        ) from error
    if not (Path(folder) / "config.json").is_file():
        raise ModelError(f"{name}: no config.json in it, so it is not a model of transformers.")
    return Path(folder)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
