from __future__ import annotations

import random
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lserve_tools.text.chunking import MAX_TOKENS, MIN_TOKENS, cut_chunks
from lserve_tools.text.tokenizer import encode
from tests.helpers.small_tokenizer import small_tokenizer


def prose(lines: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = ["harbour", "permit", "master", "noon", "ledger", "tide", "signs", "before", "every"]
    return [" ".join(rng.choices(words, k=rng.randint(2, 20))) + f" {rng.random()}.\n" for _ in range(lines)]


def chunks_of(text: str) -> list[tuple[int, ...]]:
    ids = encode(small_tokenizer(), text, plain=True)
    ends = list(accumulate(cut_chunks(ids, small_tokenizer())))
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def test_chunks_keep_their_bounds_and_come_to_the_mean() -> None:
    chunks = chunks_of("".join(prose(3000)))
    lengths = [len(c) for c in chunks]
    assert all(MIN_TOKENS <= n <= MAX_TOKENS for n in lengths[:-1])
    assert 900 < sum(lengths) / len(lengths) < 1150


def test_chunks_end_at_line_ends() -> None:
    tokenizer = small_tokenizer()
    for chunk in chunks_of("".join(prose(600)))[:-1]:
        assert tokenizer.decode(chunk[-1:]).endswith("\n")


@pytest.mark.parametrize("at", [0, 700, 1499])
def test_an_insertion_moves_only_its_neighbourhood(at: int) -> None:
    lines = prose(1500)
    before = chunks_of("".join(lines))
    after = chunks_of("".join([*lines[:at], "A line that was not there before.\n", *lines[at:]]))
    assert len(before) > 30
    assert len(set(after) - set(before)) <= 3


def test_a_line_without_end_is_cut_at_the_upper_bound() -> None:
    tokenizer = small_tokenizer()
    ids = encode(tokenizer, "x" * 5000, plain=True)
    lengths = cut_chunks(ids, tokenizer)
    assert lengths[:-1] == (MAX_TOKENS,) * (len(ids) // MAX_TOKENS)
    assert sum(lengths) == len(ids)


def test_equal_lines_do_not_upset_it() -> None:
    lengths = [len(c) for c in chunks_of("the same line again\n" * 1000)]
    assert all(MIN_TOKENS <= n <= MAX_TOKENS for n in lengths[:-1])


@pytest.mark.parametrize("count", [0, 1, MIN_TOKENS - 1, MIN_TOKENS])
def test_short_documents_are_one_chunk(count: int) -> None:
    tokenizer = small_tokenizer()
    newline = encode(tokenizer, "\n", plain=True)
    assert cut_chunks(newline * count, tokenizer) == ((count,) if count else ())


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab \né漢"), max_size=400), st.integers(1, 30))
def test_chunks_always_add_up(text: str, smallest: int) -> None:
    tokenizer = small_tokenizer()
    ids = encode(tokenizer, text, plain=True)
    lengths = cut_chunks(ids, tokenizer, min_tokens=smallest, mean_tokens=2 * smallest, max_tokens=4 * smallest)
    assert sum(lengths) == len(ids)
    assert all(smallest <= n <= 4 * smallest for n in lengths[:-1])
    assert not lengths or 0 < lengths[-1] <= 4 * smallest
