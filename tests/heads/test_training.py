"""Training of gates, its checkpoint, its prompts, and the choice of a sparsity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lserve_tools.errors import ProfileError, UsageError
from lserve_tools.heads.checkpoint import read_checkpoint
from lserve_tools.heads.corpus import Corpus, load_corpus
from lserve_tools.heads.optimize import Training, distillation_loss, learning_rate, train_gates
from lserve_tools.heads.quality import best_sparsity, measure_quality, search_sparsity
from lserve_tools.heads.synthetic import Prompt, PromptMaker
from lserve_tools.models.load import LoadedModel, ModelSource, load_model
from lserve_tools.schema import GateSettings, LossPoint, ProfileData, QualityPoint
from lserve_tools.text.prompts import render_prompt_format
from tests.helpers.oracles import Windows, lambda_oracle
from tests.helpers.small_tokenizer import small_tokenizer
from tests.helpers.tiny import tiny_model_folder

DATA = ProfileData(corpus="x", corpus_sha256="x", min_length=90, max_length=120, facts=2)
SETTINGS = GateSettings(model_fingerprint="x", data=DATA, seed=3, steps=6, lr=0.1, reg=0.05, sink=4, recent=16)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_model_folder(tmp_path_factory.mktemp("model"))
    return load_model(ModelSource("tiny", folder), device="cpu")


def make(number: int) -> Prompt:
    """A prompt of random tokens, the last five of which are the answer."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(512, (90 + 7 * number % 30,), generator=generator).tolist()
    return Prompt(tuple(ids), tuple(range(len(ids) - 5, len(ids))))


def maker(**changes: Any) -> PromptMaker:
    settings: dict[str, Any] = {"lengths": (700, 900), "facts": 3, "seed": 5, **changes}
    tokenizer = small_tokenizer()
    return PromptMaker(tokenizer, render_prompt_format(tokenizer), load_corpus(None), **settings)


def stop_after(steps: int) -> Callable[[LossPoint], None]:
    def report(point: LossPoint) -> None:
        if point.step + 1 == steps:
            raise KeyboardInterrupt

    return report


def test_a_resumed_run_is_the_undisturbed_run(loaded: LoadedModel, tmp_path: Path) -> None:
    whole = train_gates(loaded, make, SETTINGS, checkpoint=tmp_path / "a" / "x.safetensors")
    path = tmp_path / "b" / "x.safetensors"
    for resume, steps in ((False, 2), (True, 5)):
        with pytest.raises(KeyboardInterrupt):
            train_gates(loaded, make, SETTINGS, checkpoint=path, resume=resume, report=stop_after(steps))
    seen: list[int] = []
    resumed = train_gates(
        loaded, make, SETTINGS, checkpoint=path, resume=True, report=lambda point: seen.append(point.step)
    )
    assert seen == [5]
    assert torch.equal(resumed.gates, whole.gates)
    assert resumed.curve == whole.curve
    assert [point.step for point in whole.curve] == list(range(6))
    assert 0 < whole.gates.min() < whole.gates.max() <= 1
    assert [file.name for file in path.parent.iterdir()] == ["x.safetensors"]


