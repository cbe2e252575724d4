"""Finding a model's retrieval heads, from facts in a text to a profile on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lserve_tools import __version__
from lserve_tools.errors import UsageError
from lserve_tools.heads.corpus import load_corpus
from lserve_tools.heads.optimize import default_lr, train_gates
from lserve_tools.heads.profile import RECORD_FILE, SCORES_FILE, HeadProfile, choose_retrieval
from lserve_tools.heads.quality import best_sparsity, measure_quality, search_sparsity
from lserve_tools.heads.report import draw
from lserve_tools.heads.synthetic import Prompt, PromptMaker
from lserve_tools.models.load import LoadedModel
from lserve_tools.schema import GateSettings, LossPoint, ProfileData, ProfileRecord, ProfileSummary, QualityPoint
from lserve_tools.text.prompts import render_prompt_format

CHECKPOINT = "checkpoint.safetensors"
_LINES = 4  # of progress where no bar is shown


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What a user may choose; lengths and windows are in tokens.

    Args:
        output: folder of the profile.
        corpus: file or folder of text to plant facts in; None is the package's own.
        lr: largest learning rate; None is one that suits the steps.
        sparsity: fraction of heads that shall stream; None is the largest that loses at most `tolerance`.
        tolerance: rise of the loss per answer token, in nats.
        facts: planted in each prompt.
        held_out: prompts that quality is measured on.
    """

    output: Path
    corpus: Path | None = None
    steps: int = 16
    lr: float | None = None
    reg: float = 0.02
    sink: int = 64
    recent: int = 256
    min_length: int = 640
    max_length: int = 1024
    sparsity: float | None = None
    tolerance: float = 0.02
    seed: int = 0
    resume: bool = False
    overwrite: bool = False
    facts: int = 6
    held_out: int = 6

    def check(self) -> None:
        """Look at options and folder before the model is loaded.

        Raises:
            UsageError: if they contradict each other, or there is a profile already.
        """
        if self.max_length < self.min_length:
            raise UsageError(f"--max-length {self.max_length} is less than --min-length {self.min_length}.")
        if self.sink + self.recent >= self.min_length:
            windows = f"--sink {self.sink} and --recent {self.recent}"
            raise UsageError(
                f"{windows} span prompts of --min-length {self.min_length}, so that nothing is out of sight.",
                cure=f"Give --min-length {2 * (self.sink + self.recent)} or more.",
            )
        if self.resume and self.overwrite:
            raise UsageError("--resume and --overwrite exclude each other.", cure="Give one of them.")
        if self.output.exists() and not self.output.is_dir():
            raise UsageError(f"{self.output}: is no folder.", cure="Name another with -o.")
        if self.overwrite:
            return
        if (self.output / SCORES_FILE).exists() or (self.output / RECORD_FILE).exists():
            raise UsageError(
                f"{self.output}: there is a head profile already.", cure="Give --overwrite, or another folder with -o."
            )
        if (self.output / CHECKPOINT).exists() and not self.resume:
            raise UsageError(
                f"{self.output}: an interrupted training lies there.",
                cure="Go on with it by --resume, or begin anew with --overwrite.",
            )


def find_heads(
    loaded: LoadedModel, options: SearchOptions, say: Callable[[str], None]
) -> tuple[HeadProfile, ProfileSummary]:
    """Train gates, measure how sparse the model may be, and write the profile.

    Raises:
        UsageError: if corpus or lengths do not fit.
        ProfileError: if a checkpoint cannot be gone on from.
    """
    settings, prompts, held_out = _prepare(loaded, options)
    started = time.perf_counter()
    say(f"training one gate for each of {loaded.spec.num_layers} × {loaded.spec.num_kv_heads} KV heads")
    with _progress("gates", settings.steps) as bar:
        training = train_gates(
            loaded,
            prompts.make,
            settings,
            checkpoint=options.output / CHECKPOINT,
            resume=options.resume,
            report=lambda point: _show(bar, point, say),
        )
    trained = time.perf_counter()
    scores = training.gates.float().cpu()
    say(f"measuring answers to {len(held_out)} held-out prompts")
    curve = _quality(loaded, held_out, scores, options)
    measured = time.perf_counter()
    chosen = best_sparsity(curve, options.tolerance) if options.sparsity is None else curve[-1]
    retrieval = choose_retrieval(scores, chosen.sparsity)
    record = ProfileRecord(
        tool_version=__version__,
        model=loaded.source.name,
        revision=loaded.source.revision,
        settings=settings,
        loss_curve=tuple(training.curve),
        quality_curve=tuple(curve),
        chosen_by="auto" if options.sparsity is None else "user",
        tolerance=options.tolerance,
        sparsity=chosen.sparsity,
        mask=tuple(tuple(row) for row in retrieval.tolist()),
    )
    profile = HeadProfile(scores, options.sink, options.recent, retrieval, loaded.fingerprint, record)
    files = _write(profile, options.output)
    return profile, _summary(profile, options.output, files, chosen, (trained - started, measured - trained))


