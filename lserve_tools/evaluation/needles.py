"""Long documents with planted facts that a model must find: needles of several kinds in real text, and their questions.

The kinds are those of the usual long-context suites (passkeys, numbers under names, ids, chains of variables); see
RULER, arXiv:2404.06654.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from lserve_tools.errors import UsageError
from lserve_tools.text.tokenizer import Tokenizer, encode

_ADJECTIVES = ("crooked", "gaudy", "hasty", "lavish", "molten", "nimble", "opaque", "prickly", "quaint", "rugged")
_NOUNS = ("acorn", "beetle", "cactus", "dagger", "easel", "fiddle", "goblet", "hatchet", "inkwell", "jigsaw")
_WORDS = ("alfa", "bravo", "delta", "golf", "hotel", "kilo", "lima", "oscar", "papa", "romeo", "tango", "victor")
_SENTENCE = re.compile(r"\S.*?(?:[.!?](?=\s)|(?=\n)|\Z)\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Needle:
    """A planted fact.

    Args:
        kind: such as `passkey`.
        sentences: to plant, each anywhere.
        question: that it answers; empty if it only misleads.
        answer: what a right answer holds.
    """

    kind: str
    sentences: tuple[str, ...]
    question: str = ""
    answer: str = ""


@dataclass(frozen=True, slots=True)
class NeedleDocument:
    """A document and the needles in it that can be asked for."""

    name: str
    text: str
    needles: tuple[Needle, ...]


class NeedleMaker:
    """Makes documents, each a function of seed and number.

    Args:
        text: what needles are planted in.
        length: of a document, in tokens: at most that, and less by a few sentences at most.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, *, length: int, seed: int = 0) -> None:
        self._tokenizer, self._length, self._seed = tokenizer, length, seed
        self._sentences = _SENTENCE.findall(text)

    def make(self, number: int) -> NeedleDocument:
        """Make document `number`.

        Raises:
            UsageError: if the text is too short for it.
        """
        rng = random.Random(f"{self._seed} {number}")
        needles = [needle for kind in _KINDS for needle in kind(rng)]
        planted = [sentence for needle in needles for sentence in needle.sentences]
        sentences = self._filler(rng, self._length - self._count(" ".join(planted)) - 2 * len(planted))
        for sentence in planted:
            sentences.insert(rng.randrange(1, len(sentences)), sentence + " ")
        return NeedleDocument(
            f"text-{number}.txt", "".join(sentences), tuple(needle for needle in needles if needle.question)
        )

    def _filler(self, rng: random.Random, room: int) -> list[str]:
        """Consecutive sentences of at most `room` tokens."""
        first = rng.randrange(len(self._sentences))
        found: list[str] = []
        while (room := room - self._count(self._sentences[(first + len(found)) % len(self._sentences)])) > 0:
            found.append(self._sentences[(first + len(found)) % len(self._sentences)])
            if len(found) == len(self._sentences):
                raise UsageError("the text is shorter than one document.", cure="Name a longer one.")
        return found

    def _count(self, text: str) -> int:
        return len(encode(self._tokenizer, text, plain=True))


def _number(rng: random.Random, digits: int) -> str:
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def _passkeys(rng: random.Random) -> list[Needle]:
    key, safe, words = _number(rng, 5), _number(rng, 6), " ".join(rng.sample(_WORDS, 8))
    asked = "Based on the content of the text, what is the passkey to the vault?"
    return [
        Needle(
            "passkey", (f"The pass key is {key}. Remember it. {key} is the pass key.",), "What is the pass key?", key
        ),
        Needle("safe", (f"The combination of the safe is {safe}.",), "What is the combination of the safe?", safe),
        Needle("words", (f"Remember this sequence of words, it's the passkey to the vault: {words}.",), asked, words),
    ]


def _numbers(rng: random.Random) -> list[Needle]:
    names = rng.sample([f"{a}-{n}" for a in _ADJECTIVES for n in _NOUNS], 6)
    values = [_number(rng, 7) for _ in names]
    asked = "What is the special magic number for {} mentioned in the provided text?"
    return [
        Needle("number", (f"One of the special magic numbers for {n} is: {v}.",), asked.format(n) if i < 2 else "", v)
        for i, (n, v) in enumerate(zip(names, values, strict=True))
    ]


def _entries(rng: random.Random) -> list[Needle]:
    pairs = [(f"{rng.randrange(16**6):06x}", f"{rng.randrange(16**6):06x}") for _ in range(12)]
    return [
        Needle("entry", (f"Entry {k} corresponds to {v}.",), f"What does entry {k} correspond to?" if i < 2 else "", v)
        for i, (k, v) in enumerate(pairs)
    ]


def _variables(rng: random.Random) -> list[Needle]:
    chains = []
    for place in range(2):
        first, second = ("".join(rng.sample("ABCDEFGHKLMNPRSTUVWXYZ", 5)) for _ in range(2))
        value = _number(rng, 5)
        asked = "" if place else f"What is the value of variable {second}?"
        chains.append(Needle("variable", (f"VAR {first} = {value}.", f"VAR {second} = VAR {first}."), asked, value))
    return chains


_KINDS: tuple[Callable[[random.Random], list[Needle]], ...] = (_passkeys, _numbers, _entries, _variables)
