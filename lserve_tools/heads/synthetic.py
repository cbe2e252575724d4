"""Prompts whose answers must be retrieved: facts planted in a text, then asked for.

A prompt has the form that `run` gives it. Its answer states the facts in another order than the text, so that many
answer tokens are learnt from at once. Prompts for training and held-out ones share neither names nor text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

from lserve_tools.errors import UsageError
from lserve_tools.heads.corpus import Corpus
from lserve_tools.text.prompts import PromptFormat, document_text
from lserve_tools.text.tokenizer import Tokenizer, encode

_OWNERS = (
    "Aldport", "Birchwell", "Carrow", "Dunmere", "Eastholm", "Fenwick", "Garrick", "Hollin", "Inverloch", "Jarrow",
    "Keldale", "Lindow", "Marsden", "Norbury", "Oakham", "Penrose", "Quarley", "Redmire", "Selby", "Thornby",
    "Ulverton", "Varley", "Westmere", "Yarrow", "Ashdown", "Brackley", "Corwen", "Drayton", "Elstree", "Frome",
)  # fmt: skip
_BUILDINGS = ("warehouse", "archive", "station", "laboratory", "harbour office", "observatory", "mill", "clinic")
_WORDS = (
    "amber", "basket", "candle", "desert", "engine", "feather", "garden", "hammer", "island", "jacket",
    "kettle", "ladder", "marble", "needle", "orange", "pepper", "quartz", "ribbon", "saddle", "timber",
    "velvet", "window", "anchor", "button", "copper", "dragon", "falcon", "ginger", "hollow", "ivory",
    "jungle", "lemon", "meadow", "nickel", "olive", "pocket", "rocket", "silver", "tunnel", "walnut",
)  # fmt: skip
_FIRST = ("Anna", "Bruno", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Louis")
_LAST = ("Abbott", "Barnes", "Coleman", "Dawson", "Ellis", "Foster", "Graham", "Harper", "Lawson", "Mercer", "Norton")
_CODES, _PHRASES, _PEOPLE = (
    ("access code", "order number", "room number", "telephone number"),
    ("password", "motto", "call sign"),
    ("owner", "director", "night guard", "cashier"),
)
_QUESTION = "State every fact about {places} that the text contains."
_FILE = "notes.txt"
_SENTENCE = re.compile(r"\s*\S.*?(?:[.!?](?=\s)|(?=\n)|\Z)", re.DOTALL)
_HELD_OUT = 5  # every fifth name, and the last fifth of the text


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt with its answer.

    Args:
        answers: places in `token_ids` of the tokens that had to be retrieved, ascending.
    """

    token_ids: tuple[int, ...]
    answers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Fact:
    """`The {attribute} of {owner} is {value}.`"""

    attribute: str
    owner: str
    value: str


class PromptMaker:
    """Makes any number of prompts, each a function of the seed and its number.

    Args:
        lengths: shortest and longest prompt, answer included, in tokens.
        facts: planted in each.
        held_out: use the names and the text that training does not.

    Raises:
        UsageError: if the text is too short, or prompts too short for their facts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: PromptFormat,
        corpus: Corpus,
        *,
        lengths: tuple[int, int],
        facts: int,
        seed: int,
        held_out: bool = False,
    ) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt
        self._lengths, self._num_facts, self._seed, self._held_out = lengths, facts, seed, held_out
        sentences = _SENTENCE.findall(corpus.text)
        cut = len(sentences) - len(sentences) // _HELD_OUT
        self._sentences = sentences[cut:] if held_out else sentences[:cut]
        if len(self._sentences) < facts:
            raise UsageError(
                f"{corpus.name}: {len(sentences)} sentences are too little text to plant {facts} facts in.",
                cure="Give --corpus a folder with more text.",
            )

    def make(self, number: int) -> Prompt:
        """Make prompt `number`."""
        rng = random.Random(f"{self._seed} {'held out' if self._held_out else 'training'} {number}")
        facts = self._facts(rng)
        before = self._prompt.prefix_ids + self._encode(document_text(_FILE, "").rstrip("\n") + "\n")
        places = ", ".join(sorted({fact.owner for fact in facts}))
        after = self._encode("\n\n") + self._prompt.suffix_ids(_QUESTION.format(places=places))
        answer, values = self._answer(rng.sample(facts, len(facts)))
        planted = [self._encode(f" The {fact.attribute} of {fact.owner} is {fact.value}.") for fact in facts]
        fixed = len(before) + len(after) + len(answer) + sum(map(len, planted))
        room = rng.randint(*self._lengths) - fixed
        if room < self._lengths[0] // 8:
            raise UsageError(
                f"prompts of {self._lengths[0]} tokens are too short: {fixed} are taken by {len(facts)} facts.",
                cure=f"Give --min-length {fixed * 3 // 2} or more.",
            )
        start = before + self._haystack(rng, room, planted) + after
        return Prompt(start + answer, tuple(len(start) + value for value in values))

    def _facts(self, rng: random.Random) -> list[_Fact]:
        owners = rng.sample(self._share(_OWNERS), min(self._num_facts, len(self._share(_OWNERS))))
        facts = []
        for number in range(self._num_facts):
            owner = f"the {owners[number % len(owners)]} {rng.choice(_BUILDINGS)}"
            kind = rng.randrange(3)
            if kind == 0:
                facts.append(_Fact(rng.choice(_CODES), owner, str(rng.randrange(10_000, 100_000))))
            elif kind == 1:
                facts.append(_Fact(rng.choice(_PHRASES), owner, " ".join(rng.sample(self._share(_WORDS), 4))))
            else:
                name = f"{rng.choice(self._share(_FIRST))} {rng.choice(self._share(_LAST))}"
                facts.append(_Fact(rng.choice(_PEOPLE), owner, name))
        return facts

    def _answer(self, facts: Iterable[_Fact]) -> tuple[tuple[int, ...], list[int]]:
        """Tokens of the answer, and the places in it of the facts' values."""
        ids: tuple[int, ...] = ()
        values: list[int] = []
        for fact in facts:
            ids += self._encode(f"The {fact.attribute} of {fact.owner} is")
            value = self._encode(f" {fact.value}")
            values += range(len(ids), len(ids) + len(value))
            ids += value + self._encode(".\n")
        return ids, values

    def _haystack(self, rng: random.Random, room: int, planted: list[tuple[int, ...]]) -> tuple[int, ...]:
        """`room` tokens of consecutive sentences from a random place on, with the facts between them."""
        sentences: list[tuple[int, ...]] = []
        first = rng.randrange(len(self._sentences))
        while room > 0:
            text = self._sentences[(first + len(sentences)) % len(self._sentences)]
            sentence = self._encode(text if sentences else text.lstrip())[:room]
            sentences.append(sentence)
            room -= len(sentence)
        cuts = sorted(rng.randrange(len(sentences) + 1) for _ in planted)
        ids: tuple[int, ...] = ()
        for place in range(len(sentences) + 1):
            for cut, fact in zip(cuts, planted, strict=True):
                ids += fact if cut == place else ()
            ids += sentences[place] if place < len(sentences) else ()
        return ids

    def _share(self, names: tuple[str, ...]) -> list[str]:
        return [name for place, name in enumerate(names) if (place % _HELD_OUT == 0) == self._held_out]

    def _encode(self, text: str) -> tuple[int, ...]:
        return encode(self._tokenizer, text, plain=True)
