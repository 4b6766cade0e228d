"""From measured steps to what an engine adds to the floor: least squares with nothing below zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from embark.plan.calibration import Calibration, EngineFit, MemoryFit
from embark.plan.memory import captured, pipelined
from embark.plan.placement import Placement, Shard
from embark.plan.step_time import features
from embark.spec import RunSpec

HOST_BOUND = 1.15
"""A step this close to the shortest of its model is the host's, not the device's."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of some steps in a process of its own."""

    spec: RunSpec
    engine: str
    precision: str
    step_s: float
    used_bytes: float
    """Of the device, whoever uses them; on a CPU, resident."""
    reserved_bytes: float
    """Of those, what torch's allocator holds; 0 on a CPU."""
    allocated_bytes: float
    """Of those, the most that tensors took."""
    resident_bytes: float = 0.0
    """Of the host's memory, what a process takes that trains on a GPU."""


def fitted(base: Calibration, measured: Sequence[Measured]) -> Calibration:
    """`base`, whose rates were measured, with fits for every engine that was."""
    engines = {name: fit_engine(base, [m for m in measured if m.engine == name])
               for name in dict.fromkeys(m.engine for m in measured)}
    memory = {name: fit_memory([m for m in measured if m.engine == name]) for name in engines}
    resident = sorted(m.resident_bytes for m in measured if m.resident_bytes)
    if resident:
        memory["host"] = MemoryFit(resident[len(resident) // 2], 0.0, 0.0, 0.0)
    return replace(base, engines=engines, memory=memory)


def fit_engine(base: Calibration, measured: Sequence[Measured]) -> EngineFit:
    """The host's part from the steps that grow no longer with the batch, the device's from the others."""
    rows = [features(m.spec, whole(m.spec), m.precision, base) for m in measured]
    times = [m.step_s for m in measured]
    shortest: dict[str, float] = {}
    for m in measured:
        shortest[m.spec.name] = min(shortest.get(m.spec.name, m.step_s), m.step_s)
    of_host = [m.step_s < HOST_BOUND * shortest[m.spec.name] for m in measured]
    # Two sizes of several models take the same time, and enough of the others are left to learn the device's from.
    is_host_bound = sum(of_host) >= 1.3 * len(shortest) and len(times) - sum(of_host) >= 3
    host = [0.0, 0.0]
    if is_host_bound:
        # Whatever else the host does makes a step longer, never shorter.
        least = [(r, t) for r, t, m in zip(rows, times, measured, strict=True) if t == shortest[m.spec.name]]
        host = non_negative([r[:2] for r, _ in least], [t for _, t in least])
        device = [0.0, 0.0, *non_negative([r[2:] for r, h in zip(rows, of_host, strict=True) if not h],
                                          [t for t, h in zip(times, of_host, strict=True) if not h])]
    else:
        device = non_negative(rows, times)
    return EngineFit(host[0], host[1], *device)


def fit_memory(measured: Sequence[Measured]) -> MemoryFit:
    """Bytes over what is counted: a part that is always there, and one that grows with the activations."""
    rows, rest, held = [], [], []
    for m in measured:
        counted = (captured if m.engine == "captured" else pipelined)(m.spec, whole(m.spec), 0, m.precision)
        fixed = counted.tables + counted.state + counted.dense + counted.inputs + counted.exchange
        rows.append((1.0, counted.activations))
        rest.append((fixed, m.used_bytes))
        held.append((fixed, m.allocated_bytes or m.used_bytes))
    always, grows = _over(rows, rest)
    kept = min(_over(rows, held)[1], grows) or grows
    outside = sorted(m.used_bytes - m.reserved_bytes for m in measured if m.reserved_bytes)
    context = min(outside[len(outside) // 2], always) if outside else always
    return MemoryFit(context, always - context, kept, grows / kept - 1 if kept else 0.0)


def _over(rows: Sequence[Sequence[float]], sizes: Sequence[tuple[float, float]]) -> list[float]:
    """What to multiply `rows` by so that, with the first of each pair, they come relatively nearest to the second."""
    return non_negative(rows, [whole - fixed for fixed, whole in sizes], [1 / whole for _, whole in sizes])


def whole(spec: RunSpec) -> Placement:
    """Every table on one rank."""
    tables = spec.model.table_list()
    return Placement(1, tuple(Shard(t.name, 0, t.rows, t.dim or 0) for t in tables),
                     {t.name: "table_wise" for t in tables}, "one rank")


def non_negative(
    rows: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float] | None = None
) -> list[float]:
    """The x ≥ 0 for which rows · x is nearest to `values`, each times its weight; without weights, relatively nearest.

    Where some of x are 0, the others are the least squares of their columns alone: with so few, each choice is tried.
    """
    import numpy as np

    weight = 1 / np.asarray(values, float) if weights is None else np.asarray(weights, float)
    matrix = np.asarray(rows, float) * weight[:, None]
    target = np.asarray(values, float) * weight
    best, least = np.zeros(matrix.shape[1]), float(target @ target)
    for number in range(1, matrix.shape[1] + 1):
        for chosen in combinations(range(matrix.shape[1]), number):
            columns = matrix[:, chosen]
            scale = np.abs(columns).max(0)
            if not scale.all():
                continue
            found = np.linalg.lstsq(columns / scale, target, rcond=None)[0] / scale
            off = target - columns @ found
            if (found >= 0).all() and float(off @ off) < least:
                best, least = np.zeros(matrix.shape[1]), float(off @ off)
                best[list(chosen)] = found
    return [float(v) for v in best]
