"""How well a model predicts answers while some of its heads stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from lserve_tools.heads.gates import MaskedPass, answering, gate_attention, gated_layers
from lserve_tools.heads.synthetic import Prompt
from lserve_tools.models.load import LoadedModel
from lserve_tools.schema import QualityPoint

_HALF, _ABOVE, _BELOW = 0.5, (0.625, 0.75, 0.875), (0.375, 0.25, 0.125)  # sparsities, in the order they are tried


@torch.inference_mode()
def measure_quality(
    loaded: LoadedModel, prompts: Sequence[Prompt], retrieval: Tensor, *, sink: int, recent: int
) -> QualityPoint:
    """Loss and accuracy over all answer tokens of `prompts`.

    Args:
        retrieval: `[num_layers, num_kv_heads]` bool; the other heads stream.
        sink, recent: their windows, in tokens.
    """
    step = MaskedPass(retrieval.cpu(), gated_layers(loaded.spec), sink, recent)
    loss, right, count = 0.0, 0, 0
    with gate_attention(loaded.model), answering(step):
        for prompt in prompts:
            ids = torch.tensor([prompt.token_ids], device=loaded.device)
            places = torch.tensor(prompt.answers, device=loaded.device)
            logits = loaded.model(input_ids=ids, use_cache=False, logits_to_keep=places - 1).logits[0].float()
            wanted = ids[0, places]
            loss += float(functional.cross_entropy(logits, wanted, reduction="sum"))
            right += int((logits.argmax(dim=-1) == wanted).sum())
            count += len(places)
    sparsity = float((~retrieval).double().mean())
    return QualityPoint(sparsity=sparsity, loss=loss / count, accuracy=right / count)


def best_sparsity(points: Sequence[QualityPoint], tolerance: float) -> QualityPoint:
    """The point of largest sparsity whose loss is at most `tolerance` above that of the least sparse one."""
    allowed = min(points, key=lambda point: point.sparsity).loss + tolerance
    return max((point for point in points if point.loss <= allowed), key=lambda point: point.sparsity)


def search_sparsity(measure: Callable[[float], QualityPoint], tolerance: float) -> list[QualityPoint]:
    """Measure with no head streaming and with half of them; then with more as long as that is good, else with fewer.

    Returns:
        Points by rising sparsity, among them the sparsest that loses at most `tolerance`.
    """
    points = [measure(0.0), measure(_HALF)]
    allowed = points[0].loss + tolerance
    half_is_good = points[-1].loss <= allowed
    for sparsity in _ABOVE if half_is_good else _BELOW:
        points.append(measure(sparsity))
        if (points[-1].loss <= allowed) != half_is_good:
            break
    return sorted(points, key=lambda point: point.sparsity)
