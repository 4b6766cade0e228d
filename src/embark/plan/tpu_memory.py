"""Bytes on a chip of a TPU, part by part: what JAX's trainer keeps there as the chip lays it out, and what the
compiler's program needs during a step. The latter is a form fitted to compiled programs (bench/tpu_memory.csv)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from embark.model.jax_layout import LINE_WIDTHS, MAX_IN_FLIGHT, NUM_AHEAD, Group, Layout, expected_capacities
from embark.model.placement import table_value_bytes
from embark.model.work import Layers, layers_of
from embark.plan.memory import DENSE_STATES
from embark.spec import RunSpec

LINE = LINE_WIDTHS["tpu"]
SUBLANES = 8
"""Lines that lie together, of numbers of four bytes."""
HISTOGRAM_BYTES = 2 * 16_384 * 4
"""The counts that AUC is made of."""
BATCHES_AHEAD = MAX_IN_FLIGHT + NUM_AHEAD + 1
"""Batches on a chip besides the one that is trained: the host may be 8 steps ahead, two wait, one is on its way."""
PROGRAM_BYTES, PROGRAM_BYTES_PER_TABLE = 8e6, 0.4e6
PROGRAM_BYTES_PER_ID, MOST_IDS = 150, 2**17
"""For each id that a chip sorts; the code of sorts that are larger grows little."""
VMEM_BYTES = {"TPU-v5e": 96 * 2.0**20, "TPU-v6e": 96 * 2.0**20, "TPU-v5p": 16 * 2.0**20}
"""Of a chip's fast memory, what takes a step's arrays off the large one, by compiled programs; others have little."""
LEAST_BYTES = 2e6
"""That even a tiny step's program puts there."""
SPILLED = 1.2
"""Over the arrays of a step, what the compiled program takes: gaps between them, and registers that spill."""
PROCESS_BYTES = 1.5e9
"""Of the host's one process: the interpreter, JAX and the compiler at work, which held so much."""
LOADER_BATCHES = 4
"""Of a host's samples in its memory at a time: two made ahead, one in the making, one on its way."""


@dataclass(frozen=True, slots=True)
class ChipMemory:
    """Bytes on one chip; all chips hold as much."""

    tables: float
    state: float
    """Of the tables' optimizer."""
    dense: float
    """Dense layers with their optimizer's state, and the histograms of metrics: the same on every chip."""
    batch: float
    ahead: float
    """Batches that wait for their turn; the compiler does not know of them."""
    copies: float
    """Tables put into lines anew at every step, where rows neither fill lines nor share them."""
    step: float
    """Rows on their way between chips, activations and gradients, at the fullest moment of a step."""
    program: float

    @property
    def arguments(self) -> float:
        """What the compiler calls so: all that a step is handed."""
        return self.tables + self.state + self.dense + self.batch

    @property
    def temporaries(self) -> float:
        return self.copies + self.step

    @property
    def compiled(self) -> float:
        """What the compiler plans for, in all."""
        return self.arguments + self.temporaries + self.program

    def parts(self) -> dict[str, float]:
        """By name, those that are there."""
        named = {
            "tables": self.tables, "optimizer state": self.state, "dense layers": self.dense,
            "batches": self.batch + self.ahead, "exchange and activations": self.step, "tables copied": self.copies,
            "program": self.program,
        }
        return {name: size for name, size in named.items() if size}


def chip_memory(spec: RunSpec, layout: Layout, precision: str, chip_name: str) -> ChipMemory:
    """Of one of a layout's chips."""
    layers, samples = layers_of(spec.model), spec.train.batch_size // layout.num_devices
    value_bytes = table_value_bytes(spec)
    tables = state = copies = 0.0
    for group in layout.groups:
        lines = (group.lines_per_device, group.width)
        tables += tiled_bytes(lines, value_bytes)
        if spec.train.optimizer == "adagrad":
            state += tiled_bytes(lines, 4)
        elif spec.train.optimizer == "rowwise_adagrad":
            state += tiled_bytes((group.rows_per_device,), 4)
        copies += copied_bytes(spec, group)
    num_ids = layout.num_columns
    batch = (tiled_bytes((samples, spec.model.num_dense), 4) + tiled_bytes((samples, num_ids), 4)
             + tiled_bytes((samples,), 4))
    peak = max(_exchanging(spec, layout, samples), _computing(spec, layers, samples, precision))
    return ChipMemory(
        tables, state, _dense_bytes(spec, layers) + HISTOGRAM_BYTES, batch, BATCHES_AHEAD * batch, copies,
        _in_hbm(peak, VMEM_BYTES.get(chip_name, 0.0)),
        PROGRAM_BYTES + PROGRAM_BYTES_PER_TABLE * len(spec.model.table_list())
        + PROGRAM_BYTES_PER_ID * min(samples * num_ids, MOST_IDS),
    )


