"""Keys tell apart all that gives other KV, and nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lserve_tools.cache.keys import KEY_BYTES, RootIdentity, chain_keys, content_key, prefix_key

IDENTITY = RootIdentity(
    model="m",
    tokenizer="t",
    dtype="float32",
    weight_quantization=None,
    rope="r",
    sink=4,
    recent=8,
    head_mask=((True, False), (True, True)),
    streaming="window",
    codec="int8",
    format_version=1,
    prefix_ids=(1, 2, 3),
)
OTHERS: dict[str, Any] = {
    "model": "m2",
    "tokenizer": "t2",
    "dtype": None,
    "weight_quantization": "4bit",
    "rope": "r2",
    "sink": 5,
    "recent": 9,
    "head_mask": ((False, True), (True, True)),
    "streaming": "full",
    "codec": "exact",
    "format_version": 2,
    "prefix_ids": (1, 2),
}


def blake(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def test_keys_are_the_digests_that_the_format_says() -> None:
    assert content_key([1, 70000]) == blake(bytes([1, 0, 0, 0, 0x70, 0x11, 1, 0]))
    assert prefix_key(b"a" * 32, b"b" * 32) == blake(b"a" * 32 + b"b" * 32)
    assert len(content_key([])) == KEY_BYTES == 32


def test_the_root_key_stays_the_same_for_ever() -> None:
    """Another one would make every cache in the world unusable: change it with the format version only."""
    assert IDENTITY.digest().hex() == "3b3285c2954b4d1751d9323db61000adc54c8a033e02e495d0a420b4715f88c4"


def test_every_field_of_the_identity_changes_the_root_key() -> None:
    assert set(OTHERS) == {field.name for field in fields(RootIdentity)}
    digests = [replace(IDENTITY, **{name: value}).digest() for name, value in OTHERS.items()]
    assert len({*digests, IDENTITY.digest()}) == len(OTHERS) + 1


@given(ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), data=st.data())
def test_a_key_says_where_chunks_end_and_what_was_before(ids: list[int], data: st.DataObject) -> None:
    cuts = sorted({data.draw(st.integers(0, len(ids))) for _ in range(5)} - {0, len(ids)})
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    keys = chain_keys(b"root", ids, lengths)
    assert len(set(keys)) == len(lengths)
    assert chain_keys(b"root", ids[: lengths[0]], lengths[:1]) == keys[:1]
    if len(lengths) > 1:
        assert chain_keys(keys[0], ids[lengths[0] :], lengths[1:]) == keys[1:]
        assert chain_keys(b"root", ids, [len(ids)])[-1] != keys[-1]
    other = [*ids[:-1], ids[-1] ^ 1]
    assert chain_keys(b"root", other, lengths)[-1] != keys[-1]
    assert chain_keys(b"loot", ids, lengths)[0] != keys[0]


def test_token_ids_may_come_in_any_sequence() -> None:
    assert content_key((3, 4)) == content_key([3, 4]) == content_key(np.array([3, 4]).tolist())


def test_chunks_must_cut_all_tokens() -> None:
    with pytest.raises(ValueError, match="chunks of 3 tokens do not cut 4 tokens"):
        chain_keys(b"", [1, 2, 3, 4], [1, 2])
