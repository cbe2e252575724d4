"""The three steps on a GPU: what is built there and answered there is what a CPU answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lserve_tools.batch.build import BuildOptions, build_cache
from lserve_tools.batch.reader import parse_batch
from lserve_tools.batch.run import RunOptions, run_batch
from lserve_tools.batch.setup import ModelChoice
from lserve_tools.engine.llm import EngineOptions
from lserve_tools.engine.sampling import SamplingParams
from lserve_tools.text.documents import find_documents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
QUESTIONS = [
    {"id": "one", "question": "Who signs?", "documents": "a.md"},
    {"id": "two", "question": "Where is the ledger?", "documents": "a.md"},
    {"id": "both", "question": "Where is the ledger?", "documents": ["b.md", "a.md"]},
]


def build(home: Path, model: ModelChoice, codec: str) -> None:
    documents, errors = find_documents(home / "docs")
    assert build_cache(documents, errors, BuildOptions(home / "cache", model, codec=codec), print).built == 2


def answers(home: Path, model: ModelChoice, output: Path, *, use_cache: bool, **engine: Any) -> dict[str, Any]:
    batch = parse_batch([json.dumps(q).encode() for q in QUESTIONS], "batch.jsonl")
    options = RunOptions(
        folder=home / "docs",
        output=output,
        cache=home / ("cache" if use_cache else "none"),
        use_cache=use_cache,
        model=model,
        result_format="simple",
        sampling=SamplingParams(max_tokens=12),
        engine=EngineOptions(kv_memory=2**28, **engine),
    )
    summary = run_batch(batch, options, print)
    assert summary.failed == 0
    assert (summary.tokens.exact > 1000) == use_cache
    return {line["id"]: line["answer"] for line in map(json.loads, output.read_text().splitlines())}


@pytest.mark.parametrize("codec", ["exact", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "glm4"])
def test_a_gpu_answers_as_a_cpu_does(tmp_path: Path, tiny_folder: Callable[..., Path], family: str, codec: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("Berth 7 is signed by the harbour master before noon.\n" * 60)
    (tmp_path / "docs" / "b.md").write_text("The ledger lies in the tower.\n")
    name = str(tiny_folder(family))
    cpu, gpu = (ModelChoice(name, dtype="float32", device=device) for device in ("cpu", "cuda"))
    expected = answers(tmp_path, cpu, tmp_path / "cpu.jsonl", use_cache=False)
    assert answers(tmp_path, gpu, tmp_path / "gpu.jsonl", use_cache=False) == expected
    build(tmp_path, gpu, codec)
    cached = answers(tmp_path, gpu, tmp_path / "cached.jsonl", use_cache=True)
    if codec == "exact":
        assert cached == expected
    else:  # the CPU decodes the same codes
        assert cached == answers(tmp_path, cpu, tmp_path / "cpu-cached.jsonl", use_cache=True)


@pytest.mark.parametrize("engine", [{"token_budget": 128}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int4"}])
def test_selection_and_small_pages_answer_alike_on_both(
    tmp_path: Path, tiny_folder: Callable[..., Path], engine: dict[str, Any]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("Berth 7 is signed by the harbour master before noon.\n" * 60)
    (tmp_path / "docs" / "b.md").write_text("The ledger lies in the tower.\n")
    name = str(tiny_folder("llama"))
    cpu, gpu = (ModelChoice(name, dtype="float32", device=device) for device in ("cpu", "cuda"))
    build(tmp_path, cpu, "exact")
    expected = answers(tmp_path, cpu, tmp_path / "cpu.jsonl", use_cache=True, **engine)
    assert answers(tmp_path, gpu, tmp_path / "gpu.jsonl", use_cache=True, **engine) == expected
