"""Building a cache: documents in, KV on disk out, one document at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NoReturn

from tqdm import tqdm

from lserve_tools.batch.capture import DocumentCapture
from lserve_tools.batch.estimate import check_disk, estimate_bytes, estimate_seconds, show_bytes, show_seconds
from lserve_tools.batch.setup import ModelChoice, dtype_name
from lserve_tools.cache.manifest import MANIFEST, compare, read_manifest
from lserve_tools.cache.store import CacheStore
from lserve_tools.cache.writer import CacheWriter
from lserve_tools.engine.llm import LLM, EngineOptions
from lserve_tools.errors import CapacityError, DocumentError, ModelError, NotTextError, ProfileError
from lserve_tools.heads.profile import HeadProfile
from lserve_tools.models.load import LoadedModel
from lserve_tools.quant.kv import get_codec
from lserve_tools.schema import BuildSummary, LeftOut, Manifest
from lserve_tools.text.documents import Document
from lserve_tools.text.prompts import PromptFormat, document_segment, render_prompt_format
from lserve_tools.text.segments import Segment

Talk = Callable[[str], None]
DEFAULT_HEADS = Path(".lserve/heads")
_ROOM = 256  # tokens that a question and its answer need at least


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What `build-cache` is told.

    Args:
        output: folder of the cache.
        heads: a head profile; None takes the one in `.lserve/heads` if it is the model's.
        streaming_heads: `window` or `full`.
        prune: drop documents that are no longer there.
        overwrite: replace a cache of another kind.
        dry_run: say what would be done, and do nothing.
    """

    output: Path
    model: ModelChoice = field(default_factory=ModelChoice)
    heads: Path | None = None
    codec: str = "int8"
    streaming_heads: Literal["window", "full"] = "window"
    system: str | None = None
    prune: bool = False
    overwrite: bool = False
    dry_run: bool = False


def build_cache(
    documents: Sequence[Document], errors: Sequence[DocumentError], options: BuildOptions, talk: Talk
) -> BuildSummary:
    """Bring a cache up to date with a folder of documents.

    Args:
        documents, errors: what `find_documents` found.
        talk: takes one line of what a user should know while it runs.

    Raises:
        CacheMismatchError: if the cache there is of another model, prefix, codec or profile.
        CacheError: if the disk has no room.
    """
    model = options.model.resolve()
    prompt = render_prompt_format(options.model.tokenizer(model), options.system)
    if not options.overwrite and (options.output / MANIFEST).exists():
        prompt = _as_built(prompt, read_manifest(options.output), options.system)
    if prompt.system_in_user:
        talk("The model's chat template takes no system role: the system text stands before the documents instead.")
    loaded = options.model.load(model)
    profile = choose_profile(options.heads, loaded, talk)
    llm = LLM(loaded, options=EngineOptions(max_num_seqs=1), profile=profile)
    manifest = _manifest(options, loaded, llm, prompt, profile)
    build = _Build(options, loaded, llm, manifest, prompt, talk)
    build.plan(documents, errors)
    if not options.dry_run:
        build.run()
    return build.summary


def choose_profile(folder: Path | None, loaded: LoadedModel, talk: Talk) -> HeadProfile | None:
    """The profile that was named, else the one in `.lserve/heads` if it is this model's.

    Raises:
        ProfileError: if the one that was named is another model's.
    """
    if folder is None and not DEFAULT_HEADS.is_dir():
        return None
    profile = HeadProfile.load(folder or DEFAULT_HEADS)
    foreign = profile.model_fingerprint not in (None, loaded.fingerprint)
    if foreign and folder is not None:
        raise ProfileError(
            f"{folder}: the head profile is of another model.", cure="Make one: lserve-tools profile-heads"
        )
    if foreign:
        talk(f"The head profile in {DEFAULT_HEADS} is of another model and not used: all heads retrieve.")
        return None
    count = int((~profile.retrieval).sum())
    talk(f"Head profile {folder or DEFAULT_HEADS}: {count} of {profile.retrieval.numel()} KV heads stream.")
    return profile


def _as_built(prompt: PromptFormat, manifest: Manifest, system: str | None) -> PromptFormat:
    """The prompt with the cache's prefix, since templates may print the date."""
    if manifest.system != system:
        return prompt
    return replace(prompt, prefix_text=manifest.prefix_text, prefix_ids=manifest.prefix_ids)


def _manifest(
    options: BuildOptions, loaded: LoadedModel, llm: LLM, prompt: PromptFormat, profile: HeadProfile | None
) -> Manifest:
    """What the cache will be of."""
    if get_codec(options.codec).before_rope and not llm.rope.movable:
        cure = "Use --codec exact."
        raise ModelError(f"{loaded.source.name}: its keys cannot be taken out of their positions.", cure=cure)
    local = Path(loaded.source.name).expanduser()
    quantized = getattr(loaded.model.config, "quantization_config", None)
    return Manifest(
        model=str(local.resolve()) if local.exists() else loaded.source.name,
        revision=loaded.source.revision,
        model_fingerprint=loaded.fingerprint,
        tokenizer_fingerprint=loaded.tokenizer_fingerprint,
        dtype=dtype_name(loaded),
        weight_quantization=None if quantized is None else str(quantized),
        rope=llm.rope.identity(),
        num_layers=loaded.spec.num_layers,
        num_kv_heads=loaded.spec.num_kv_heads,
        head_dim=loaded.spec.head_dim,
        codec=options.codec,
        system=options.system,
        prefix_text=prompt.prefix_text,
        prefix_ids=prompt.prefix_ids,
        head_profile=profile.id if profile else None,
        head_mask=llm.windows.mask if llm.windows else None,
        sink=llm.windows.sink if llm.windows else 0,
        recent=llm.windows.recent if llm.windows else 0,
        streaming=options.streaming_heads,
    )


