"""The profile's folder: read, written, chosen from, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lserve_tools.errors import ProfileError
from lserve_tools.heads.profile import HeadProfile, choose_retrieval

ROWS = "9.960937500000000000e-01\t-1.400000000000000029e-03\n5.000000000000000000e-01\t1.000000000000000000e+00\n"
CONFIG = '{\n    "sink_size": 128,\n    "recent_size": 256,\n    "lr": 0.02,\n    "model_name": "models/llama"\n}'
SCORES = torch.tensor([[0.9, 0.1, 0.4], [0.4, 0.4, 1.0]])


def published(folder: Path, rows: str = ROWS, config: str = CONFIG) -> Path:
    """A folder as DuoAttention publishes it."""
    folder.mkdir(exist_ok=True)
    (folder / "full_attention_heads.tsv").write_text(rows)
    (folder / "config.json").write_text(config)
    return folder


def test_a_published_folder_loads_and_is_written_back_byte_for_byte(tmp_path: Path) -> None:
    rows = ROWS.replace("-1.400000000000000029e-03", "0.000000000000000000e+00")
    profile = HeadProfile.load(published(tmp_path / "theirs", rows))
    assert (profile.sink, profile.recent, profile.model_fingerprint) == (128, 256, None)
    assert profile.retrieval.tolist() == [[True, False], [False, True]]
    profile.save(tmp_path / "ours")
    for name in ("full_attention_heads.tsv", "config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["config.json", "full_attention_heads.tsv"]


def test_scores_are_clipped_and_other_readers_agree(tmp_path: Path) -> None:
    import numpy as np

    folder = published(tmp_path / "theirs")
    theirs = np.clip(np.loadtxt(folder / "full_attention_heads.tsv", delimiter="\t"), 0, 1)
    assert HeadProfile.load(folder).scores.tolist() == theirs.astype(np.float32).tolist()
    HeadProfile.load(folder).save(tmp_path / "ours")
    again = np.loadtxt(tmp_path / "ours" / "full_attention_heads.tsv", delimiter="\t")
    assert again.tolist() == theirs.tolist()


def test_ties_stream_by_layer_then_head() -> None:
    assert choose_retrieval(SCORES, 0.5).tolist() == [[True, False, False], [False, True, True]]
    assert choose_retrieval(torch.ones(2, 3), 0.5).tolist() == [[False] * 3, [True] * 3]


@given(st.lists(st.floats(0, 1, width=32), min_size=12, max_size=12), st.floats(0, 1))
def test_no_retrieval_head_scores_less_than_a_streaming_one(values: list[float], sparsity: float) -> None:
    scores = torch.tensor(values).view(4, 3)
    retrieval = choose_retrieval(scores, sparsity)
    assert abs(int((~retrieval).sum()) - 12 * sparsity) <= 0.5 + 1e-9
    if retrieval.any() and not retrieval.all():
        assert scores[retrieval].min() >= scores[~retrieval].max()


def test_the_id_is_of_mask_and_windows_only() -> None:
    mask = choose_retrieval(SCORES, 0.5)
    profile = HeadProfile(SCORES, 16, 64, mask)
    assert profile.id == HeadProfile(SCORES / 2, 16, 64, mask, "another model").id
    others = [
        HeadProfile(SCORES, 17, 64, mask),
        HeadProfile(SCORES, 16, 65, mask),
        HeadProfile(SCORES, 16, 64, ~mask),
        HeadProfile(SCORES.T, 16, 64, mask.view(3, 2)),
    ]
    assert len({profile.id, *(other.id for other in others)}) == 5
    assert profile.sparsity == 0.5


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("full_attention_heads.tsv", None, "missing"),
        ("config.json", None, "missing"),
        ("full_attention_heads.tsv", "", "empty"),
        ("full_attention_heads.tsv", "1\t1\n1\n", r"tsv:2: 1 scores, the rows above have 2"),
        ("full_attention_heads.tsv", "1\tnan\n", r"tsv:1: holds a score that is no finite number"),
        ("full_attention_heads.tsv", "1\tinf\n", "no finite number"),
        ("full_attention_heads.tsv", "1,0\n", r"tsv:1: not numbers separated by tabs"),
        ("config.json", "{", r"config\.json: Invalid JSON"),
        ("config.json", '{"sink_size": 4}', r"config\.json: recent_size: Field required"),
        ("config.json", '{"sink_size": -4, "recent_size": 4}', "sink_size"),
        ("profile.json", "{}", r"profile\.json: "),
    ],
)
def test_damaged_folders_are_refused_with_place_and_cure(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    folder = published(tmp_path / "profile")
    (folder / name).unlink(missing_ok=True)
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(ProfileError, match=message) as caught:
        HeadProfile.load(folder)
    assert caught.value.cure
    assert str(folder) in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="nowhere: no such folder"):
        HeadProfile.load(tmp_path / "nowhere")


def test_windows_are_read_as_they_are(tmp_path: Path) -> None:
    folder = published(tmp_path / "profile", config=json.dumps({"sink_size": 0, "recent_size": 1}))
    profile = HeadProfile.load(folder, sparsity=0.25)
    assert (profile.sink, profile.recent, int(profile.retrieval.sum())) == (0, 1, 3)
