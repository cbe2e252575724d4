"""Attention with gates: exact per token, forward and backward, and nothing but gates learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lserve_tools.heads.gates import MaskedPass, StudentPass, TeacherPass, answering, gate_attention
from lserve_tools.heads.streaming import StreamingMask, streaming_attention
from tests.helpers.oracles import Windows, assert_matches, attention_of, lambda_oracle
from tests.helpers.tiny import tiny_model

GATED = (True, True, True)


def brute_force(query: Tensor, key: Tensor, value: Tensor, sink: int, recent: int, softcap: float | None) -> Tensor:
    """Λ attention with the whole matrix of scores."""
    group, position = query.shape[1] // key.shape[1], torch.arange(query.shape[2])
    behind = position[:, None] - position
    seen = (behind >= 0) & ((position < sink) | (behind < recent))
    scores = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(group, 1)


def tensors(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values: a batch of 2, 6 query and 2 KV heads, 10 and 7 wide."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, 6, length, 10), (2, 2, length, 10), (2, 2, length, 7)]
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes
    )
    return query, key, value


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    ("length", "sink", "recent"),
    [
        (1, 0, 1),
        (1, 4, 4),
        (63, 3, 1),
        (64, 0, 64),
        (65, 1, 65),
        (129, 70, 2),
        (131, 5, 66),
        (200, 64, 64),
        (97, 99, 9),
    ],
)
def test_streaming_attention_equals_brute_force(length: int, sink: int, recent: int, softcap: float | None) -> None:
    inputs = tensors(length)
    mask = StreamingMask.build(length, sink, recent, torch.float64, torch.device("cpu"))
    found = streaming_attention(*inputs, mask, scale=0.3, softcap=softcap)
    wanted = brute_force(*inputs, sink, recent, softcap)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    weight = torch.randn(wanted.shape, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((wanted * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_a_mask_made_without_gradients_serves_a_pass_with_them() -> None:
    with torch.inference_mode():
        StreamingMask.build(77, 3, 11, torch.float64, torch.device("cpu"))
    inputs = tensors(77)
    mask = StreamingMask.build(77, 3, 11, torch.float64, torch.device("cpu"))
    streaming_attention(*inputs, mask, scale=0.3).sum().backward()
    assert all(x.grad is not None for x in inputs)


def ids_of(length: int) -> Tensor:
    return torch.randint(512, (1, length), generator=torch.Generator().manual_seed(length))


def run(model: Any, ids: Tensor, gate_pass: Any) -> Tensor:
    """Hidden states `[T, width]` after the last norm."""
    with gate_attention(model), answering(gate_pass):
        states: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    return states


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "nemotron"])
def test_teacher_is_the_model_as_it_is(family: str) -> None:
    model, ids = tiny_model(family), ids_of(150)
    with attention_of(model, "eager"), torch.no_grad():
        wanted = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        exact = model.double().base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    with torch.no_grad():
        found = run(model.float(), ids, TeacherPass())
    assert_matches(found, exact, wanted, factor=4)


@pytest.mark.parametrize("length", [33, 64, 161])
def test_masked_pass_equals_the_matrix(length: int) -> None:
    model, ids = tiny_model().double(), ids_of(length)
    retrieval = torch.tensor([[True, False], [False, False], [True, True]])
    with torch.no_grad():
        with lambda_oracle(model, Windows(retrieval, sink=5, recent=21)):
            wanted = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        found = run(model, ids, MaskedPass(retrieval, GATED, 5, 21))
        wide = run(model, ids, MaskedPass(torch.zeros_like(retrieval), GATED, 5, length))
        dense = run(model, ids, TeacherPass())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(wide, dense, rtol=0, atol=1e-10)
    assert (found - dense).abs().max() > 1e-3


def student(model: Any, ids: Tensor, gates: Tensor, gated: tuple[bool, ...] = GATED) -> tuple[Tensor, Tensor]:
    """States of the teacher and of the student with windows of 5 and 21."""
    teacher = TeacherPass()
    with torch.no_grad():
        full = run(model, ids, teacher)
    return full, run(model, ids, StudentPass(gates, gated, teacher.outputs, 5, 21))


def test_open_gates_are_the_teacher_and_closed_ones_stream() -> None:
    model, ids = tiny_model().double(), ids_of(150)
    full, opened = student(model, ids, torch.ones(3, 2, dtype=torch.float64))
    torch.testing.assert_close(opened, full, rtol=0, atol=1e-12)
    _, closed = student(model, ids, torch.zeros(3, 2, dtype=torch.float64))
    streaming = run(model, ids, MaskedPass(torch.zeros(3, 2, dtype=torch.bool), GATED, 5, 21))
    torch.testing.assert_close(closed, streaming, rtol=0, atol=1e-10)


def test_only_gates_get_gradients_and_they_are_right() -> None:
    model, ids = tiny_model().double(), ids_of(90)
    gates = torch.rand(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def loss(gates: Tensor) -> Tensor:
        full, mixed = student(model, ids, gates)
        return (full - mixed)[-9:].square().mean()

    # Norms compute in float32, so steps must be wide.
    assert torch.autograd.gradcheck(loss, gates, eps=3e-3, atol=3e-4, rtol=2e-3)
    loss(gates).backward()
    assert gates.grad is not None
    assert bool((gates.grad != 0).all())
    assert all(p.grad is None for p in model.parameters())


def test_a_layer_with_a_window_of_its_own_has_no_gates() -> None:
    model, ids = tiny_model("gemma3_text").double(), ids_of(150)
    gates = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    _, mixed = student(model, ids, gates, gated=(False, True, False))
    mixed.sum().backward()
    assert gates.grad is not None
    assert gates.grad[1].abs().min() > 0
    assert not gates.grad[[0, 2]].any()


def test_calls_outside_of_a_pass_are_a_bug() -> None:
    model = tiny_model()
    with gate_attention(model), pytest.raises(RuntimeError, match="outside of answering"):
        model(input_ids=ids_of(4))
    assert model.config._attn_implementation != "lserve_gates"
