"""`embark plan --tpu-compile`: what the TPU's own compiler plans for a step, beside what `embark plan` says of it."""

from __future__ import annotations

from dataclasses import asdict

from embark.catalog import load_catalog
from embark.cli.console import Console
from embark.errors import ExitCode
from embark.formatting import MISSING, format_bytes
from embark.model.jax_layout import LINE_WIDTHS, make_layout
from embark.plan.data_size import resolve_data
from embark.plan.predict import SEEN_SHARE
from embark.plan.tpu import tpu_precision
from embark.plan.tpu_memory import ChipMemory, chip_memory
from embark.spec import RunSpec
from embark.trainers.jax.aot import Compiled, compile_for


def plan_compiled(console: Console, spec: RunSpec, topology: str) -> ExitCode:
    """Exit code 64 where the step does not fit the chips: the compiler says so."""
    spec, _ = resolve_data(spec, None)
    with console.stages() as tell:
        tell(f"compiling for {topology}", 0.0, "a minute or two")
        compiled = compile_for(spec, topology)
    chip = load_catalog().gpus[f"TPU-{topology.partition(':')[0]}"]
    ours = planned_beside(spec, compiled)
    limit_bytes = (chip.seen_mib or chip.memory_mib * SEEN_SHARE) * 2**20
    sentence = (f"{spec.name} compiles for {topology}: {format_bytes(compiled.peak_bytes)} on each of {compiled.num_chips} "
                f"chips, {compiled.batch_per_chip:,} samples each")
    if console.json:
        planned = {"chip": chip.name, **asdict(ours), "argument_bytes": ours.arguments,
                   "temporary_bytes": ours.temporaries, "peak_bytes": ours.compiled, "device_bytes": ours.parts(),
                   "device_limit_bytes": limit_bytes}
        console.data({**asdict(compiled), "peak_bytes": compiled.peak_bytes, "verdict": sentence, "planned": planned})
        return ExitCode.DONE
    console.result(sentence)
    if not console.quiet:
        _say(console, compiled, ours, limit_bytes)
    return ExitCode.DONE


def planned_beside(spec: RunSpec, compiled: Compiled) -> ChipMemory:
    """What `embark plan` counts for a chip of the same kind and number."""
    kind = compiled.topology.partition(":")[0]
    return chip_memory(spec, make_layout(spec, compiled.num_chips, LINE_WIDTHS["tpu"]),
                       tpu_precision(spec.train.precision), f"TPU-{kind}")


def _say(console: Console, compiled: Compiled, ours: ChipMemory, limit_bytes: float) -> None:
    rows = [
        ("tables, state, dense layers, batch", compiled.argument_bytes, ours.arguments),
        ("during a step", compiled.temporary_bytes, ours.temporaries),
        ("results not in place", compiled.output_bytes - compiled.shared_bytes, None),
        ("program", compiled.code_bytes, ours.program),
        ("in all", compiled.peak_bytes, ours.compiled),
        ("batches that wait besides", None, ours.ahead),
        ("there is", None, limit_bytes),
    ]
    console.table([{"a chip's memory": part, "the compiler": MISSING if theirs is None else format_bytes(theirs),
                    "embark plan": MISSING if own is None else format_bytes(own)} for part, theirs, own in rows])
    if compiled.sparsecores:
        console.text(f"{compiled.sparsecores}; embark plan counts the lookup without them", style="dim")
    console.text(f"compiled in {compiled.compile_s:.0f} s; nothing is said of speed", style="dim")
