"""Training one gate per KV head: near 1 where streaming would change the answer, near 0 where it would not.

Weights are frozen. The loss is the distance of the answer tokens' hidden states from the full model's, plus the mean
gate: a head keeps its gate open only if that pays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lserve_tools.errors import ModelError
from lserve_tools.heads.checkpoint import read_checkpoint, write_checkpoint
from lserve_tools.heads.gates import StudentPass, TeacherPass, answering, gate_attention, gated_layers
from lserve_tools.heads.synthetic import Prompt
from lserve_tools.models.load import LoadedModel
from lserve_tools.schema import GateSettings, LossPoint

_START = 1.0  # of all gates: the full model
_EDGE = 5  # the learning rate rises over the first fifth of the steps and falls over the last
_LOWEST = 0.1  # of the learning rate at both ends


@dataclass(slots=True)
class Training:
    """Gates under training; steps are a function of their number, so a resumed run is the same run.

    Args:
        gates: `[num_layers, num_kv_heads]` float32.
        first, second: moments of Adam, of the same shape.
        curve: one point a step that was done.
    """

    gates: Tensor
    first: Tensor
    second: Tensor
    curve: list[LossPoint]

    @classmethod
    def start(cls, loaded: LoadedModel) -> Training:
        """All gates open; those of layers that stream anyway are shut and stay so.

        Raises:
            ModelError: if all layers do.
        """
        gated = torch.tensor(gated_layers(loaded.spec), device=loaded.device)
        if not gated.any():
            raise ModelError(
                f"{loaded.source.name}: all layers have a window of their own, so all heads stream already."
            )
        gates = _START * gated[:, None].float().repeat(1, loaded.spec.num_kv_heads)
        return cls(gates, torch.zeros_like(gates), torch.zeros_like(gates), [])

    @property
    def steps(self) -> int:
        """Steps done."""
        return len(self.curve)


def train_gates(
    loaded: LoadedModel,
    make_prompt: Callable[[int], Prompt],
    settings: GateSettings,
    *,
    checkpoint: Path,
    resume: bool = False,
    report: Callable[[LossPoint], None] = lambda point: None,
) -> Training:
    """Train the gates of a model, writing a checkpoint after every step.

    Args:
        make_prompt: the prompt of a step.
        checkpoint: file to write, and with `resume` to go on from if it is there.
        report: called after each step.

    Raises:
        ProfileError: if the checkpoint is damaged or of other settings.
    """
    training = Training.start(loaded)
    if resume and checkpoint.exists():
        training = Training(*read_checkpoint(checkpoint, settings, training.gates))
    while training.steps < settings.steps:
        point = _step(loaded, make_prompt(training.steps), training, settings)
        write_checkpoint(checkpoint, settings, training.gates, training.first, training.second, training.curve)
        report(point)
    return training


def learning_rate(settings: GateSettings, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    return settings.lr * _schedule(settings.steps, step)


def default_lr(steps: int) -> float:
    """The learning rate at which a gate that nothing holds open falls from 1 to 0 in just `steps` steps.

    Adam moves such a gate by the learning rate at every step. Faster, and all of them end at 0 in no order; slower, and
    they are not told from those that are held.
    """
    return 1 / sum(_schedule(steps, step) for step in range(steps))


def _schedule(steps: int, step: int) -> float:
    edge = steps / _EDGE
    return min(1.0, max((step + 1) / edge, _LOWEST), max((steps - step) / edge, _LOWEST))


def _step(loaded: LoadedModel, prompt: Prompt, training: Training, settings: GateSettings) -> LossPoint:
    gates = training.gates.clone().requires_grad_()
    distillation = distillation_loss(loaded, prompt, gates, settings.sink, settings.recent)
    mean = gates.mean()
    loss = distillation + settings.reg * mean
    loss.backward()
    found = {"loss": loss, "distillation": distillation, "mean_gate": mean}
    point = LossPoint(step=training.steps, **{name: float(value.detach()) for name, value in found.items()})
    training.curve.append(point)
    assert gates.grad is not None
    _adam(training, gates.grad, learning_rate(settings, point.step))
    return point


def distillation_loss(loaded: LoadedModel, prompt: Prompt, gates: Tensor, sink: int, recent: int) -> Tensor:
    """Squared distance of the student's hidden states from the teacher's, relative to the teacher's square.

    Hidden states are those behind the final norm at the tokens from which the answer tokens are predicted.
    """
    ids = torch.tensor([prompt.token_ids], device=loaded.device)
    places = torch.tensor(prompt.answers, device=loaded.device) - 1
    teacher = TeacherPass()
    with gate_attention(loaded.model):
        with torch.no_grad(), answering(teacher):
            wanted = loaded.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, places].float()
        with answering(StudentPass(gates, gated_layers(loaded.spec), teacher.outputs, sink, recent)):
            given = loaded.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, places].float()
    loss: Tensor = (given - wanted).square().mean() / wanted.square().mean()
    return loss


def _adam(training: Training, gradient: Tensor, lr: float) -> None:
    """One step of Adam, and back into [0, 1]."""
    steps = training.steps
    training.first = 0.9 * training.first + 0.1 * gradient
    training.second = 0.999 * training.second + 0.001 * gradient.square()
    mean, square = training.first / (1 - 0.9**steps), training.second / (1 - 0.999**steps)
    training.gates = (training.gates - lr * mean / (square.sqrt() + 1e-8)).clamp(0, 1)
