"""The contenders one after the other, each alone on the device; and where the time of Embark's own step goes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from embark.data import Batch, Source, open_source, resolve_from_data
from embark.errors import UserError
from embark.spec import RunSpec
from embark.trainers.bench import NUM_BATCHES, BenchResult, Contender, first_batches, time_contender
from embark.trainers.torch.bench.contenders import Embark, Stock
from embark.trainers.torch.bench.roofline import roofline
from embark.trainers.torch.trainer import choose_precision, set_matmul_precision
from embark.trainers.torch.world import World, join


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """An operation or kernel."""

    what: str
    us: float
    """In a step."""
    calls: float
    """In a step."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Operations, the longest first."""

    rows: list[ProfileRow]


def bench(spec: RunSpec, *, seconds: float, peers: bool, progress: Callable[[str], None]) -> BenchResult:
    """Samples a second of each, and how Embark's compare; `seconds` is for each contender."""
    with join(spec.place) as world:
        if world.world_size > 1:
            raise UserError("embark bench measures one process", fix="run it without torchrun")
        precision = choose_precision(spec.train, world.device)
        set_matmul_precision("tf32")  # the peers' best
        spec = resolve_from_data(spec)
        source = open_source(spec)
        batches = first_batches(spec, source)
        rows, size = [], spec.train.batch_size
        for make in _contenders(spec, world, source, batches, precision if peers else ""):
            rows.append(time_contender(make, size, seconds))
            progress(rows[-1].name)
        ours = next(row for row in rows if row.name.startswith("Embark"))
        rows = [replace(row, ratio=ours.samples_per_s / row.samples_per_s) for row in rows]
        ceiling = roofline(spec, batches[:4], precision, world.device, ours.samples_per_s)
        return BenchResult(size, world.device_name, f"torch {torch.__version__}", rows, ceiling)


def profile(spec: RunSpec, num_steps: int = 20) -> Profile:
    """Where the device's time goes in Embark's step."""
    with join(spec.place) as world:
        set_matmul_precision("tf32")
        spec = resolve_from_data(spec)
        ours = Embark(spec, world, open_source(spec), NUM_BATCHES)
        ours.run(10)
        ours.wait()
        is_gpu = world.device.type == "cuda"
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CUDA if is_gpu else activity.CPU]) as found:
            ours.run(num_steps)
            ours.wait()
        rows = [ProfileRow(e.key, (e.device_time_total if is_gpu else e.self_cpu_time_total) / num_steps,
                           e.count / num_steps) for e in found.key_averages()]
        return Profile(sorted(rows, key=lambda row: -row.us))


def _contenders(
    spec: RunSpec, world: World, source: Source, batches: list[Batch], peers_precision: str
) -> Iterator[Callable[[], Contender]]:
    """Without peers, `peers_precision` is empty."""
    if peers_precision and spec.model.num_dense:
        yield lambda: Stock(spec, world, batches, is_bf16=False)
        if peers_precision == "bf16":
            yield lambda: Stock(spec, world, batches, is_bf16=True)
    yield lambda: Embark(spec, world, source, len(batches))
    if spec.data.kind == "prepared":
        yield lambda: Embark(spec, world, source)
