"""Fits of measured steps: what an engine adds to the floor, by least squares with nothing below zero."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace

from embark.model.placement import Placement, Shard
from embark.model.work import dense_work_of
from embark.spec import RunSpec
from embark.values import frozen
from .calibration import CPU, Calibration, CpuFit, EngineFit, MemoryFit, host_pace
from .memory import counted_bytes, pipeline_bytes
from .step_time import (
    FEATURES,
    LAUNCHES,
    NUM_OF_HOST,
    features,
    host_features,
    layers_behind_lookup,
    one_rank_cpu_features,
    sample_bytes,
    side_by_side_s,
)

PRIOR_ERROR = 0.05
NUM_GUESSES = 12
UPLOAD_SHARE = 0.9  # The share of a step from which on it waits for its batch.
PARTS = ("pooled", "layers", "ids", "largest")  # Kinds of temporary tensors whose memory is fitted.


@frozen
class Measurement:
    """One run of some steps in a process of its own."""

    spec: RunSpec
    engine: str
    precision: str
    step_s: float  # Seconds of a step; 0 if only memory was measured.
    used_bytes: float  # Bytes in use on the device (on a CPU, resident); 0 if only the step was timed.
    reserved_bytes: float  # The part of `used_bytes` that torch's allocator holds; 0 on a CPU.
    allocated_bytes: float  # The part of `reserved_bytes` that tensors took at their peak.
    resident_bytes: float = 0.0  # Host memory of a process that trains on a GPU.
    python_s: float = 0.0  # The host's pace while a GPU is measured, as in `Rates`.


def fit_calibration(
    base: Calibration, measured: Sequence[Measurement], prior: Calibration | None = None
) -> Calibration:
    """Return `base`, whose rates were measured, with fits for every engine that was."""
    known = dict(prior.engines) if prior else {}
    engines: dict[str, EngineFit | CpuFit] = {}
    for name in sorted({m.engine for m in measured}):
        if base.device == CPU:
            engines[name] = fit_cpu(base, measured, known.get(name))
            continue
        # Both engines move the same bytes: what is known of one is a guess at the other.
        near = known.get(name, engines.get("cuda_graph"))
        engines[name] = fit_engine(base, [m for m in measured if m.engine == name and m.step_s], near)
    memory = {name: fit_memory([m for m in measured if m.engine == name and m.used_bytes], is_cpu=base.device == CPU)
              for name in engines}
    resident = sorted(m.resident_bytes for m in measured if m.resident_bytes)
    if resident:
        memory["host"] = MemoryFit(resident[len(resident) // 2], 0.0, *[0.0] * len(PARTS))
    return replace(base, engines=engines, memory=memory, id_maps=prior.id_maps if prior else base.id_maps)


def fit_engine(
    base: Calibration, measured: Sequence[Measurement], prior: EngineFit | CpuFit | None = None
) -> EngineFit:
    """Fit the device's part alone, and with a host that small steps wait for, and return whichever comes nearer.

    What the measurements leave open stays near `prior`, another device's fit. Steps that wait for their batch tell
    nothing.
    """
    steps = [_Step(tuple(host_pace(base, m.python_s) * value for value in host_features(m.spec)),
                   features(m.spec, one_rank_placement(m.spec), m.precision, base, m.engine),
                   layers_behind_lookup(dense_work_of(m.spec.model, m.spec.train.batch_size)), m.step_s)
             for m in measured
             if m.spec.train.batch_size * sample_bytes(m.spec) / base.rates.upload_bytes < UPLOAD_SHARE * m.step_s]
    near = astuple(prior) if isinstance(prior, EngineFit) else None
    guesses = [*_alone(steps, near)]
    if measured[0].engine != "cuda_graph":  # which is replayed: its host has nothing to do
        guesses += _beside_a_host(steps, near)
    return min(guesses, key=lambda fit: _distance(fit, steps))


def fit_cpu(base: Calibration, measured: Sequence[Measurement], prior: EngineFit | CpuFit | None = None) -> CpuFit:
    """Fit a CPU; what the measurements leave open stays near `prior`, another CPU's fit."""
    rows = [one_rank_cpu_features(m.spec, one_rank_placement(m.spec), m.precision, base.rates) for m in measured]
    near = astuple(prior) if isinstance(prior, CpuFit) else None
    return CpuFit(*solve_non_negative(rows, [m.step_s for m in measured], prior=near))


@frozen
class _Step:
    """A measured step, and the quantities that the fit multiplies by its coefficients."""

    host: tuple[float, ...]
    device: tuple[float, ...]
    num_behind: int  # Dense layers after the lookup, which can start while ids are sorted.
    step_s: float

    def device_s(self, fit: EngineFit) -> float:
        return (_product(astuple(fit)[NUM_OF_HOST:], self.device)
                - min(side_by_side_s(fit, self.device, self.num_behind)))

    def hides_sort(self, fit: EngineFit) -> bool:
        sort_s, layers_s = side_by_side_s(fit, self.device, self.num_behind)
        return sort_s < layers_s

    def counted(self, *, is_sort_hidden: bool) -> tuple[float, ...]:
        """Return the quantities that the device's coefficients multiply. Of the sort and the layers that run at the
        same time, only the longer one counts."""
        hidden = {"sort_s": 0.0, "sort": 0.0} if is_sort_hidden else {
            "layer_s": self.device[FEATURES.index("layer_s")] - self.num_behind}
        return tuple(hidden.get(name, value) for name, value in zip(FEATURES, self.device, strict=True))

    def host_s(self, fit: EngineFit) -> float:
        return _product(astuple(fit)[:NUM_OF_HOST], (*self.host, self.device_s(fit)))