def test_weights_and_attention_are_left_as_they_were(loaded: LoadedModel, tmp_path: Path) -> None:
    before = {name: weight.clone() for name, weight in loaded.model.state_dict().items()}
    train_gates(loaded, make, SETTINGS, checkpoint=tmp_path / "x.safetensors")
    assert all(torch.equal(weight, before[name]) for name, weight in loaded.model.state_dict().items())
    assert all(weight.grad is None for weight in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "lserve"


def test_open_gates_have_no_loss_and_a_regularizer_alone_shuts_them(loaded: LoadedModel, tmp_path: Path) -> None:
    ones = Training.start(loaded).gates
    assert float(distillation_loss(loaded, make(0), ones, 4, 16)) == 0
    assert float(distillation_loss(loaded, make(0), torch.zeros_like(ones), 4, 16)) > 1e-3
    heavy = SETTINGS.model_copy(update={"reg": 1e3, "lr": 0.5})
    training = train_gates(loaded, make, heavy, checkpoint=tmp_path / "x.safetensors")
    assert not training.gates.any()


def test_the_learning_rate_rises_and_falls() -> None:
    settings = SETTINGS.model_copy(update={"steps": 50, "lr": 1.0})
    rates = [learning_rate(settings, step) for step in range(50)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert set(rates[10:40]) == {1.0}
    assert rates[40:] == pytest.approx([step / 10 for step in range(10, 0, -1)])


def test_checkpoints_of_other_settings_or_damaged_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    gates = train_gates(loaded, make, SETTINGS, checkpoint=path).gates
    with pytest.raises(ProfileError, match=r"was made with lr 0\.1, not 0\.2") as caught:
        read_checkpoint(path, SETTINGS.model_copy(update={"lr": 0.2}), gates)
    assert "--resume" in caught.value.cure
    with pytest.raises(ProfileError, match="does not fit the model"):
        read_checkpoint(path, SETTINGS, gates[:2])
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ProfileError, match="damaged"):
        read_checkpoint(path, SETTINGS, gates)


def test_prompts_are_a_function_of_seed_and_number() -> None:
    first, again, other = maker(), maker(), maker(seed=6)
    assert [first.make(n) for n in (3, 1)] == [again.make(n) for n in (3, 1)]
    assert len({first.make(0), first.make(1), other.make(0)}) == 3
    assert all(700 <= len(first.make(number).token_ids) <= 900 for number in range(20))


def test_answers_lie_in_the_text_and_are_asked_for() -> None:
    tokenizer, prompt = small_tokenizer(), maker().make(0)
    start = prompt.answers[0]
    text = tokenizer.decode(prompt.token_ids[:start])
    runs: list[list[int]] = []
    for place in prompt.answers:
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    values = [tokenizer.decode([prompt.token_ids[place] for place in run]) for run in runs]
    assert len(values) == 3
    assert all(f" is{value}." in text for value in values)
    assert "State every fact about" in text


def test_held_out_prompts_share_neither_values_nor_text() -> None:
    training, held_out = maker(), maker(held_out=True)
    assert not set(training._sentences) & set(held_out._sentences)
    assert not set(training._share(tuple("abcdefghij"))) & set(held_out._share(tuple("abcdefghij")))


def test_prompts_too_short_for_their_facts_are_refused() -> None:
    with pytest.raises(UsageError, match="too short") as caught:
        maker(lengths=(50, 60)).make(0)
    assert "--min-length" in caught.value.cure
    tokenizer = small_tokenizer()
    with pytest.raises(UsageError, match=r"short\.md: 1 sentences are too little"):
        PromptMaker(
            tokenizer,
            render_prompt_format(tokenizer),
            Corpus("short.md", "One sentence."),
            lengths=(700, 900),
            facts=3,
            seed=0,
        )


def test_quality_is_the_loss_under_the_mask(loaded: LoadedModel) -> None:
    prompts = [make(0), make(1)]
    retrieval = torch.tensor([[True, False], [False, False], [True, True]])
    found = measure_quality(loaded, prompts, retrieval, sink=4, recent=16)
    loss = 0.0
    with torch.no_grad(), lambda_oracle(loaded.model, Windows(retrieval, 4, 16)):
        for prompt in prompts:
            ids = torch.tensor([prompt.token_ids])
            places = torch.tensor(prompt.answers)
            logits = loaded.model(ids, use_cache=False).logits[0, places - 1]
            loss += float(torch.nn.functional.cross_entropy(logits, ids[0, places])) / 2
    assert found.loss == pytest.approx(loss, rel=1e-4)
    assert found.sparsity == 0.5


def test_the_largest_sparsity_within_tolerance_is_chosen() -> None:
    losses = {0.0: 1.0, 0.25: 1.02, 0.5: 0.99, 0.75: 1.2}
    curve = [QualityPoint(sparsity=sparsity, loss=loss, accuracy=1) for sparsity, loss in losses.items()]
    assert [best_sparsity(curve, tolerance).sparsity for tolerance in (0, 0.1, 0.5)] == [0.5, 0.5, 0.75]


@pytest.mark.parametrize(
    ("bearable", "tried"),
    [
        (0.7, [0, 0.5, 0.625, 0.75]),
        (1.0, [0, 0.5, 0.625, 0.75, 0.875]),
        (0.3, [0, 0.25, 0.375, 0.5]),
        (0.0, [0, 0.125, 0.25, 0.375, 0.5]),
    ],
)
def test_sparsities_are_tried_until_one_is_too_many(bearable: float, tried: list[float]) -> None:
    def measure(sparsity: float) -> QualityPoint:
        return QualityPoint(sparsity=sparsity, loss=1.0 + 5 * (sparsity > bearable), accuracy=1)

    points = search_sparsity(measure, 0.02)
    assert [point.sparsity for point in points] == tried
    assert best_sparsity(points, 0.02).sparsity == max(sparsity for sparsity in tried if sparsity <= bearable)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_corpus_of_the_user(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.md").write_text("A text. It goes on.\n")
    (tmp_path / "b.txt").write_text("Another one.\n")
    corpus = load_corpus(tmp_path if kind == "folder" else tmp_path / "b.txt")
    assert corpus.text == ("A text. It goes on.\n\n\nAnother one.\n" if kind == "folder" else "Another one.\n")
    assert len(corpus.sha256) == 64
