"""`embark plan --tpu-compile`: what the TPU's own compiler plans for a step, beside what `embark plan` says of it."""

from __future__ import annotations

import math
from dataclasses import asdict

from embark.catalog import load_catalog
from embark.console import Console
from embark.errors import ExitCode, UserError
from embark.plan.data_size import with_data
from embark.plan.predict import predict
from embark.plan.prediction import MemoryUse, Setup
from embark.spec import RunSpec
from embark.tpu.aot import Compiled, compile_for
from embark.watch.words import size

NAMES = {"v5e": ("v5litepod", 1), "v6e": ("v6e", 1), "v5p": ("v5p", 2), "v4": ("v4", 2)}
"""What the cloud calls each kind, and how many it counts for a chip: of some it counts the cores."""


def plan_compiled(console: Console, spec: RunSpec, topology: str) -> ExitCode:
    """Exit code 64 where the step does not fit the chips: the compiler says so."""
    spec, _ = with_data(spec, None)
    with console.stages() as tell:
        tell(f"compiling for {topology}", 0.0, "a minute or two")
        compiled = compile_for(spec, topology)
    machine, ours = _planned(spec, compiled)
    sentence = (f"{spec.name} compiles for {topology}: {size(compiled.peak_bytes)} on each of {compiled.num_chips} "
                f"chips, {compiled.batch_per_chip:,} samples each")
    if console.json:
        planned = None if ours is None else {"machine": machine, "device_bytes": ours.device,
                                             "device_limit_bytes": ours.device_limit}
        console.data({**asdict(compiled), "peak_bytes": compiled.peak_bytes, "verdict": sentence, "planned": planned})
        return ExitCode.DONE
    console.result(sentence)
    if not console.quiet:
        _say(console, compiled, machine, ours)
    return ExitCode.DONE


def _say(console: Console, compiled: Compiled, machine: str, ours: MemoryUse | None) -> None:
    said = {
        "tables, state, dense layers, batch": compiled.argument_bytes, "during a step": compiled.temporary_bytes,
        "results not in place": compiled.output_bytes - compiled.shared_bytes, "program": compiled.code_bytes,
        "in all": compiled.peak_bytes,
    }
    console.table([{"a chip's memory": part, "the compiler": size(num)} for part, num in said.items()])
    if ours is None:
        console.text(f"{machine} is not in the catalog, so embark plan says nothing of it", style="dim")
        return
    rows = [{f"embark plan, {machine}": part, "bytes": size(num)} for part, num in ours.device.items()]
    console.table([*rows, {f"embark plan, {machine}": f"in all, of {size(ours.device_limit)}",
                           "bytes": size(ours.device_total)}])
    console.text(f"compiled in {compiled.compile_s:.0f} s; nothing is said of speed", style="dim")


def _planned(spec: RunSpec, compiled: Compiled) -> tuple[str, MemoryUse | None]:
    """Of the slice of the catalog that has these chips."""
    kind, _, shape = compiled.topology.partition(":")
    name, per_chip = NAMES[kind]
    num_chips = math.prod(int(side) for side in shape.split("x"))
    machine = f"{name}-{num_chips * per_chip}"
    found = load_catalog().machines.get(machine)
    if found is None:
        return machine, None
    try:
        return machine, predict(Setup(spec, found, 1)).memory
    except UserError:
        return machine, None
