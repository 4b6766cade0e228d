"""Words become numbers by one definition, whatever way they are laid out."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embark.features.arrow.cells import as_text, hash_bytes, hash_words, trim

MASK = (1 << 64) - 1


def mixed(state: int, word: int) -> int:
    """SplitMix64's output function, as its authors give it."""
    bits = (word * 0x9E3779B97F4A7C15 + state) & MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


def plain_hash(text: bytes) -> int:
    """The length, then eight bytes at a time, the last filled up with zeros."""
    state = mixed(0x656D6261726B2D77, len(text))
    for start in range(0, len(text), 8):
        state = mixed(state, int.from_bytes(text[start : start + 8], "little"))
    return state


@settings(max_examples=150)
@given(st.lists(st.binary(max_size=40)), st.integers(0, 5))
def test_the_hash_is_the_plain_one(texts: list[bytes], offset: int):
    for kind in (pa.binary(), pa.large_binary()):
        array = pa.array(texts, kind)[offset:]
        assert hash_bytes(array).tolist() == [plain_hash(text) for text in texts[offset:]]


def test_the_hash_never_changes():
    assert hash_bytes(pa.array(["Toy Story (1995)"])).tolist() == [606595759366998471]


@pytest.mark.parametrize("num_different", [3, 5_000], ids=["few words", "all different"])
def test_repeated_words_and_unique_ones_hash_the_same(num_different: int):
    words = [f"  word {i % num_different}" for i in range(5_000)]
    assert hash_words(pa.array(words)).tolist() == [plain_hash(word.strip().encode()) for word in words]


def test_nulls_stand_in_nobodys_way():
    array = pa.array(["a", None, "", None, "b"] * 3)
    for some in (array, array[1:4], pa.array([None, None], pa.string()), pa.array([], pa.string())):
        keys = hash_words(some)
        assert len(keys) == len(some)
        assert all(keys[i] == plain_hash(w.encode()) for i, w in enumerate(some.to_pylist()) if w is not None)


def test_bytes_that_are_no_text_are_hashed():
    hashed = hash_words(pa.array([b"\xff\xfe\x00", b" \xff\xfe\x00 "] * 4, pa.binary()))
    assert set(hashed.tolist()) == {plain_hash(b"\xff\xfe\x00")}


def test_trimming_changes_only_what_has_spaces():
    clean = pa.array(["a b", "", None, "c"])
    assert trim(clean) is clean
    assert trim(pa.array([" a b\t", "", None, "c"])).to_pylist() == ["a b", "", None, "c"]
    assert as_text(pa.array([b"x", None, b"yy"], pa.binary())[1:]).to_pylist() == [None, "yy"]
