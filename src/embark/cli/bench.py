"""`embark bench`: training speed on this machine, beside stock TorchRec's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from embark.errors import UserError
from .console import Console, Flag, Settings, Spec

if TYPE_CHECKING:
    from embark.trainers.bench import BenchResult
    from embark.trainers.torch.bench.calibrate import CalibrationResult


def bench(
    spec: Spec = "quickstart", /, *, set_: Settings = (), seconds: float = 8.0,
    peers: Annotated[bool, Parameter(negative="--no-peers")] = True, calibrate: Flag = False,
    console: Console = Console()
) -> None:
    """Train a spec's first batches here with Embark and with stock TorchRec, and compare samples per second.

    Compares Embark's engines where TorchRec has no such model. Measures the torch trainer only.

    Parameters
    ----------
    seconds
        Seconds to measure each trainer.
    peers
        Measure stock TorchRec too, in fp32 and in bf16 autocast.
    calibrate
        Instead, measure this machine's bandwidth, compute and memory for embark plan; takes minutes.
    """
    from embark.spec import load_spec
    from embark.stack.versions import require_stack
    from embark.trainers import wants_jax

    run = load_spec(spec, set_)
    if seconds <= 0:
        raise UserError("--seconds must be greater than 0", "--seconds 8")
    if wants_jax(run):
        raise UserError("embark bench measures the torch trainer only",
                        "leave place.device out; embark train logs the samples per second of JAX")

    def report(name: str) -> None:
        console.text(f"measured {name}")

    require_stack()
    if calibrate:
        from embark.trainers.torch.bench.calibrate import calibrate as calibrate_here

        console.show(calibrate_here(run, seconds=seconds, progress=console.text), _render_calibration)
        return
    from embark.trainers.torch.bench.run import bench as bench_torch

    console.show(bench_torch(run, seconds=seconds, peers=peers, progress=report), _render)


def _render(console: Console, found: BenchResult) -> None:
    console.text(f"batch {found.batch_size:,}, {found.device}, {found.library}")
    limit = found.roofline
    rows = []
    for row in found.rows:
        cells = {"": row.name, "samples/s": f"{row.samples_per_s:,.0f}", "ms/step": f"{row.step_ms:.3f}",
                 "first step, s": f"{row.first_step_s:.1f}"}
        if limit or len(found.rows) > 1:
            cells["Embark is"] = f"{row.ratio:.2f}×"
        rows.append(cells)
    if limit:
        rows.append({"": "limit of this device", "samples/s": f"{limit.samples_per_s:,.0f}",
                     "ms/step": f"{limit.step_ms:.3f}", "first step, s": "", "Embark is": f"{limit.share:.0%} of it"})
    console.table(rows)
    if limit:
        console.text(
            f"A step moves {limit.bytes_per_step / 1e9:.3g} GB at a measured {limit.bytes_per_s / 1e12:.3g} TB/s "
            f"and computes {limit.flops_per_step / 1e12:.3g} TFLOP at a measured "
            f"{limit.flops_per_s / 1e12:.3g} TFLOP/s.")


def _render_calibration(console: Console, found: CalibrationResult) -> None:
    console.table([
        {"model": row.model, "engine": row.engine, "batch": row.batch, "ms/step": f"{row.step_s * 1e3:.3f}",
         "predicted": f"{row.predicted_s * 1e3:.3f}", "off by": f"{row.predicted_s / row.step_s - 1:+.1%}",
         "GiB": f"{row.used_bytes / 2**30:.2f}", "predicted ": f"{row.predicted_bytes / 2**30:.2f}",
         "off by ": f"{row.predicted_bytes / row.used_bytes - 1:+.1%}"}
        for row in found.rows
    ])
    console.text(f"saved to {found.path}; embark plan now uses it")
