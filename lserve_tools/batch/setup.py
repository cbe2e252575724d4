"""What a run stands on: model, cache and manifest, the form of prompts, and the documents that lines may name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lserve_tools.batch.library import CachedLibrary, FolderLibrary, Library
from lserve_tools.cache.manifest import MANIFEST
from lserve_tools.cache.store import CacheStore
from lserve_tools.engine.llm import LLM, EngineOptions
from lserve_tools.errors import UsageError
from lserve_tools.heads.profile import HeadProfile
from lserve_tools.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from lserve_tools.models.load import (
    LoadedModel,
    ModelLimits,
    ModelSource,
    load_model,
    load_tokenizer,
    read_limits,
    resolve_model,
)
from lserve_tools.quant.kv import get_codec
from lserve_tools.schema import Manifest
from lserve_tools.text.prompts import PromptFormat, render_prompt_format
from lserve_tools.text.segments import Segment
from lserve_tools.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model and how to load it, as the user asked for it."""

    name: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    def resolve(self) -> ModelSource:
        """Find the model."""
        return resolve_model(self.name, revision=self.revision)

    def tokenizer(self, source: ModelSource) -> Tokenizer:
        """Load its tokenizer."""
        return load_tokenizer(source, trust_remote_code=self.trust_remote_code)

    def limits(self, source: ModelSource) -> ModelLimits:
        """What is known of it before it is loaded."""
        return read_limits(source, dtype=self.dtype, device=self.device, trust_remote_code=self.trust_remote_code)

    def load(self, source: ModelSource) -> LoadedModel:
        """Load it."""
        return load_model(source, dtype=self.dtype, device=self.device, trust_remote_code=self.trust_remote_code)


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that a run needs but the loaded model.

    Args:
        store: the open cache, or None; `use_cache` tells whether its KV is used, or its documents only.
    """

    choice: ModelChoice
    model: ModelSource
    tokenizer: Tokenizer
    prompt: PromptFormat
    library: Library
    profile: HeadProfile | None
    store: CacheStore | None
    use_cache: bool

    @property
    def source(self) -> CacheStore | None:
        """Where KV is taken from."""
        return self.store if self.use_cache else None

    def load(self) -> LoadedModel:
        """Load the model."""
        return self.choice.load(self.model)

    def engine(self, loaded: LoadedModel, options: EngineOptions) -> LLM:
        """The engine over the cache.

        Raises:
            CacheMismatchError: if KV in the cache is not what the model would compute.
        """
        llm = LLM(loaded, options=options, profile=self.profile, source=self.source)
        if self.source is not None:
            self.source.check(dtype=dtype_name(loaded), rope=llm.rope.identity())
        return llm


def dtype_name(loaded: LoadedModel) -> str:
    """A model's dtype as manifests have it."""
    return str(loaded.dtype).removeprefix("torch.")


def open_setup(choice: ModelChoice, cache: Path, heads: Path | None, use_cache: bool, *, folder: Path) -> Setup:
    """Find model, cache and documents.

    Args:
        cache: folder of the cache; without its KV being used it may be missing.
        heads: folder of a head profile, which must be the cache's.
        folder: where documents are looked for if there is no cache.

    Raises:
        UsageError: if a cache is to be used and there is none.
        CacheMismatchError: if the cache is of another model, tokenizer or profile.
    """
    profile = HeadProfile.load(heads) if heads is not None else None
    if not (cache / MANIFEST).exists():
        if use_cache and not cache.exists():
            cure = "Build it with `lserve-tools build-cache DOCS`, name another with --cache, or give --no-cache."
            raise UsageError(f"{cache}: there is no cache.", cure=cure)
        if not use_cache:
            return _without_cache(choice, profile, folder)
    store = CacheStore.open(cache)
    manifest = store.manifest
    choice = _as_built(choice, manifest)
    model = choice.resolve()
    store.check(
        model=model.name,
        model_fingerprint=model_fingerprint(model.path),
        tokenizer_fingerprint=tokenizer_fingerprint(model.path),
    )
    if profile is not None:
        store.check(head_profile=profile.id)
    tokenizer = choice.tokenizer(model)
    prompt = render_prompt_format(tokenizer, manifest.system)
    prompt = replace(prompt, prefix_text=manifest.prefix_text, prefix_ids=manifest.prefix_ids)
    library = CachedLibrary(Segment(d.path, d.token_ids, d.chunks) for d in store.documents())
    return Setup(choice, model, tokenizer, prompt, library, _profile_of(manifest), store, use_cache)


def _without_cache(choice: ModelChoice, profile: HeadProfile | None, folder: Path) -> Setup:
    model = choice.resolve()
    tokenizer = choice.tokenizer(model)
    library = FolderLibrary(folder, tokenizer)
    return Setup(choice, model, tokenizer, render_prompt_format(tokenizer), library, profile, None, False)


def _as_built(choice: ModelChoice, manifest: Manifest) -> ModelChoice:
    """The choice with what it leaves open taken from the manifest."""
    if choice.name is None:
        choice = replace(choice, name=manifest.model, revision=choice.revision or manifest.revision)
    if choice.dtype == "auto" and get_codec(manifest.codec).lossless:
        choice = replace(choice, dtype=manifest.dtype)
    return choice


def _profile_of(manifest: Manifest) -> HeadProfile | None:
    """The head profile that a cache was built with, as far as the engine needs it."""
    if manifest.head_mask is None:
        return None
    retrieval = torch.tensor(manifest.head_mask)
    return HeadProfile(retrieval.float(), manifest.sink, manifest.recent, retrieval, manifest.model_fingerprint)
