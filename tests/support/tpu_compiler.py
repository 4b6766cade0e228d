"""The complete step, compiled for TPUs where there is none: whether it compiles, and the memory that it takes.

    python tests/support/tpu_compiler.py SPEC v5e:2x4 [FIELD=VALUE …]     prints the compiler's plan as JSON

needs `jax[tpu]`, whose compiler runs on any Linux machine. Nothing is said of speed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from embark.model.engine_selection import choose_precision
from embark.model.jax_layout import LINE_WIDTHS, expected_capacities, make_layout
from embark.plan.tpu import ChipMemory, chip_memory
from embark.spec import RunSpec, load_spec


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """Memory of one chip as the compiler plans it."""

    topology: str
    num_chips: int
    batch_per_chip: int
    argument_bytes: int  # Tables, their optimizer's state, dense layers and a batch, as they lie in the chip's memory.
    temporary_bytes: int  # Further memory that a step needs.
    output_bytes: int  # `shared_bytes` of these are the arguments' own memory, written in place.
    shared_bytes: int
    code_bytes: int
    compile_s: float

    @property
    def peak_bytes(self) -> int:
        """Bytes of all parts together."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes - self.shared_bytes + self.code_bytes


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Memory of one chip as `embark plan` counts it, in the compiler's parts."""

    argument_bytes: float
    temporary_bytes: float
    peak_bytes: float


def planned_step(spec: RunSpec, topology: str, num_chips: int) -> PlannedStep:
    """Return the plan's memory of each chip of a topology such as `v5e:2x4`."""
    layout = make_layout(spec, num_chips, LINE_WIDTHS["tpu"])
    precision = choose_precision(spec.train, has_matrix_bf16=True)
    chip: ChipMemory = chip_memory(spec, layout, precision, f"TPU-{topology.partition(':')[0]}")
    arguments, temporaries = chip.tables + chip.state + chip.dense + chip.batch, chip.copies + chip.step
    return PlannedStep(arguments, temporaries, arguments + temporaries + chip.program)


def compile_for(spec: RunSpec, topology: str) -> CompiledStep:
    """Compile `spec`'s step for chips such as `v5e:2x4`, with `train.batch_size` samples on all of them together."""
    # The compiler looks for chips and for a lock that only one process may have, unless it is told that there are none.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from embark.trainers.jax.exchange import AXIS, BATCH_AXES, samples_on
    from embark.trainers.jax.step import make_programs, state_shapes

    devices = topologies.get_topology_desc(topology, "tpu").devices
    mesh, size = Mesh(np.array(devices), (AXIS,)), spec.train.batch_size
    precision = choose_precision(spec.train, has_matrix_bf16=True)
    layout = make_layout(spec, len(devices), LINE_WIDTHS["tpu"])
    programs = make_programs(spec, layout, expected_capacities(spec, layout), mesh, precision)
    forms: dict[str, tuple[tuple[int, ...], Any]] = {
        "dense": ((size, spec.model.num_dense), np.float32), "ids": ((layout.num_columns, size), np.int32),
        "label": ((size,), np.float32)}
    batch = {name: jax.ShapeDtypeStruct(*form, sharding=NamedSharding(mesh, samples_on(BATCH_AXES[name])))
             for name, form in forms.items()}
    replicated = NamedSharding(mesh, P())
    rates = jax.ShapeDtypeStruct((2,), np.float32, sharding=replicated)
    step = jax.ShapeDtypeStruct((), np.int32, sharding=replicated)
    began_s = time.perf_counter()
    program: Any = programs.train
    planned = program.lower(state_shapes(spec, layout, mesh), batch, rates, step).compile().memory_analysis()
    return CompiledStep(
        topology, len(devices), size // len(devices), planned.argument_size_in_bytes, planned.temp_size_in_bytes,
        planned.output_size_in_bytes, planned.alias_size_in_bytes, planned.generated_code_size_in_bytes,
        time.perf_counter() - began_s)


if __name__ == "__main__":
    print(json.dumps(asdict(compile_for(load_spec(sys.argv[1], sys.argv[3:]), sys.argv[2]))))
