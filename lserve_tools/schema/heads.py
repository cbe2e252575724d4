"""The head profile and how it was found."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class StreamingWindows(BaseModel):
    """`config.json` of a head profile, in DuoAttention's words; that tool writes more keys, which are kept.

    Args:
        sink_size, recent_size: windows of streaming heads, in tokens.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    sink_size: int = Field(ge=0)
    recent_size: int = Field(ge=1)


class ProfileData(BaseModel):
    """What the gates were trained on: passkeys planted in a corpus.

    Args:
        corpus: as it was named, or `built-in`; `corpus_sha256` of its text.
        min_length, max_length: of prompts, in tokens.
        facts: planted in each prompt.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    corpus: str
    corpus_sha256: str
    min_length: int = Field(ge=1)
    max_length: int = Field(ge=1)
    facts: int = Field(ge=1)


class GateSettings(BaseModel):
    """All that the scores of a model depend on; a resumed run must have the same.

    Args:
        method: how scores are found; `gates` trains one gate per KV head.
        lr: largest learning rate; it rises from a tenth over the first fifth of the steps and falls over the last.
        reg: weight of the mean gate beside the distillation loss.
        sink, recent: windows of streaming heads, in tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model_fingerprint: str
    method: Literal["gates"] = "gates"
    data: ProfileData
    seed: int
    steps: int = Field(ge=1)
    lr: float = Field(gt=0)
    reg: float = Field(ge=0)
    sink: int = Field(ge=0)
    recent: int = Field(ge=1)


class LossPoint(BaseModel):
    """One step of training.

    Args:
        loss: what is minimised, the distillation loss and the weighted mean gate.
        distillation: squared distance of the answer tokens' hidden states from the full model's, relative to the
            square of these.
        mean_gate: over all KV heads, before the step.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    loss: float
    distillation: float
    mean_gate: float


class QualityPoint(BaseModel):
    """How well answers are predicted with some heads streaming, on prompts that were not trained on.

    Args:
        sparsity: fraction of KV heads that stream.
        loss: cross-entropy per answer token, in nats.
        accuracy: fraction of answer tokens that are the likeliest.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sparsity: float
    loss: float
    accuracy: float


class ProfileRecord(BaseModel):
    """`profile.json` of a head profile: how it was made, what it costs, and which heads were chosen.

    Args:
        model: as it was named; `revision` of it.
        loss_curve: of the training.
        quality_curve: by rising sparsity, the first with none.
        chosen_by: `auto` is the largest sparsity whose loss is at most `tolerance` above that of none.
        mask: `[num_layers][num_kv_heads]`, True for a retrieval head.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    tool_version: str
    model: str
    revision: str | None = None
    settings: GateSettings
    loss_curve: tuple[LossPoint, ...] = ()
    quality_curve: tuple[QualityPoint, ...] = ()
    chosen_by: Literal["auto", "user"]
    tolerance: float
    sparsity: float = Field(ge=0, le=1)
    mask: tuple[tuple[bool, ...], ...]


class ProfileSummary(BaseModel):
    """What `profile-heads` found; its `--json` prints it.

    Args:
        heads: KV heads of the model; `streaming` of them stream.
        first_loss, last_loss: of the training.
        low_gates, high_gates: below 0.2 and above 0.8 at its end.
        dense, chosen: quality with no head streaming, and with those.
        training_seconds, evaluation_seconds: of wall clock.
        files: that were written.
    """

    profile: str
    profile_id: str
    model: str
    heads: int
    streaming: int
    sparsity: float
    sink: int
    recent: int
    first_loss: float
    last_loss: float
    low_gates: int
    high_gates: int
    dense: QualityPoint
    chosen: QualityPoint
    training_seconds: float
    evaluation_seconds: float
    files: list[str]
