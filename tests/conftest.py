"""What all tests share: fixed seeds, few threads, and model folders made once a session."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models gain nothing by more, and lose much on a busy machine
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
for name in [n for n in os.environ if n.startswith("LSERVE_") and n != "LSERVE_NEEDLE_MODEL"]:
    del os.environ[name]

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from transformers.utils import logging

from tests.helpers.tiny import tiny_model_folder

torch.set_num_threads(1)
logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function from a family to the folder of a tiny model; one a session, so do not write to it."""
    made: dict[str, Path] = {}

    def folder(family: str = "llama") -> Path:
        if family not in made:
            made[family] = tiny_model_folder(tmp_path_factory.mktemp("models") / family, family)
        return made[family]

    return folder


@pytest.fixture(scope="session")
def tiny_llama(tiny_folder: Callable[..., Path]) -> Path:
    """The folder of a tiny Llama."""
    return tiny_folder("llama")
