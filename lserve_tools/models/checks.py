"""Refusing, by name and reason, models that would load and then answer wrongly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

from lserve_tools.errors import ModelError
from lserve_tools.models.spec import ModelSpec

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_config(name: str, config: Any) -> None:
    """Refuse what a config alone tells to be impossible.

    Args:
        name: the model as the user named it.
        config: a transformers config.

    Raises:
        ModelError: for encoder-decoders and layers that are neither full nor sliding attention.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name}: {kind} is an encoder-decoder; this engine runs decoder models.")
    text = config.get_text_config()
    strange = sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES)
    if strange:
        raise ModelError(
            f"{name}: {kind} has layers of {', '.join(strange)}; this engine runs full and sliding attention."
        )


def check_weights(name: str, missing: Iterable[str], mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    """Refuse a model some of whose weights transformers would have made up.

    Args:
        missing: names of weights that are not in the files.
        mismatched: name, shape in the files and shape by the config.

    Raises:
        ModelError: if there are any of either.
    """
    cure = "Download or copy the model again."
    if lost := sorted(missing):
        raise ModelError(f"{name}: its files lack {len(lost)} weights, {lost[0]} among them.", cure=cure)
    for weight, found, wanted in sorted(mismatched):
        shapes = f"{list(found)} in the file and {list(wanted)} by config.json"
        raise ModelError(f"{name}: {weight} is {shapes}.", cure=cure)


def check_model(name: str, model: PreTrainedModel, spec: ModelSpec) -> None:
    """Refuse attention that the engine would compute otherwise than the model does.

    Raises:
        ModelError: if the model looks at later tokens, or hides its sliding windows in a mask that is not used here.
    """
    kind = model.config.model_type
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise ModelError(f"{name}: {kind} attends to later tokens too; this engine runs causal models.")
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False or window >= spec.max_positions:
        return
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * spec.num_layers
    hidden = [i for i, kind_of in enumerate(types) if kind_of == "sliding_attention" and spec.windows[i] is None]
    if hidden and (getattr(config, "layer_types", None) or not any(spec.windows)):
        raise ModelError(f"{name}: {kind} does not tell its attention that layer {hidden[0]} has a window of {window}.")