def fit_memory(measured: Sequence[Measurement], *, is_cpu: bool) -> MemoryFit:
    """Fit the bytes that a process holds beyond the counted ones: a constant part, and parts that grow with the
    activations."""
    rows, over = [], []
    for m in measured:
        placement = one_rank_placement(m.spec)
        counted = pipeline_bytes(m.spec, placement, 0, m.precision) if is_cpu else counted_bytes(
            m.spec, placement, 0, m.engine, m.precision)
        rows.append((1.0, *(getattr(counted, part) for part in PARTS)))
        over.append(m.used_bytes - counted.fixed)
    always, *grows = solve_non_negative(rows, over, [1 / m.used_bytes for m in measured])
    outside = sorted(m.used_bytes - m.reserved_bytes for m in measured if m.reserved_bytes)
    context = min(outside[len(outside) // 2], always) if outside else always
    return MemoryFit(context, always - context, *grows)


def _alone(steps: Sequence[_Step], near: Sequence[float] | None) -> Iterator[EngineFit]:
    """Fit the device alone.

    Starts from each guess at how many of the steps with the fewest ids sort them while the layers after the lookup
    start, and goes on to where the fit itself says the same.
    """
    by_ids = sorted(steps, key=lambda step: step.device[FEATURES.index("sort")])
    for number in range(0, len(steps) + 1, max(1, len(steps) // NUM_GUESSES)):
        rows = [step.counted(is_sort_hidden=at < number) for at, step in enumerate(by_ids)]
        for _ in range(NUM_GUESSES):
            device = solve_non_negative(rows, [step.step_s for step in by_ids], prior=near and near[NUM_OF_HOST:])
            fit = EngineFit(*[0.0] * NUM_OF_HOST, *device)
            yield fit
            last, rows = rows, [step.counted(is_sort_hidden=step.hides_sort(fit)) for step in by_ids]
            if rows == last:
                break


def _beside_a_host(steps: Sequence[_Step], near: Sequence[float] | None) -> Iterator[EngineFit]:
    """Fit the device and its host.

    Starts from each guess at how many of the smallest steps the host bounds, and goes on to where the fit itself says
    the same. The host, not the device, then takes time for each launch.
    """
    skipped = len(LAUNCHES) - 1  # all but the averaged features'
    by_size = sorted(range(len(steps)), key=lambda i: sum(steps[i].device[skipped:]))
    for number in range(2, len(steps) - 2, max(1, len(steps) // NUM_GUESSES)):
        of_host = set(by_size[:number])
        for _ in range(len(steps)):
            others = [step for i, step in enumerate(steps) if i not in of_host]
            if len(of_host) < 2 or len(others) < 3:
                break
            device = solve_non_negative([step.device[skipped:] for step in others], [step.step_s for step in others],
                                        prior=near and near[NUM_OF_HOST + skipped :])
            rows = [(*steps[i].host, _product(device, steps[i].device[skipped:])) for i in of_host]
            host = solve_non_negative(rows, [steps[i].step_s for i in of_host], prior=near and near[:NUM_OF_HOST])
            fit = EngineFit(*host, *[0.0] * skipped, *device)
            yield fit
            found = {i for i, step in enumerate(steps) if step.host_s(fit) >= step.device_s(fit)}
            if found == of_host:
                break
            of_host = found


def _distance(fit: EngineFit, steps: Sequence[_Step]) -> float:
    return sum((max(step.host_s(fit), step.device_s(fit)) / step.step_s - 1) ** 2 for step in steps)


def _product(factors: Sequence[float], values: Sequence[float]) -> float:
    return sum((factor * value for factor, value in zip(factors, values, strict=True)), 0.0)


def one_rank_placement(spec: RunSpec) -> Placement:
    """Put every table on one rank."""
    tables = spec.model.stored_tables()
    return Placement(1, tuple(Shard(t.name, 0, t.rows, t.dim) for t in tables),
                     {t.name: "table_wise" for t in tables}, "one rank")


def solve_non_negative(
    rows: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float] | None = None,
    prior: Sequence[float] | None = None
) -> list[float]:
    """Return the x ≥ 0 for which rows · x is nearest to `values`, by Lawson and Hanson's active sets.

    Each value counts times its weight; without weights, errors are relative. Being twice the `prior`, or none of it,
    counts like an error of PRIOR_ERROR.
    """
    import numpy as np

    weight = 1 / np.asarray(values, float) if weights is None else np.asarray(weights, float)
    matrix = np.asarray(rows, float) * weight[:, None]
    target = np.asarray(values, float) * weight
    if prior is not None:
        known = [(column, value) for column, value in enumerate(prior) if value > 0]
        near = np.zeros((len(known), matrix.shape[1]))
        for row, (column, value) in enumerate(known):
            near[row, column] = PRIOR_ERROR / value
        matrix, target = np.vstack([matrix, near]), np.concatenate([target, np.full(len(known), PRIOR_ERROR)])
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    found, free = np.zeros(matrix.shape[1]), np.zeros(matrix.shape[1], bool)
    while True:
        slope = np.where(free, -np.inf, matrix.T @ (target - matrix @ found))
        if slope.max() < 1e-10 * max(1.0, float(np.abs(target).max())):
            return [float(value) for value in found / scale]
        free[slope.argmax()] = True
        while True:
            solved = np.zeros_like(found)
            solved[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            if (solved[free] > 0).all():
                break
            below = free & (solved <= 0)
            step = (found[below] / (found[below] - solved[below])).min()
            found = found + step * (solved - found)
            free &= found > 1e-14
        found = solved
