"""How well a model predicts answers while some of its heads stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from lserve_tools.heads.gates import MaskedPass, answering, gate_attention, gated_layers
from lserve_tools.heads.synthetic import Prompt
from lserve_tools.models.load import LoadedModel
from lserve_tools.schema import QualityPoint


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