def copied_bytes(spec: RunSpec, group: Group) -> float:
    """Rows are taken line by line. An array that lies turned over, as takes less, is turned at every step."""
    lines = (group.lines_per_device, group.width)
    state = _lined_anew(lines, 4) if spec.train.optimizer == "adagrad" else 0.0
    return _lined_anew(lines, table_value_bytes(spec)) + state


def host_parts(spec: RunSpec, chip: ChipMemory, num_chips: int, chips_per_host: int) -> dict[str, float]:
    """Of one whole host and its one process. A save in the background, and the start of a run, hold its rows once."""
    samples = spec.train.batch_size / num_chips * chips_per_host
    num_ids = sum(t.multi_hot for t in spec.model.table_list())
    parts = {"process": PROCESS_BYTES, "loader": LOADER_BATCHES * samples * 4 * (1 + spec.model.num_dense + num_ids),
             "copy of the tables": chips_per_host * (chip.tables + chip.state)}
    return {name: size for name, size in parts.items() if size}


def tiled_bytes(shape: Sequence[int], size: int) -> float:
    """Of an array on a TPU: in tiles of eight lines of 128 (of 16 lines, of two-byte numbers), turned over where that
    takes less; a vector in tiles of 1,024."""
    if len(shape) < 2:
        return _up(math.prod(shape), SUBLANES * LINE) * size
    *outer, high, wide = shape
    return math.prod(outer) * size * min(_tiled(high, wide, size), _tiled(wide, high, size))


def lined_bytes(shape: Sequence[int], size: int) -> float:
    """The same where each row of the array must be a line of memory, or several: rows are taken one by one."""
    *outer, high, wide = shape
    return math.prod(outer) * size * _tiled(high, wide, size)


def line_bytes(group: Group) -> int:
    """Of one row in fp32 once it is taken out of its line: a narrow one fills a line of its own."""
    return _up(group.dim, LINE) * 4


def _tiled(high: int, wide: int, size: int) -> int:
    tile = SUBLANES * 4 // size
    while tile > 1 and high <= tile // 2:
        tile //= 2
    return _up(high, tile) * _up(wide, LINE)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _lined_anew(lines: tuple[int, int], value_bytes: int) -> float:
    lined = lined_bytes(lines, value_bytes)
    return lined if tiled_bytes(lines, value_bytes) < lined else 0.0


def _exchanging(spec: RunSpec, layout: Layout, samples: int) -> float:
    """At its fullest: rows of the batch's ids, what was sent, what came, and the same put into order."""
    total = 0.0
    for group, capacity in zip(layout.groups, expected_capacities(spec, layout), strict=True):
        wide = line_bytes(group)
        num_ids = samples * len(group.columns)
        exchanged = layout.num_devices * capacity if layout.num_devices > 1 else num_ids
        bags = max((lined_bytes((samples, p.table.multi_hot, group.dim), 4) for p in group.places
                    if p.table.multi_hot > 1), default=0.0)
        total += 3 * exchanged * wide + num_ids * wide + bags
    return total


def _computing(spec: RunSpec, layers: Layers, samples: int, precision: str) -> float:
    """At its fullest: pooled vectors, the stack of them that dots are taken of and its gradient, layers' outputs."""
    size = 2 if precision == "bf16" else 4
    pooled = sum(tiled_bytes((samples, t.dim or 0), size) for t in spec.model.table_list())
    outputs = sum(tiled_bytes((samples, layer.num_out), size) for layer in (*layers.bottom, *layers.top[:-1]))
    outputs += tiled_bytes((samples, layers.middle_width), size)
    if not layers.up:
        stack = lined_bytes((samples, layers.num_vectors, layers.dim), size)
        return pooled + 4 * stack + outputs
    crossed = tiled_bytes((samples, layers.middle_width), 4)
    narrow = sum(tiled_bytes((samples, layer.num_out), size) for layer in layers.down)
    return pooled + (len(layers.up) + 2) * crossed + narrow + outputs


def _dense_bytes(spec: RunSpec, layers: Layers) -> float:
    weights = sum(tiled_bytes((layer.num_out, layer.num_in), 4) + 4.0 * layer.num_out * layer.has_bias
                  for layer in layers.all)
    return weights * (1 + DENSE_STATES[spec.train.dense_optimizer])


def _in_hbm(peak: float, vmem_bytes: float) -> float:
    """The compiler keeps what it can in the chip's fast memory: nearly all of a small step, little of a large one."""
    return LEAST_BYTES + SPILLED * peak * peak / (peak + vmem_bytes)
