"""The order of an epoch: what seed and epoch alone say, had at any place."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embark.data.prepared.order import BlockSlice, EpochOrder, row_order

MASK = (1 << 64) - 1


def mixed(bits: int) -> int:
    """SplitMix64's last step, in plain integers."""
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


def key(*parts: int) -> int:
    value = 0
    for part in parts:
        value = mixed((value + part + 0x9E3779B97F4A7C15) & MASK)
    return value


def hashed(stream: int, counter: int) -> int:
    return mixed((counter * 0x9E3779B97F4A7C15 + stream) & MASK)


def reference(part_rows: list[int], block_rows: int, shuffle: str, seed: int, epoch: int) -> list[tuple[int, int, int]]:
    """(part, block, row in the block) of every row of the epoch, the long way."""
    blocks = [(part, block) for part, rows in enumerate(part_rows) for block in range(-(-rows // block_rows))]
    number = {of: i for i, of in enumerate(blocks)}
    parts = list(range(len(part_rows)))
    if shuffle != "none":
        parts.sort(key=lambda part: hashed(key(seed, 0, epoch), part))
    found = []
    for part in parts:
        mine = [block for of, block in blocks if of == part]
        if shuffle != "none":
            mine.sort(key=lambda block: hashed(key(seed, 1, epoch), number[part, block]))
        for block in mine:
            count = min(block_rows, part_rows[part] - block * block_rows)
            rows = list(range(count))
            if shuffle == "rows":
                stream, low = key(seed, 2, epoch, part, block), (count - 1).bit_length()
                rows.sort(key=lambda row: (hashed(stream, row) >> low, row))
            found += [(part, block, row) for row in rows]
    return found


def rows_of(pieces: list[BlockSlice], shuffle: str, seed: int, epoch: int) -> list[tuple[int, int, int]]:
    found = []
    for piece in pieces:
        order = row_order(seed, epoch, piece) if shuffle == "rows" else np.arange(piece.block_rows)
        found += [(piece.part, piece.block, int(row)) for row in order[piece.start : piece.stop]]
    return found


@settings(max_examples=60)
@given(
    part_rows=st.lists(st.integers(1, 40), min_size=1, max_size=6), block_rows=st.integers(1, 17),
    shuffle=st.sampled_from(["rows", "blocks", "none"]), seed=st.integers(0, 3), epoch=st.integers(0, 3),
    cuts=st.lists(st.integers(0, 240), max_size=5),
)
def test_any_slices_together_are_the_order_that_plain_python_gives(part_rows, block_rows, shuffle, seed, epoch, cuts):
    order = EpochOrder(part_rows, block_rows, shuffle=shuffle, seed=seed, epoch=epoch)
    total = sum(part_rows)
    assert order.num_rows == total
    edges = sorted({0, total, *(cut % (total + 1) for cut in cuts)})
    found = []
    for start, stop in pairwise(edges):
        found += rows_of(order.pieces(start, stop), shuffle, seed, epoch)
    expected = reference(part_rows, block_rows, shuffle, seed, epoch)
    assert found == expected
    assert len(set(found)) == total


def test_parts_are_announced_in_the_epochs_order():
    order = EpochOrder([10] * 20, 4, shuffle="blocks", seed=1, epoch=2)
    seen = list(dict.fromkeys(piece.part for piece in order.pieces(0, 200)))
    assert seen == order.parts.tolist()
    assert seen != list(range(20))


def test_epochs_and_seeds_differ_where_rows_are_shuffled():
    def whole(seed: int, epoch: int, shuffle: str) -> list[tuple[int, int, int]]:
        order = EpochOrder([100, 90], 32, shuffle=shuffle, seed=seed, epoch=epoch)  # type: ignore[arg-type]
        return rows_of(order.pieces(0, 190), shuffle, seed, epoch)

    assert len({tuple(whole(seed, epoch, "rows")) for seed in (1, 2) for epoch in (0, 1)}) == 4
    assert len({tuple(whole(seed, epoch, "none")) for seed in (1, 2) for epoch in (0, 1)}) == 1


def test_a_block_is_shuffled_evenly():
    piece = BlockSlice(0, 0, 1_000, 0, 1_000)
    places = np.array([np.argsort(row_order(1, epoch, piece)) for epoch in range(300)])
    assert abs(places.mean(axis=0) - 499.5).max() < 5 * 1_000 / 12**0.5 / 300**0.5


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 11)])
def test_a_place_outside_of_the_epoch_is_refused(start, stop):
    with pytest.raises(IndexError):
        EpochOrder([10], 4).pieces(start, stop)
