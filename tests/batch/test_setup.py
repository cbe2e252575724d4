from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lserve_tools.batch.build import BuildOptions, build_cache
from lserve_tools.batch.reader import parse_batch
from lserve_tools.batch.run import RunOptions, run_batch
from lserve_tools.batch.setup import ModelChoice, open_setup
from lserve_tools.engine.llm import EngineOptions
from lserve_tools.engine.sampling import SamplingParams
from lserve_tools.errors import CacheError, CacheMismatchError, UsageError
from lserve_tools.text.documents import find_documents
from tests.helpers.tiny import tiny_model_folder

WINDOW = 400


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a model whose layers have sliding windows."""
    return build(tmp_path_factory.mktemp("sliding"), "mistral", sliding_window=WINDOW)


def build(home: Path, family: str, **overrides: Any) -> Path:
    """The cache of two documents, made by a tiny model."""
    (home / "docs").mkdir()
    (home / "docs" / "a.md").write_text("Berth 7 is signed by the harbour master before noon.\n" * 40)
    (home / "docs" / "b.md").write_text("The ledger lies in the tower.\n")
    documents, errors = find_documents(home / "docs")
    model = ModelChoice(str(tiny_model_folder(home / "model", family, **overrides)))
    summary = build_cache(documents, errors, BuildOptions(home / "cache", model, codec="exact"), print)
    assert summary.built == 2
    return home / "cache"


def answer(
    cache: Path,
    output: Path,
    *,
    use_cache: bool,
    documents: str = '"a.md"',
    most: int | None = None,
    budget: int | None = None,
) -> tuple[str, int]:
    batch = parse_batch([b'{"id": "q", "question": "Who signs?", "documents": %s}' % documents.encode()], "batch.jsonl")
    options = RunOptions(
        folder=output.parent,
        output=output,
        cache=cache,
        use_cache=use_cache,
        result_format="simple",
        sampling=SamplingParams(max_tokens=8),
        engine=EngineOptions(kv_memory=2**26, max_model_len=most, token_budget=budget),
    )
    summary = run_batch(batch, options, print)
    assert summary.failed == 0
    return output.read_text().split('"answer":')[1].split(',"finish_reason"')[0], summary.tokens.exact


def test_a_model_with_sliding_windows_answers_alike_from_its_cache(sliding: Path, tmp_path: Path) -> None:
    cached, exact = answer(sliding, tmp_path / "cached.jsonl", use_cache=True)
    computed, none = answer(sliding, tmp_path / "computed.jsonl", use_cache=False)
    assert cached == computed
    assert exact > 500
    assert none == 0


def test_a_context_within_the_sliding_window_answers_alike_from_the_cache(sliding: Path, tmp_path: Path) -> None:
    """Every token sees all before it then, but the cache was built with a window."""
    short: Any = {"documents": '"b.md"', "most": WINDOW}
    cached, exact = answer(sliding, tmp_path / "cached.jsonl", use_cache=True, **short)
    computed, _ = answer(sliding, tmp_path / "computed.jsonl", use_cache=False, **short)
    assert cached == computed
    assert exact > 0


def test_pages_of_stored_keys_have_the_bounds_of_computed_ones(tmp_path: Path) -> None:
    """Which pages are read depends on them."""
    cache = build(tmp_path, "llama")
    cached, exact = answer(cache, tmp_path / "cached.jsonl", use_cache=True, budget=192)
    computed, _ = answer(cache, tmp_path / "computed.jsonl", use_cache=False, budget=192)
    dense, _ = answer(cache, tmp_path / "dense.jsonl", use_cache=False)
    assert cached == computed != dense
    assert exact > 500


def test_a_folder_that_is_no_cache_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    with pytest.raises(CacheError, match="is not a cache"):
        open_setup(ModelChoice(), tmp_path / "cache", None, True, folder=tmp_path)
    with pytest.raises(UsageError, match="there is no cache"):
        open_setup(ModelChoice(), tmp_path / "none", None, True, folder=tmp_path)


def test_a_cache_of_another_tokenizer_is_refused(sliding: Path, tmp_path: Path) -> None:
    model = shutil.copytree(sliding.parent / "model", tmp_path / "model")
    text = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|im_begin|>"))
    with pytest.raises(CacheMismatchError, match="the cache was built with tokenizer "):
        open_setup(ModelChoice(str(model)), sliding, None, True, folder=tmp_path)
