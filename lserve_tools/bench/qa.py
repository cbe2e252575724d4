"""Many questions over a few documents: transformers as people use it, and this engine over its cache, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lserve_tools.batch.build import BuildOptions, build_cache
from lserve_tools.batch.setup import ModelChoice, Setup, open_setup
from lserve_tools.bench.baseline import Timed, Transformers
from lserve_tools.bench.memory import peak_bytes, reset_peak
from lserve_tools.engine.llm import LLM
from lserve_tools.engine.sampling import SamplingParams
from lserve_tools.engine.sequence import Request
from lserve_tools.errors import UsageError
from lserve_tools.models.attention import NAME
from lserve_tools.schema import BenchContender, BenchQa
from lserve_tools.text.documents import find_documents
from lserve_tools.text.tokenizer import Tokenizer, encode

Talk = Callable[[str], None]
_ROUNDS = 3  # of what is timed once only otherwise: on a busy machine a single figure says little
_ASKED = (
    "What is the main point of the text?",
    "Who is mentioned in the text?",
    "What does the author think about it?",
    "Which example does the text give?",
    "What happens at the end of the text?",
    "Why does the author write this?",
    "What is the most surprising sentence?",
    "What should the reader do?",
)


@dataclass(frozen=True, slots=True)
class QaOptions:
    """What is measured.

    Args:
        corpus: text files that the documents are cut from.
        folder: where documents and cache are written.
        document_tokens: of each document, about.
        answer_tokens: of every answer, no more and no less.
    """

    corpus: Path
    folder: Path
    model: ModelChoice
    codec: str = "int8"
    documents: int = 4
    document_tokens: int = 4000
    questions: int = 8
    answer_tokens: int = 32


def bench_qa(options: QaOptions, talk: Talk) -> BenchQa:
    """Measure three contenders on the same questions, one after the other.

    Raises:
        UsageError: if the corpus is too short.
    """
    source = options.model.resolve()
    docs = options.folder / "docs"
    _write_documents(options, options.model.tokenizer(source), docs)
    talk("Building the cache.")
    texts, errors = find_documents(docs)
    settings = BuildOptions(options.folder / "cache", options.model, codec=options.codec)
    build = build_cache(texts, errors, settings, talk)
    setup = open_setup(options.model, options.folder / "cache", None, True, folder=docs)
    loaded = setup.choice.load(setup.model)
    loaded = replace(loaded, spec=replace(loaded.spec, eos_token_ids=()))  # answers of equal length
    asked = _requests(options, setup)
    contexts = [[t for s in request.segments for t in s.token_ids] for request in asked]
    suffixes = [request.suffix_ids for request in asked]
    loaded.model.set_attn_implementation("sdpa")
    peer = Transformers(loaded, options.answer_tokens)
    talk("transformers, every question from the start.")
    reset_peak()
    first = _contender("transformers, a prompt a question", peer.each_from_the_start(contexts, suffixes))
    talk("transformers, one prefill a document.")
    reset_peak()
    second = _contender("transformers, a prefill a document", peer.one_prefill_a_document(contexts, suffixes))
    loaded.model.set_attn_implementation(NAME)
    talk("lserve-tools, from its cache.")
    reset_peak()
    llm = LLM(loaded, source=setup.source)
    ours, one, sixteen = _measure_ours(llm, asked, talk)
    return BenchQa(
        model=setup.model.name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        prompt_tokens=statistics.mean(r.num_prompt_tokens for r in asked),
        questions=len(asked),
        contenders=[first, second, ours],
        build_seconds=build.seconds,
        bytes_on_disk=build.bytes,
        one_question_seconds=one,
        sixteen_questions_seconds=sixteen,
        next_tokens=sum(map(len, first.token_ids)),
        next_tokens_agreeing=_agreeing_tokens(llm, asked, first.token_ids),
    )


def _measure_ours(llm: LLM, asked: Sequence[Request], talk: Talk) -> tuple[BenchContender, float, float]:
    """The whole batch, each question alone, and sixteen questions on one context against one; all from disk."""
    timed, began = Timed(), time.perf_counter()
    answers = {c.id: c for c in llm.generate(asked)}
    timed.seconds = time.perf_counter() - began
    timed.token_ids = [list(answers[r.id].token_ids) for r in asked]
    talk("lserve-tools, each question alone.")
    for request in asked:
        llm.forget_contexts()
        (answer,) = llm.generate([replace(request, sampling=SamplingParams(max_tokens=1))])
        timed.first_token.append(answer.time_to_first_token)
    same = [replace(asked[0], id=str(i), suffix_ids=asked[i % len(asked)].suffix_ids) for i in range(16)]
    rounds = [(_seconds(llm, same[:1]), _seconds(llm, same)) for _ in range(_ROUNDS)]
    one, sixteen = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
    return _contender("lserve-tools", timed), one, sixteen


def _agreeing_tokens(llm: LLM, asked: Sequence[Request], answers: Sequence[Sequence[int]]) -> int:
    """How many tokens of greedy answers are the engine's choice too, after the same tokens before them."""
    expected = {
        replace(r, id=f"{r.id} {i}", suffix_ids=(*r.suffix_ids, *answer[:i]), sampling=SamplingParams(max_tokens=1)): t
        for r, answer in zip(asked, answers, strict=True)
        for i, t in enumerate(answer)
    }
    chosen = {c.id: c.token_ids for c in llm.generate(expected)}
    return sum(chosen[request.id] == (token,) for request, token in expected.items())


def _seconds(llm: LLM, requests: Sequence[Request]) -> float:
    llm.forget_contexts()
    began = time.perf_counter()
    list(llm.generate(requests))
    return time.perf_counter() - began


def _contender(name: str, timed: Timed) -> BenchContender:
    return BenchContender(
        name=name,
        seconds=timed.seconds,
        first_token_seconds=statistics.median(timed.first_token),
        peak_bytes=peak_bytes(),
        token_ids=timed.token_ids,
    )


def _requests(options: QaOptions, setup: Setup) -> list[Request]:
    """Questions document by document, with about the same wording for each."""
    how = SamplingParams(max_tokens=options.answer_tokens)
    prefix = setup.prompt.prefix_segment()
    requests = []
    for document in setup.library.find(None):
        for i in range(options.questions):
            suffix = setup.prompt.suffix_ids(_ASKED[i % len(_ASKED)])
            requests.append(Request(f"{document.name} {i}", (prefix, document), suffix, how))
    return requests


def _write_documents(options: QaOptions, tokenizer: Tokenizer, folder: Path) -> None:
    """Cut the corpus into documents of about equal length in tokens."""
    texts, _ = find_documents(options.corpus)
    ids: list[int] = []
    wanted = options.documents * options.document_tokens
    for document in texts:
        ids += encode(tokenizer, document.text, plain=True)
        if len(ids) >= wanted:
            break
    if len(ids) < wanted:
        raise UsageError(
            f"{options.corpus}: {len(ids):,} tokens of text, {wanted:,} are needed.", cure="Name more with --corpus."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(options.documents):
        part = ids[i * options.document_tokens : (i + 1) * options.document_tokens]
        (folder / f"document-{i + 1}.txt").write_text(str(tokenizer.decode(part)), encoding="utf-8")
