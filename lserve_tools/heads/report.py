"""What a head profile looks like: as text always, and as pictures where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from lserve_tools.heads.profile import HeadProfile
from lserve_tools.schema import LossPoint, QualityPoint

HEADS_PICTURE, CURVE_PICTURE = "heads.png", "curve.png"


def heat_map(profile: HeadProfile) -> Iterator[str]:
    """Lines of a map: a row per KV head, a column per layer, scores in tenths, streaming heads as dots."""
    layers, heads = profile.scores.shape
    width = len(str(heads - 1))
    yield f"scores of {heads} KV heads (rows) in {layers} layers (columns), in tenths; heads that stream are dots"
    margin = " " * (len("head ") + width + 2)
    yield margin + "".join(f"{layer:<10}" for layer in range(0, layers, 10)).rstrip()
    tenths = (10 * profile.scores).int().clamp(0, 9).tolist()
    retrieval = profile.retrieval.tolist()
    for head in range(heads):
        cells = (str(tenths[layer][head]) if retrieval[layer][head] else "." for layer in range(layers))
        yield f"head {head:>{width}}  " + "".join(cells)


def histogram(scores: Tensor) -> str:
    """How many scores lie in each tenth from 0 to 1."""
    return " ".join(str(int(count)) for count in scores.float().cpu().histc(10, 0, 1))


def draw(profile: HeadProfile, folder: Path) -> list[Path]:
    """Draw the scores and the curves into `folder`; without matplotlib, nothing."""
    if find_spec("matplotlib") is None:
        return []
    record = profile.record
    files = [_draw_heads(profile, folder / HEADS_PICTURE)]
    if record is not None and record.loss_curve and record.quality_curve:
        files.append(_draw_curves(record.loss_curve, record.quality_curve, record.sparsity, folder / CURVE_PICTURE))
    return files


def _figure(columns: int, width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # no pyplot: it would look for a screen

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def _draw_heads(profile: HeadProfile, path: Path) -> Path:
    layers, heads = profile.scores.shape
    figure, axes = _figure(1, 2 + layers / 5, 1.5 + heads / 4)
    image = axes.imshow(profile.scores.T.numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto")
    streaming = (~profile.retrieval).nonzero()
    axes.scatter(streaming[:, 0], streaming[:, 1], marker="x", color="white", s=18, linewidths=1)
    axes.set(xlabel="layer", ylabel="KV head", yticks=range(0, heads, max(1, heads // 8)))
    axes.set_title(f"scores; crosses stream ({profile.sparsity:.0%})", fontsize=10)
    figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=120)
    return path


def _draw_curves(losses: Sequence[LossPoint], qualities: Sequence[QualityPoint], chosen: float, path: Path) -> Path:
    figure, (left, right) = _figure(2, 9, 3.2)
    steps = [point.step for point in losses]
    left.set(xlabel="step")
    gates = left.twinx()
    lines = [
        *left.plot(steps, [point.loss for point in losses], label="loss"),
        *left.plot(steps, [point.distillation for point in losses], label="distillation loss"),
        *gates.plot(steps, [point.mean_gate for point in losses], ":", color="gray", label="mean gate (right axis)"),
    ]
    gates.set(ylim=(0, 1))
    left.set(ylim=(0, None))
    left.legend(handles=lines, loc="upper right")
    right.plot([point.sparsity for point in qualities], [point.loss for point in qualities], marker="o")
    right.axvline(chosen, linestyle="--", color="gray")
    right.set(xlabel="fraction of KV heads that stream", ylabel="loss per answer token", ylim=(0, None))
    figure.savefig(path, dpi=120)
    return path