class _Build:
    """One build: first its plan, then its work."""

    def __init__(
        self,
        options: BuildOptions,
        loaded: LoadedModel,
        llm: LLM,
        manifest: Manifest,
        prompt: PromptFormat,
        talk: Talk,
    ) -> None:
        self._options, self._loaded, self._llm, self._manifest, self._talk = options, loaded, llm, manifest, talk
        self._prompt = prompt
        self._prefix = [prompt.prefix_segment()] if prompt.prefix_ids else []
        self._pending: list[tuple[Document, Segment]] = []
        self._keep: set[str] = set()
        self.summary = BuildSummary(
            cache=str(options.output),
            model=manifest.model,
            codec=manifest.codec,
            head_profile=manifest.head_profile,
            dry_run=options.dry_run,
        )

    def plan(self, documents: Sequence[Document], errors: Sequence[DocumentError]) -> None:
        """Find what is to be built, say what it will cost, and make sure that there is room for it."""
        for error in errors:
            self._leave_out(error)
        cached = self._cached()
        self._keep = {d.path for d in documents} | {left.path for left in self.summary.failed}
        for document in documents:
            if cached.get(document.path) == document.sha256:
                self.summary.unchanged += 1
            else:
                self._add(document)
        self.summary.failed.sort(key=lambda left: left.path)
        self.summary.pruned = len(cached.keys() - self._keep) if self._options.prune else 0
        if self._pending:
            self._estimate()

    def run(self) -> None:
        """Compute and store what was planned."""
        total = sum(len(s.token_ids) for _, s in self._pending)
        started = time.perf_counter()
        with (
            CacheWriter(self._options.output, self._manifest, overwrite=self._options.overwrite) as writer,
            tqdm(total=total, unit="tok", desc="build-cache", disable=None, leave=False) as bar,
        ):
            for document, segment in self._pending:
                self._build(writer, document, segment, bar)
            if self._options.prune:
                self.summary.pruned = len(writer.prune(self._keep).documents)
        self.summary.seconds = time.perf_counter() - started
        self._count()

    def _cached(self) -> dict[str, str]:
        """Digests of the documents that the cache has already; a damaged cache is mended first."""
        folder = self._options.output
        if self._options.overwrite or not (folder / MANIFEST).exists():
            return {}
        compare(read_manifest(folder), self._manifest, folder)
        if not self._options.dry_run:
            with CacheWriter(folder, self._manifest) as writer:
                return writer.documents()
        with closing(CacheStore.open(folder)) as store:
            return {entry.path: entry.sha256 for entry in store.documents()}

    def _add(self, document: Document) -> None:
        """Plan one document, unless it is too long."""
        segment = document_segment(self._prompt.tokenizer, document.path, document.text)
        most = self._llm.max_model_len - len(self._prompt.prefix_ids) - _ROOM
        if len(segment.token_ids) <= most:
            self._pending.append((document, segment))
            return
        context = f"the model takes {self._llm.max_model_len:,}, less {len(self._prompt.prefix_ids)} of the prefix"
        message = f"has {len(segment.token_ids):,} tokens; {context} and {_ROOM} for question and answer: {most:,}."
        self._leave_out(DocumentError(document.path, message, cure="Split it, or use a model of longer context."))

    def _leave_out(self, error: DocumentError) -> None:
        skipped = isinstance(error, NotTextError)
        (self.summary.skipped if skipped else self.summary.failed).append(LeftOut(path=error.path, reason=str(error)))
        self._talk(f"{'Skipped' if skipped else 'Error'}: {error}")

    def _estimate(self) -> None:
        """Say what the build will take."""
        segments = [segment for _, segment in self._pending]
        tokens = sum(len(s.token_ids) for s in segments)
        summary = self.summary
        summary.estimated_bytes = estimate_bytes(self._manifest, [*self._prefix, *segments])
        check_disk(self._options.output, summary.estimated_bytes)
        summary.estimated_seconds = estimate_seconds(self._llm, self._loaded, segments)
        cost = f"about {show_bytes(summary.estimated_bytes)} on disk, about {show_seconds(summary.estimated_seconds)}"
        self._talk(f"{len(segments)} documents to read, {tokens:,} tokens: {cost}.")
        summary.built_tokens, summary.built = (tokens, len(segments)) if self._options.dry_run else (0, 0)

    def _build(self, writer: CacheWriter, document: Document, segment: Segment, bar: tqdm[NoReturn]) -> None:
        """Compute one document and hand it to the writer."""
        capture = DocumentCapture(writer, self._llm.rope, self._prefix, document, segment, bar.update)
        try:
            self._llm.prefill([*self._prefix, segment], capture)
        except CapacityError as error:
            self._leave_out(DocumentError(document.path, error.message, cure="Split it."))
            return
        writer.end_document()
        self.summary.built += 1
        self.summary.built_tokens += len(segment.token_ids)

    def _count(self) -> None:
        """Sizes of what is in the cache now."""
        store = CacheStore.open(self._options.output)
        stats = store.stats()
        store.close()
        summary = self.summary
        summary.documents, summary.chunks, summary.tokens = stats.documents, stats.chunks, stats.tokens
        summary.tokens_per_second = summary.built_tokens / max(summary.seconds, 1e-9)
        summary.bytes, summary.bytes_per_token = stats.bytes, stats.bytes_per_token
        summary.ratio = stats.raw_bytes / max(stats.bytes_per_token * stats.stored_tokens, 1e-9)
