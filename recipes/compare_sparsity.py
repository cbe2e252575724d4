"""What page selection and small pages cost in quality: facts planted in long documents, found or not.

Documents of real text with needles are read once into caches (exact, and int8 for the second table). `selection` counts
answers that hold their fact: dense attention, three token budgets, and the same budgets with one pair of bounds a page
instead of one per 16 tokens. `pages` compares next-token distributions with those of exact pages from exact shards,
after the same tokens.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from lserve_tools.batch.build import BuildOptions, build_cache
from lserve_tools.batch.setup import ModelChoice, Setup, open_setup
from lserve_tools.bench.essays import write_essays
from lserve_tools.engine.llm import LLM, EngineOptions, KVCacheDtype
from lserve_tools.engine.sampling import SamplingParams
from lserve_tools.engine.sequence import Request
from lserve_tools.evaluation.fidelity import answer_logits, compare
from lserve_tools.evaluation.needles import Needle, NeedleMaker
from lserve_tools.models.load import LoadedModel
from lserve_tools.text.documents import find_documents

BUDGETS = (2048, 1024, 512)
PAGES: tuple[KVCacheDtype, ...] = ("auto", "int8", "int4")
ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Asked:
    """A question and what its answer must hold."""

    request: Request
    needle: Needle

    def holds(self, text: str) -> bool:
        """Whether an answer is right."""
        return self.needle.answer.casefold() in text.casefold()


def write_documents(options: argparse.Namespace, choice: ModelChoice, folder: Path) -> dict[str, tuple[Needle, ...]]:
    """Write the documents into `folder`; gives their needles by name."""
    text = write_essays(folder.parent).read_text(encoding="utf-8")
    tokenizer = choice.tokenizer(choice.resolve())
    maker = NeedleMaker(tokenizer, text, length=options.length, seed=options.seed)
    folder.mkdir()
    documents = [maker.make(number) for number in range(options.documents)]
    for document in documents:
        (folder / document.name).write_text(document.text, encoding="utf-8")
    return {document.name: document.needles for document in documents}


def build(docs: Path, cache: Path, choice: ModelChoice, codec: str) -> None:
    """Read the documents into a cache."""
    documents, errors = find_documents(docs)
    build_cache(documents, errors, BuildOptions(cache, choice, codec=codec), lambda _: None)


def questions(setup: Setup, needles: dict[str, tuple[Needle, ...]]) -> list[Asked]:
    """Every needle's question over its document."""
    prefix = setup.prompt.prefix_segment()
    segments = [s for s in (prefix,) if s.token_ids]
    how = SamplingParams(max_tokens=ANSWER_TOKENS)
    return [
        Asked(
            Request(f"{d.name} {i}", (*segments, d), setup.prompt.suffix_ids(needle.question), how),
            needle,
        )
        for d in setup.library.find(None)
        for i, needle in enumerate(needles[d.name])
    ]


def compare_selection(loaded: LoadedModel, setup: Setup, asked: Sequence[Asked], most: int) -> Iterator[str]:
    """Rows of the first table."""
    kinds = list(dict.fromkeys(a.needle.kind for a in asked))
    yield f"| answers that hold their fact | {' | '.join(kinds)} | all | tokens as dense | seconds |"
    yield "|---" * (len(kinds) + 4) + "|"
    plain = EngineOptions(max_model_len=most)
    variants = [("dense", plain)]
    for size, name in ((16, "budget {}"), (64, "budget {}, one bound a page")):
        variants += [(name.format(b), replace(plain, token_budget=b, logical_size=size)) for b in BUDGETS]
    dense: dict[str, tuple[int, ...]] = {}
    for name, options in variants:
        began = time.perf_counter()
        llm = LLM(loaded, options=options, source=setup.source)
        answers = {c.id: c for c in llm.generate([a.request for a in asked])}
        seconds = time.perf_counter() - began
        dense = dense or {i: c.token_ids for i, c in answers.items()}
        right = Counter(a.needle.kind for a in asked if a.holds(answers[a.request.id].text))
        total = Counter(a.needle.kind for a in asked)
        same = sum(answers[i].token_ids == tokens for i, tokens in dense.items())
        cells = [f"{right[kind]}/{total[kind]}" for kind in kinds]
        cells += [f"{right.total()}/{total.total()}", f"{same}/{len(asked)}", f"{seconds:.0f}"]
        yield f"| {name} | {' | '.join(cells)} |"


def compare_pages(loaded: LoadedModel, setups: dict[str, Setup], asked: Sequence[Asked], most: int) -> Iterator[str]:
    """Rows of the second table."""
    requests = [a.request for a in asked]
    yield "| shards | pages | KL, nats a token | worst token | same likeliest token |"
    yield "|---" * 5 + "|"
    reference: dict[str, Tensor] = {}
    forced: dict[str, Sequence[int]] | None = None
    for codec, setup in setups.items():
        for pages in PAGES:
            llm = LLM(loaded, options=EngineOptions(max_model_len=most, kv_cache_dtype=pages), source=setup.source)
            found = answer_logits(llm, requests, forced)
            reference = reference or found
            forced = {name: rows.argmax(-1).tolist() for name, rows in reference.items()}
            result = compare(reference, found)
            cells = [f"{result.kl:.5f}", f"{result.worst_kl:.3f}", f"{result.top1:.2%} of {result.tokens}"]
            yield f"| {codec} | {pages} | {' | '.join(cells)} |"


def main() -> None:
    """Write, build, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["selection", "pages"])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--length", type=int, default=7900, help="tokens of a document")
    parser.add_argument("--documents", type=int, default=6, help="8 questions each")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    choice = ModelChoice(options.model, dtype=options.dtype)
    most = options.length + 300
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        needles = write_documents(options, choice, folder / "docs")
        codecs = ["exact"] if options.table == "selection" else ["exact", "int8"]
        setups: dict[str, Setup] = {}
        for codec in codecs:
            build(folder / "docs", folder / codec, choice, codec)
            setups[codec] = open_setup(choice, folder / codec, None, True, folder=folder)
        loaded = setups["exact"].load()
        asked = questions(setups["exact"], needles)
        print(f"{options.model}, {loaded.dtype}, {loaded.device}: {len(asked)} questions", end=" ")
        print(f"over {options.documents} documents of {options.length} tokens", flush=True)
        rows = (
            compare_selection(loaded, setups["exact"], asked, most)
            if options.table == "selection"
            else compare_pages(loaded, setups, asked, most)
        )
        for row in rows:
            print(row, flush=True)


if __name__ == "__main__":
    main()
