"""The order of an epoch: any place in it is had at once, and it is the same at any number of ranks."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from embark.data.loader import check_range
from embark.features.arrays import Int32s, Int64s
from embark.features.hashing import hash_counters, stream_key
from embark.values import frozen

Shuffle = Literal["rows", "blocks", "none"]
_PARTS, _BLOCKS, _ROWS = range(3)
TABLE_COLUMNS = 6


@frozen
class BlockSlice:
    """Rows that follow each other in the epoch and lie in one block."""

    part: int
    block: int  # Index of the block within its part.
    block_rows: int  # Rows of the block.
    start: int  # The first row's position in the block's own order.
    stop: int


class EpochOrder:
    """Orders parts, and the blocks of each part, by seed and epoch."""

    def __init__(
        self, part_rows: Sequence[int], block_rows: int, *, shuffle: Shuffle = "none", seed: int = 0, epoch: int = 0
    ) -> None:
        rows = np.array(part_rows, np.int64)
        num_blocks = -(-rows // block_rows)
        part = np.repeat(np.arange(len(rows)), num_blocks)
        block = np.arange(len(part)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
        self.parts: Int64s = np.arange(len(rows))  # The parts in the epoch's order.
        if shuffle != "none":
            self.parts = np.argsort(hash_counters(stream_key(seed, _PARTS, epoch), self.parts), kind="stable")
            index = np.empty_like(self.parts)
            index[self.parts] = np.arange(len(rows))
            bits = hash_counters(stream_key(seed, _BLOCKS, epoch), np.arange(len(part)))
            order = np.lexsort((bits, index[part]))
            part, block = part[order], block[order]
        self._part, self._block = part, block
        self._rows = np.minimum(block_rows, rows[part] - block * block_rows)
        self._ends = np.cumsum(self._rows)

    @property
    def num_rows(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def pieces(self, start: int, stop: int) -> list[BlockSlice]:
        """Return where rows `start` to `stop` of the epoch lie."""
        check_range(start, stop, self.num_rows)
        found = []
        at = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            rows, end = int(self._rows[at]), int(self._ends[at])
            first = start - (end - rows)
            last = min(stop - (end - rows), rows)
            found.append(BlockSlice(int(self._part[at]), int(self._block[at]), rows, first, last))
            start, at = end, at + 1
        return found


def row_order(seed: int, epoch: int, piece: BlockSlice) -> Int64s:
    """Return the order of the rows of a block, by their hashes.

    A row's number stands in the low bits of its own hash, so that a plain sort, which is twice as fast as `argsort`,
    gives the order.
    """
    numbers = np.arange(piece.block_rows, dtype=np.uint64)
    bits = hash_counters(stream_key(seed, _ROWS, epoch, piece.part, piece.block), numbers)
    low = np.uint64((1 << (piece.block_rows - 1).bit_length()) - 1)
    bits &= ~low
    bits |= numbers
    bits.sort()
    bits &= low
    return bits.view(np.int64)


def num_in_table(num_rows: int, block_rows: int) -> int:
    """Return how many blocks `block_table` has space for."""
    return num_rows // block_rows + 4


def block_table(region: Int32s, block_rows: int) -> Int64s:
    """Return [blocks, 6], in the memory that their rows' order takes later: the key of a block's order, the bits of a
    row's number, its rows, where they begin in the buffer, the first wanted of its order, and the sample behind the
    last. A block without rows stands for rows that are in order."""
    size = num_in_table(len(region), block_rows) * TABLE_COLUMNS
    return region[: 2 * size].view(np.int64).reshape(-1, TABLE_COLUMNS)


def row_key(seed: int, epoch: int, piece: BlockSlice) -> tuple[int, int]:
    """Return the key of a block's order, as a signed number, and the bits of a row's number in it."""
    key = stream_key(seed, _ROWS, epoch, piece.part, piece.block)
    return key - (key >> 63 << 64), (1 << (piece.block_rows - 1).bit_length()) - 1