def _prepare(loaded: LoadedModel, options: SearchOptions) -> tuple[GateSettings, PromptMaker, list[Prompt]]:
    corpus = load_corpus(options.corpus)
    longest = min(options.max_length, loaded.spec.max_positions)
    if longest < options.min_length:
        raise UsageError(
            f"{loaded.source.name} takes {longest} tokens, less than --min-length {options.min_length}.",
            cure="Give a smaller --min-length.",
        )

    def maker(held_out: bool) -> PromptMaker:
        return PromptMaker(
            loaded.tokenizer,
            render_prompt_format(loaded.tokenizer),
            corpus,
            lengths=(options.min_length, longest),
            facts=options.facts,
            seed=options.seed,
            held_out=held_out,
        )

    data = ProfileData(
        corpus=corpus.name,
        corpus_sha256=corpus.sha256,
        min_length=options.min_length,
        max_length=longest,
        facts=options.facts,
    )
    settings = GateSettings(
        model_fingerprint=loaded.fingerprint,
        data=data,
        seed=options.seed,
        steps=options.steps,
        lr=default_lr(options.steps) if options.lr is None else options.lr,
        reg=options.reg,
        sink=options.sink,
        recent=options.recent,
    )
    held_out = maker(held_out=True)
    return settings, maker(held_out=False), [held_out.make(number) for number in range(options.held_out)]


def _quality(loaded: LoadedModel, prompts: list[Prompt], scores: Tensor, options: SearchOptions) -> list[QualityPoint]:
    """Quality with no head streaming, then at the wanted sparsity or at several; by rising sparsity."""
    with _progress("quality", None) as bar:

        def measure(sparsity: float) -> QualityPoint:
            retrieval = choose_retrieval(scores, sparsity)
            point = measure_quality(loaded, prompts, retrieval, sink=options.sink, recent=options.recent)
            bar.update()
            return point

        if options.sparsity is None:
            return search_sparsity(measure, options.tolerance)
        return [measure(0.0), measure(options.sparsity)]


def _write(profile: HeadProfile, folder: Path) -> list[Path]:
    """Write the profile and its pictures; the checkpoint has done its work."""
    files = profile.save(folder) + draw(profile, folder)
    (folder / CHECKPOINT).unlink(missing_ok=True)
    return files


@contextmanager
def _progress(name: str, total: int | None) -> Iterator[Any]:
    from tqdm import tqdm

    with tqdm(total=total, desc=name, unit="step", dynamic_ncols=True) as bar:
        yield bar


def _show(bar: Any, point: LossPoint, say: Callable[[str], None]) -> None:
    done = point.step + 1
    bar.set_postfix(loss=f"{point.loss:.4f}", gate=f"{point.mean_gate:.2f}", refresh=False)
    if bar.disable and done * _LINES // bar.total > point.step * _LINES // bar.total:
        say(f"step {done} of {bar.total}: loss {point.loss:.4f}, mean gate {point.mean_gate:.2f}")
    bar.update(done - bar.n)


def _summary(
    profile: HeadProfile,
    folder: Path,
    files: list[Path],
    chosen: QualityPoint,
    seconds: tuple[float, float],
) -> ProfileSummary:
    assert profile.record is not None  # it was made here
    return ProfileSummary(
        profile=str(folder),
        profile_id=profile.id,
        model=profile.record.model,
        heads=profile.retrieval.numel(),
        streaming=int((~profile.retrieval).sum()),
        sparsity=profile.sparsity,
        sink=profile.sink,
        recent=profile.recent,
        first_loss=profile.record.loss_curve[0].loss,
        last_loss=profile.record.loss_curve[-1].loss,
        low_gates=int((profile.scores < 0.2).sum()),
        high_gates=int((profile.scores > 0.8).sum()),
        dense=profile.record.quality_curve[0],
        chosen=chosen,
        training_seconds=seconds[0],
        evaluation_seconds=seconds[1],
        files=[str(path) for path in files],
    )
