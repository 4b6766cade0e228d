"""Times the contenders one after the other, each alone on the device, and computes the least that a step must take, by
what it moves and computes and what this card moved and computed a moment ago."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from embark.data import Batch, SampleSource, open_source, resolve_from_data
from embark.errors import UserError
from embark.model.placement import value_bytes
from embark.model.work import layers_of
from embark.spec import RunSpec
from embark.spec.train import with_train_defaults
from embark.trainers.bench import BenchResult, Ceiling, Contender, first_batches, time_contender
from embark.trainers.torch.trainer import precision_on, set_matmul_precision
from embark.trainers.torch.world import World, join
from .contenders import Embark, Stock

SLOW_FLOPS = 5e9  # Below it, a large product would take most of a second.


def bench(spec: RunSpec, *, seconds: float, peers: bool, progress: Callable[[str], None]) -> BenchResult:
    """Return samples a second of each contender, and how Embark's compare; `seconds` is for each contender."""
    with join(spec.place) as world:
        if world.world_size > 1:
            raise UserError("embark bench measures one process", "run it without torchrun")
        precision = precision_on(spec.train, world.device)
        set_matmul_precision("tf32")  # the peers' best
        spec = resolve_from_data(spec)
        source = open_source(spec)
        spec = with_train_defaults(spec, source.num_train_samples)
        batches = first_batches(spec, source)
        rows, size = [], spec.train.batch_size
        for make in _contenders(spec, world, source, batches, precision if peers else ""):
            rows.append(time_contender(make, size, seconds))
            progress(rows[-1].name)
        ours = next(row for row in rows if row.name.startswith("Embark"))
        rows = [replace(row, ratio=ours.samples_per_s / row.samples_per_s) for row in rows]
        ceiling = None if spec.model.goes_back_by_autograd else \
            roofline(spec, batches[:4], precision, world.device, ours.samples_per_s)
        return BenchResult(size, world.device_name, f"torch {torch.__version__}", rows, ceiling)


def _contenders(
    spec: RunSpec, world: World, source: SampleSource, batches: list[Batch], peers_precision: str
) -> Iterator[Callable[[], Contender]]:
    """Return the contenders; without peers, `peers_precision` is empty."""
    model = spec.model
    if model.goes_back_by_autograd or model.has_weighted_ids or model.has_dynamic_tables:  # no DLRM of TorchRec's
        if peers_precision and not spec.has_bf16_tables:  # the pipeline has no such rows
            pipeline = spec.changed(train=spec.train.changed(engine="pipeline"))
            yield lambda: Embark(pipeline, world, source, len(batches), is_stock=True)
    elif peers_precision and model.num_dense:
        yield lambda: Stock(spec, world, batches, is_bf16=False)
        if peers_precision == "bf16":
            yield lambda: Stock(spec, world, batches, is_bf16=True)
    yield lambda: Embark(spec, world, source, len(batches))
    if spec.data.kind == "prepared":
        yield lambda: Embark(spec, world, source)


def roofline(
    spec: RunSpec, batches: Sequence[Batch], precision: str, device: torch.device, samples_per_s: float
) -> Ceiling:
    """Count the bytes and operations of a step and measure the card.

    Nothing is counted twice that a perfect cache could keep, and no step can be shorter, were moving and computing
    always at the same time. `samples_per_s` is what Embark reaches.
    """
    size, batch_size, layers = value_bytes(precision), spec.train.batch_size, layers_of(spec.model)
    pairs = layers.num_vectors * (layers.num_vectors - 1) / 2
    flops = 6.0 * batch_size * (sum(layer.num_weights for layer in layers.all) + pairs * layers.dim)
    # Every layer's output written and read, its gradient written and read; the input.
    widths = sum(layer.num_out for layer in layers.all) + (layers.middle_width if layers.num_vectors else 0)
    dense_bytes = batch_size * (4.0 * size * widths + 4 * (spec.model.num_dense + 1))
    num_bytes, bytes_per_s = _table_bytes(spec, batches, size) + dense_bytes, bandwidth(device)
    flops_per_s = matrix_rate(device, precision)
    floor_s = max(num_bytes / bytes_per_s, flops / flops_per_s)
    return Ceiling(
        samples_per_s=batch_size / floor_s, step_ms=floor_s * 1e3, share=floor_s * samples_per_s / batch_size,
        bytes_per_step=num_bytes, flops_per_step=flops, bytes_per_s=bytes_per_s, flops_per_s=flops_per_s,
    )


def _table_bytes(spec: RunSpec, batches: Sequence[Batch], size: int) -> float:
    """Count touched rows read for the lookup, read and written for the update, with their state; pooled rows in both
    directions; and ids."""
    total = 0.0
    state = {"sgd": 0.0, "rowwise_adagrad": 2 * 4.0}.get(spec.train.optimizer)
    for batch in batches:
        start = 0
        for table, lengths in zip(spec.model.table_list(), batch.lengths, strict=True):
            count = int(lengths.sum())
            ids = batch.ids[start : start + count]
            start += count
            rows, width = len(np.unique(ids)), table.dim or 0
            total += rows * (3 * 4 * width + (2 * 4 * width if state is None else state))
            total += 4 * spec.train.batch_size * width * size + 4 * count
    return total / len(batches)


def bandwidth(device: torch.device) -> float:
    """Measure the bytes read and written a second by a copy within the device's memory."""
    values = torch.empty(1 << (28 if device.type == "cuda" else 24), device=device)
    other = torch.empty_like(values)
    return 2 * values.numel() * 4 / _best_s(lambda: other.copy_(values), device)


def upload_rate(device: torch.device) -> float:
    """Measure the bytes a second from pinned host memory to the device."""
    if device.type != "cuda":
        return bandwidth(device)
    values = torch.empty(1 << 26, pin_memory=True)
    there = torch.empty_like(values, device=device)
    return values.numel() * 4 / _best_s(lambda: there.copy_(values, non_blocking=True), device)


def matrix_rate(device: torch.device, precision: str) -> float:
    """Measure the operations a second of a matrix product, which is small where a CPU has no instructions for it."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def rate(size: int, rounds: int = 10) -> float:
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        return 2.0 * size**3 / _best_s(lambda: left @ right, device, rounds)

    if device.type == "cuda":
        return rate(8192)
    small = rate(128, rounds=3)
    return small if small < SLOW_FLOPS else rate(1024)


def _best_s(call: Callable[[], object], device: torch.device, rounds: int = 10) -> float:
    best = float("inf")
    for _ in range(rounds):
        _wait(device)
        started = time.perf_counter()
        call()
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
