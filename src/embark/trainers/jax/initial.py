"""The initial weights that the torch trainer draws on a CPU, number by number, without torch.

torch draws a float from 24 bits of one 32-bit number of the Mersenne Twister, which numpy has too.
"""

import math
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.spec import ModelSpec, Table

ROWS_PER_BLOCK = 65_536
"""Each block of a table has a generator of its own, so that any part of it can be drawn alone."""
F32 = NDArray[np.float32]


def initial_rows(table: Table, block: int, seed: int) -> F32:
    """The rows of one block, uniform in ±sqrt(1 / rows)."""
    start, stop = block * ROWS_PER_BLOCK, min((block + 1) * ROWS_PER_BLOCK, table.rows)
    bits = _Bits(zlib.crc32(f"{seed}/{table.name}/{block}".encode()))
    return bits.uniform((stop - start, table.dim or 0), math.sqrt(1 / table.rows))


def initial_dense(model: ModelSpec, seed: int) -> dict[str, F32]:
    """Weights and biases of the dense layers by torch's names, drawn in torch's order."""
    bits = _Bits(seed)
    values: dict[str, F32] = {}
    for name, (num_out, num_in), has_bias in dense_shapes(model):
        # torch: kaiming_uniform_(a=sqrt(5)) of the weight; its bound comes to that of the bias, by other roundings.
        std = math.sqrt(2.0 / (1 + math.sqrt(5) ** 2)) / math.sqrt(num_in)
        values[f"{name}.weight"] = bits.uniform((num_out, num_in), math.sqrt(3.0) * std)
        if has_bias:
            values[f"{name}.bias"] = bits.uniform((num_out,), 1 / math.sqrt(num_in))
    return values


def dense_shapes(model: ModelSpec) -> list[tuple[str, tuple[int, int], bool]]:
    """Every linear layer by torch's name: its outputs and inputs, and whether it has a bias."""
    tables = model.table_list()
    shapes: list[tuple[str, tuple[int, int], bool]] = []
    if model.num_dense:
        shapes += _mlp_shapes("bottom", model.num_dense, (*model.bottom_mlp, model.embedding_dim))
    if model.kind == "dcnv2":
        width = sum(t.dim or 0 for t in tables) + (model.embedding_dim if model.num_dense else 0)
        rank = min(model.cross_rank, width)
        layers = range(model.num_cross_layers)
        shapes += [(f"down.{i}", (rank, width), False) for i in layers]
        shapes += [(f"up.{i}", (width, rank), True) for i in layers]
    else:
        num_vectors = len(tables) + bool(model.num_dense)
        passed_on = model.embedding_dim * (1 if model.num_dense else num_vectors)
        width = passed_on + num_vectors * (num_vectors - 1) // 2
    return shapes + _mlp_shapes("top", width, (*model.top_mlp, 1))


def _mlp_shapes(name: str, width: int, sizes: tuple[int, ...]) -> list[tuple[str, tuple[int, int], bool]]:
    """Numbered by twos: between two linear layers stands a ReLU."""
    widths = (width, *sizes)
    return [(f"{name}.{2 * i}", (widths[i + 1], widths[i]), True) for i in range(len(sizes))]


class _Bits:
    """torch's generator on a CPU."""

    def __init__(self, seed: int) -> None:
        twister: Any = np.random.MT19937()
        twister._legacy_seeding(seed & 0xFFFFFFFF)
        self._generator = np.random.Generator(twister)

    def uniform(self, shape: tuple[int, ...], bound: float) -> F32:
        low, high = np.float32(-bound), np.float32(bound)
        bits = self._generator.integers(0, 0xFFFFFFFF, shape, np.uint32, endpoint=True)
        unit = (bits & 0xFFFFFF) * (1.0 / (1 << 24))
        unit *= np.float64(high - low)
        unit += np.float64(low)
        return unit.astype(np.float32)
