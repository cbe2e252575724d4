"""Keys that are moved are the keys that the model computes at the other place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lserve_tools.errors import ModelError
from lserve_tools.models import attention
from lserve_tools.models.rope import Rope
from lserve_tools.models.spec import observe_token
from tests.helpers.tiny import FAMILIES, tiny_model

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def _engine_model(family: str = "llama", **overrides: Any) -> Any:
    attention.register()
    model = tiny_model(family, **overrides)
    model.set_attn_implementation(attention.NAME)
    return model


def _check_moves(model: Any) -> None:
    """Keys of one token, computed at 11 and moved to 1500, against those computed there."""
    rope = Rope(model)
    assert rope.movable
    here, there = (observe_token(model, position) for position in (11, 1500))
    for layer in range(len(here)):
        bare = rope.at(layer, torch.tensor([11])).unrotate(here[layer].key)
        expected, rotation = there[layer].key, rope.at(layer, torch.tensor([1500]))
        torch.testing.assert_close(rotation.rotate(bare), expected, rtol=1e-3, atol=1e-4)
        room = torch.zeros(2, *expected.shape, dtype=torch.bfloat16)[1]
        torch.testing.assert_close(rotation.rotate(bare, out=room).float(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_moved_keys_are_those_computed_there(family: str) -> None:
    _check_moves(_engine_model(family))


@pytest.mark.parametrize("scaling", [YARN, LLAMA3], ids=["yarn", "llama3"])
def test_moved_keys_under_scaled_frequencies(scaling: dict[str, Any]) -> None:
    _check_moves(_engine_model(rope_parameters=scaling))


def test_frequencies_that_change_with_length_cannot_be_moved() -> None:
    rope = Rope(_engine_model(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}))
    assert not rope.movable
    with pytest.raises(ModelError, match="cannot be moved"):
        rope.at(0, torch.tensor([3])).rotate(torch.zeros(2, 1, 8))
