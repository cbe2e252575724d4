"""Sampling depends on logits, seed, request and step alone."""

from __future__ import annotations

import pytest
import torch

from lserve_tools.engine.sampling import SamplingParams, find_stop, sample, uniform


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.1, 3.0, 2.0], [5.0, 1.0, 1.0]])
    assert sample(logits, [SamplingParams(), SamplingParams()], [0.9, 0.9]) == [1, 0]


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    params = SamplingParams(temperature=0.7)
    count = 4000
    drawn = [sample(logits, [params], [uniform(1, "a", step)])[0] for step in range(count)]
    found = torch.bincount(torch.tensor(drawn), minlength=4) / count
    torch.testing.assert_close(found, (logits[0] / 0.7).softmax(0), atol=0.025, rtol=0)


@pytest.mark.parametrize(("top_p", "allowed"), [(0.5, {0}), (0.75, {0, 1}), (1.0, {0, 1, 2})])
def test_top_p_keeps_the_smallest_set(top_p: float, allowed: set[int]) -> None:
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.1]]))
    params = SamplingParams(temperature=1.0, top_p=top_p)
    assert {sample(logits, [params], [draw / 100])[0] for draw in range(100)} == allowed


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(5, 50)
    params = [SamplingParams(temperature=1.0)] * 5
    draws = [uniform(3, str(i), 0) for i in range(5)]
    together = sample(logits, params, draws)
    assert together == [sample(logits[i : i + 1], params[:1], draws[i : i + 1])[0] for i in range(5)]
    assert len({uniform(3, "x", step) for step in range(100)} | {uniform(4, "x", 0), uniform(3, "y", 0)}) == 102


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.5}, {"stop": ("",)}]
)
def test_impossible_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_the_first_stop_string_counts() -> None:
    assert find_stop("one two three", ["three", "two"]) == 4
    assert find_stop("one", ["x"]) is None
