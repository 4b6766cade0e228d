"""`embark bench` as a person sees it."""

from __future__ import annotations

from typing import Any

from embark.cli.console import Console
from embark.errors import ExitCode
from embark.formatting import format_bytes
from embark.spec import RunSpec


def compare(console: Console, spec: RunSpec, *, seconds: float, peers: bool) -> int:
    """Measure, and show the table."""
    from embark.trainers.torch.bench.run import bench

    found = bench(spec, seconds=seconds, peers=peers, tell=lambda name: console.text(f"measured {name}"))
    if console.json:
        console.data(found)
        return ExitCode.DONE
    rows = [_row(row) for row in found["rows"]]
    limit = found["roofline"]
    rows.append({"": "what this device could do", "samples/s": f"{limit['samples_per_s']:,.0f}",
                 "ms a step": f"{limit['step_ms']:.3f}", "first step, s": "",
                 "Embark is": f"{limit['share']:.0%} of it"})
    console.text(f"{spec.name}, batch {found['batch_size']:,}, {found['device']}, torch {found['torch']}")
    console.table(rows)
    console.text(
        f"A step moves {limit['bytes_per_step'] / 1e9:.3g} GB at a measured {limit['bytes_per_s'] / 1e12:.3g} TB/s and "
        f"computes {limit['flops_per_step'] / 1e12:.3g} TFLOP at a measured {limit['flops_per_s'] / 1e12:.3g} TFLOP/s."
    )
    return ExitCode.DONE


def measure_in_jax(console: Console, spec: RunSpec, *, seconds: float) -> int:
    """The same of JAX's trainer, which has no peer here: stock TorchRec runs in torch."""
    from embark.trainers.jax.bench import bench

    found = bench(spec, seconds=seconds, tell=lambda name: console.text(f"measured {name}"))
    if console.json:
        console.data(found)
        return ExitCode.DONE
    console.text(f"{spec.name}, batch {found['batch_size']:,}, {found['device']}, jax {found['jax']}")
    rows = []
    for row in found["rows"]:
        shown = _row({**row, "ratio": 1.0})
        del shown["Embark is"]
        rows.append(shown | ({"memory": format_bytes(row["memory_bytes"])} if "memory_bytes" in row else {}))
    console.table(rows)
    return ExitCode.DONE


def show_profile(console: Console, spec: RunSpec) -> int:
    """Where the time of a step goes."""
    from embark.trainers.torch.bench.run import profile

    rows = profile(spec)
    if console.json:
        console.data({"rows": rows})
        return ExitCode.DONE
    console.table([{"what": r["what"][:100], "µs a step": f"{r['us']:.1f}", "times a step": f"{r['calls']:.1f}"}
                   for r in rows[:30]])
    return ExitCode.DONE


def _row(row: dict[str, Any]) -> dict[str, str]:
    return {"": row["name"], "samples/s": f"{row['samples_per_s']:,.0f}", "ms a step": f"{row['step_ms']:.3f}",
            "first step, s": f"{row['first_step_s']:.1f}", "Embark is": f"{row['ratio']:.2f}×"}
