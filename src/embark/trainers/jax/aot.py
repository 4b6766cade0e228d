"""The whole step, compiled for real TPUs with no TPU: does it compile there, and what memory does the compiler plan.

    embark plan run.toml --tpu-compile v5e:2x4

needs `jax[tpu]`, whose compiler runs on any Linux machine. Nothing is said of speed.
"""

import os
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from embark.catalog import load_catalog
from embark.errors import EmbarkError, Fault, MissingPackage, UserError
from embark.formatting import format_bytes
from embark.model.engine_selection import choose_precision
from embark.model.steps import samples_per_rank
from embark.plan.predict import device_bytes
from embark.plan.tpu import ChipMemory, planned_chip_memory
from embark.plan.workload import resolve_data
from embark.spec import RunSpec

TOPOLOGIES = ("v4", "v5e", "v5p", "v6e")
WORDS = "v5e:2x4, v5p:2x2x1, v6e:4x4"


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
class ComparedMemory:
    """A chip's memory as the compiler and as `embark plan` see it."""

    compiled: CompiledStep
    planned: ChipMemory
    chip: str  # The chip's name in the catalog.
    limit_bytes: float
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        ours = self.planned
        return {**asdict(self.compiled), "peak_bytes": self.compiled.peak_bytes, "verdict": self.sentence, "planned": {
            "chip": self.chip, **asdict(ours), "argument_bytes": ours.arguments, "temporary_bytes": ours.temporaries,
            "peak_bytes": ours.compiled, "device_bytes": ours.parts(), "device_limit_bytes": self.limit_bytes}}


def compare_with_plan(spec: RunSpec, topology: str) -> ComparedMemory:
    """Compile for a topology, and plan the same chips of the catalog."""
    spec, _ = resolve_data(spec, None)
    compiled = compile_for(spec, topology)
    chip = load_catalog().gpus[f"TPU-{topology.partition(':')[0]}"]
    sentence = (f"{spec.name} compiles for {topology}: {format_bytes(compiled.peak_bytes)} on each of "
                f"{compiled.num_chips} chips, {compiled.batch_per_chip:,} samples each")
    return ComparedMemory(compiled, planned_chip_memory(spec, topology, compiled.num_chips), chip.name,
                          device_bytes(chip), sentence)


def compile_for(spec: RunSpec, topology: str) -> CompiledStep:
    """Compile `spec`'s step for chips such as `v5e:2x4`, with `train.batch_size` samples on all of them together."""
    _require_compiler(topology)
    # The compiler looks for chips and for a lock that only one process may have, unless it is told that there are none.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from embark.model.jax_layout import LINE_WIDTHS, check_supported, expected_capacities, make_layout
    from embark.trainers.jax.exchange import AXIS
    from embark.trainers.jax.step import batch_shapes, make_programs, state_shapes

    check_supported(spec)
    try:
        devices = topologies.get_topology_desc(topology, "tpu").devices
    except Exception as error:
        raise UserError(f"{topology}: the compiler knows no such chips: {str(error).splitlines()[0]}",
                        fix=f"such as {WORDS}") from error
    num_chips = len(devices)
    samples = samples_per_rank(spec.train.batch_size, num_chips, "chips")
    mesh = Mesh(np.array(devices), (AXIS,))
    precision = choose_precision(spec.train, has_matrix_bf16=True)
    layout = make_layout(spec, num_chips, LINE_WIDTHS["tpu"])
    programs = make_programs(spec, layout, expected_capacities(spec, layout), mesh, precision)
    batch = batch_shapes(spec, layout, mesh)
    replicated = NamedSharding(mesh, P())
    rates = jax.ShapeDtypeStruct((2,), np.float32, sharding=replicated)
    step = jax.ShapeDtypeStruct((), np.int32, sharding=replicated)
    started = time.perf_counter()
    program: Any = programs.train
    try:
        lowered = program.lower(state_shapes(spec, layout, mesh), batch, rates, step)
        planned = lowered.compile().memory_analysis()
    except Exception as error:
        raise _explained(error, topology) from error
    return CompiledStep(
        topology, num_chips, samples, planned.argument_size_in_bytes,
        planned.temp_size_in_bytes, planned.output_size_in_bytes, planned.alias_size_in_bytes,
        planned.generated_code_size_in_bytes, time.perf_counter() - started,
    )


def _require_compiler(topology: str) -> None:
    if topology.partition(":")[0] not in TOPOLOGIES or ":" not in topology:
        raise UserError(f"{topology}: not a kind of TPU and its chips", fix=f"such as {WORDS}")
    for name in ("jax", "libtpu"):
        if find_spec(name) is None and not (name == "libtpu" and os.environ.get("TPU_LIBRARY_PATH")):
            raise MissingPackage(f"compiling for TPUs needs {name}, which is not installed",
                                 fix="pip install 'embark-rec[tpu]'; it needs no TPU")


def _explained(error: Exception, topology: str) -> EmbarkError:
    text = str(error)
    line = next((line for line in text.splitlines() if "hbm" in line.lower()), text.splitlines()[0])
    if "RESOURCE_EXHAUSTED" in text or "hbm capacity" in text:
        return UserError(f"the step does not fit a chip of {topology}: {line.strip()}",
                         fix="more chips, a smaller train.batch_size, or train.table_dtype = \"fp16\"")
    return Fault(f"the step does not compile for {topology}: {line.strip()}")
