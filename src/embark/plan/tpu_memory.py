"""Bytes on a chip of a TPU, part by part: what JAX's trainer keeps there as the chip lays it out, and what the
compiler's program needs during a step. The latter is a form fitted to compiled programs (bench/tpu_memory.csv)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from embark.model.tpu_layout import LINE, Rows, lined_bytes, tiled_bytes
from embark.model.work import Layers, layers_of
from embark.plan.memory import DENSE_STATES
from embark.spec import RunSpec

HISTOGRAM_BYTES = 2 * 16_384 * 4
"""The counts that AUC is made of."""
BATCHES_AHEAD = 8 + 2 + 1
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


def chip_memory(spec: RunSpec, groups: Sequence[Rows], num_chips: int, precision: str, vmem_bytes: float) -> ChipMemory:
    """Of `groups`, as `lay_out` gave them. `vmem_bytes`: the chip's fast memory, which takes a part of the step's."""
    layers, samples = layers_of(spec.model), spec.train.batch_size // num_chips
    value_bytes = 2 if spec.train.table_dtype == "fp16" else 4
    tables = state = copies = 0.0
    for group in groups:
        lines = (group.lines_per_chip, group.width)
        tables += tiled_bytes(lines, value_bytes)
        if spec.train.optimizer == "adagrad":
            state += tiled_bytes(lines, 4)
        elif spec.train.optimizer == "rowwise_adagrad":
            state += tiled_bytes((group.rows_per_chip,), 4)
        copies += copied_bytes(spec, group)
    num_ids = sum(group.num_columns for group in groups)
    batch = (tiled_bytes((samples, spec.model.num_dense), 4) + tiled_bytes((samples, num_ids), 4)
             + tiled_bytes((samples,), 4))
    peak = max(_exchanging(groups, samples, num_chips), _computing(spec, layers, groups, samples, precision))
    return ChipMemory(
        tables, state, _dense_bytes(spec, layers) + HISTOGRAM_BYTES, batch, BATCHES_AHEAD * batch, copies,
        _in_hbm(peak, vmem_bytes), PROGRAM_BYTES + PROGRAM_BYTES_PER_TABLE * len(spec.model.table_list())
        + PROGRAM_BYTES_PER_ID * min(samples * num_ids, MOST_IDS),
    )


def copied_bytes(spec: RunSpec, group: Rows) -> float:
    """Rows are taken line by line. An array that lies turned over, as takes less, is turned at every step."""
    lines = (group.lines_per_chip, group.width)
    state = _lined_anew(lines, 4) if spec.train.optimizer == "adagrad" else 0.0
    return _lined_anew(lines, 2 if spec.train.table_dtype == "fp16" else 4) + state


def host_parts(spec: RunSpec, chip: ChipMemory, num_chips: int, chips_per_host: int) -> dict[str, float]:
    """Of one whole host and its one process. A save in the background, and the start of a run, hold its rows once."""
    samples = spec.train.batch_size / num_chips * chips_per_host
    num_ids = sum(t.multi_hot for t in spec.model.table_list())
    parts = {"process": PROCESS_BYTES, "loader": LOADER_BATCHES * samples * 4 * (1 + spec.model.num_dense + num_ids),
             "copy of the tables": chips_per_host * (chip.tables + chip.state)}
    return {name: size for name, size in parts.items() if size}


def _lined_anew(lines: tuple[int, int], value_bytes: int) -> float:
    lined = lined_bytes(lines, value_bytes)
    return lined if tiled_bytes(lines, value_bytes) < lined else 0.0


def _exchanging(groups: Sequence[Rows], samples: int, num_chips: int) -> float:
    """At its fullest: rows of the batch's ids, what was sent, what came, and the same put into order."""
    held = 0.0
    for group in groups:
        wide = -(-group.dim // LINE) * LINE * 4
        num_ids = samples * group.num_columns
        exchanged = num_chips * group.capacity if num_chips > 1 else num_ids
        bags = max((lined_bytes((samples, t.multi_hot, group.dim), 4) for t in group.tables if t.multi_hot > 1),
                   default=0.0)
        held += 3 * exchanged * wide + num_ids * wide + bags
    return held


def _computing(spec: RunSpec, layers: Layers, groups: Sequence[Rows], samples: int, precision: str) -> float:
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
