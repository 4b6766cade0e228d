"""How often the gate of `[publish]` stops a planted fault, and how often a good version.

    python bench/gate.py --seeds 100

Each seed is a stream of hours: sparse and dense columns, effects that drift, labels drawn by them. A logistic model
with a weight for each id learns from it with Adagrad (numpy, so that hundreds of streams take minutes). Each hour's
model is a candidate that the gate compares with that of the hour before, on rows that neither has seen. Then one hour
is faulty, in its training rows and the gate's. All tests, slices, drift and bounds are those of `embark publish`, at
their defaults.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from embark.data.evaluation_rows import EvaluationRows
from embark.data.loader import Batch
from embark.data.permuted_rows import RowsInMemory
from embark.data.prepared import Feature, Layout
from embark.export.reference import Reference, make_reference
from embark.features.encoding import IdMap, RowEncoder
from embark.features.numbers import Numbers
from embark.features.schema import SparseColumn
from embark.publish.gate import EarlierGate, GateVerdict, ScoredRows, earlier_gate, judge, to_record
from embark.publish.gate_rows import GateRows
from embark.spec import resolve
from embark.spec.serve import PublishSpec

SIZES = (3, 8, 20, 60, 200, 1_000, 5_000)
NUM_DENSE = 3
FAULTS = ("column shifted", "slice of 1 % broken", "labels flipped for an hour")


@dataclass(frozen=True)
class Hour:
    """Rows of an hour."""

    ids: np.ndarray  # [n, features]
    dense: np.ndarray
    label: np.ndarray

    def __len__(self) -> int:
        return len(self.label)


class Stream:
    """Draws hours whose effects drift by a random walk."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.effects = [self.rng.normal(0, 0.5, size) for size in SIZES]
        self.weights = self.rng.normal(0, 0.4, NUM_DENSE)

    def hour(self, num: int) -> Hour:
        """The next one."""
        for one in self.effects:
            one += self.rng.normal(0, 0.01, len(one))
        return self.draw(num)

    def draw(self, num: int) -> Hour:
        ids = np.stack([_zipf(self.rng, size, num) for size in SIZES], axis=1)
        dense = self.rng.normal(size=(num, NUM_DENSE)).astype(np.float32)
        logit = -1.4 + dense @ self.weights + sum(one[ids[:, i]] for i, one in enumerate(self.effects))
        return Hour(ids, dense, self.rng.random(num) < 1 / (1 + np.exp(-logit)))


def _zipf(rng: np.random.Generator, size: int, num: int) -> np.ndarray:
    weights = 1 / np.arange(1, size + 1)
    return rng.choice(size, num, p=weights / weights.sum())


class Model:
    """A weight for each id and dense column."""

    def __init__(self) -> None:
        self.weights = np.zeros(1 + NUM_DENSE + sum(SIZES))
        self.squares = np.full(len(self.weights), 1e-2)
        self.weights[0] = -1.4

    def copy(self) -> Model:
        other = Model()
        other.weights, other.squares = self.weights.copy(), self.squares.copy()
        return other

    def scores(self, hour: Hour) -> np.ndarray:
        places = _places(hour.ids)
        logit = self.weights[0] + hour.dense @ self.weights[1 : 1 + NUM_DENSE] + self.weights[places].sum(axis=1)
        return 1 / (1 + np.exp(-logit))

    def learn(self, hour: Hour, batch: int = 256, rate: float = 0.05) -> None:
        for start in range(0, len(hour), batch):
            part = Hour(hour.ids[start : start + batch], hour.dense[start : start + batch],
                        hour.label[start : start + batch])
            error = self.scores(part) - part.label
            grad = np.zeros_like(self.weights)
            grad[0], grad[1 : 1 + NUM_DENSE] = error.sum(), part.dense.T @ error
            grad += np.bincount(_places(part.ids).ravel(), np.repeat(error, len(SIZES)), len(grad))
            self.squares += grad**2
            self.weights -= rate * grad / np.sqrt(self.squares)


def _places(ids: np.ndarray) -> np.ndarray:
    return ids + (1 + NUM_DENSE + np.concatenate([[0], np.cumsum(SIZES)[:-1]]))


SPEC = resolve({"model": {"num_dense": NUM_DENSE, "embedding_dim": 4, "tables": [
    {"name": f"f{i}", "rows": size} for i, size in enumerate(SIZES)]}})
LAYOUT = Layout(tuple(f"d{i}" for i in range(NUM_DENSE)), tuple(Feature(f"f{i}", size, 1, False)
                                                               for i, size in enumerate(SIZES)), 32)
ENCODER = RowEncoder(Numbers.plain("none", LAYOUT.dense), LAYOUT, tuple(
    IdMap(SparseColumn(one.name, "integer", is_list=False, max_ids=1), one, None, None, one.rows)
    for one in LAYOUT.features), "refuse")


def gate_rows(hour: Hour) -> GateRows:
    """As `embark publish` reads them."""
    batch = Batch(dense=hour.dense, ids=hour.ids.T.reshape(-1).astype(np.int32),
                  lengths=np.ones((len(SIZES), len(hour)), np.int32), label=hour.label.astype(np.float32))
    rows = RowsInMemory(batch)
    return GateRows(EvaluationRows(rows, SPEC, "", "", dense=LAYOUT.dense), rows)


@dataclass(frozen=True)
class Published:
    """A version, and what the gate recorded of it."""

    model: Model
    reference: Reference
    earlier: EarlierGate | None


def judged(candidate: Model, hour: Hour, published: Published | None, bounds: PublishSpec) -> tuple[
        GateVerdict, Published]:
    """The verdict, and the candidate as the published version."""
    rows = gate_rows(hour)
    verdict = judge(ScoredRows(
        label=hour.label, candidate=candidate.scores(hour), slices=rows.slices(bounds),
        published=published.model.scores(hour) if published else None,
        drifts=rows.drifts(published.reference, ENCODER) if published else (),
        earlier=published.earlier if published else None), bounds)
    reference = make_reference(SPEC, ENCODER, None, rows.rows)
    return verdict, Published(candidate.copy(), reference, earlier_gate(to_record(verdict)))


Fault = Callable[[Hour], Hour]


def fault(kind: str, rng: np.random.Generator, seen: Hour, sizes: Sequence[int] = SIZES) -> tuple[str, Fault]:
    """What is wrong with an hour. `sizes`: of the tables."""
    if kind == "labels flipped for an hour":
        return "all", lambda hour: replace(hour, label=~hour.label)
    if kind == "column shifted":
        column = int(rng.integers(NUM_DENSE + len(sizes)))

        def shifted(hour: Hour) -> Hour:
            if column < NUM_DENSE:
                dense = hour.dense.copy()
                dense[:, column] += 1.0  # a standard deviation
                return replace(hour, dense=dense)
            ids = hour.ids.copy()
            ids[:, column - NUM_DENSE] = (ids[:, column - NUM_DENSE] + 1) % sizes[column - NUM_DENSE]
            return replace(hour, ids=ids)
        return "dense, by a standard deviation" if column < NUM_DENSE else "sparse, by one id", shifted
    counts = [np.bincount(seen.ids[:, i], minlength=size) for i, size in enumerate(sizes)]
    shares = [(abs(float(own[value] / len(seen)) - 0.01), i, int(value))
              for i, own in enumerate(counts) for value in np.argsort(-own, kind="stable")[:60]]
    near = sorted(shares)[:5]
    _, feature, value = near[int(rng.integers(len(near)))]
    how = int(rng.integers(3))

    def broken(hour: Hour) -> Hour:
        chosen = hour.ids[:, feature] == value
        if how == 0:  # its labels get lost
            return replace(hour, label=hour.label & ~chosen)
        if how == 1:  # every row has one
            return replace(hour, label=hour.label | chosen)
        ids, dense = hour.ids.copy(), hour.dense.copy()  # all other columns are empty
        others = [i for i in range(len(sizes)) if i != feature]
        ids[np.ix_(chosen, others)] = 0
        dense[chosen] = 0
        return replace(hour, ids=ids, dense=dense)
    return ("its labels are lost", "every row has a label", "its other columns are empty")[how], broken


def run_seed(seed: int, num_hours: int, num_rows: int, num_gate: int) -> dict[str, object]:
    """Verdicts on good hours, and on each fault planted after the last of them."""
    bounds, stream, model = PublishSpec(), Stream(seed), Model()
    rng = np.random.default_rng((seed, 1))
    for _ in range(6):
        model.learn(stream.hour(num_rows))
    _, published = judged(model, stream.draw(num_gate), None, bounds)
    alarms: list[str] = []
    for _ in range(num_hours):
        model.learn(stream.hour(num_rows))
        verdict, next_one = judged(model, stream.draw(num_gate), published, bounds)
        if verdict.is_passed:
            published = next_one
        else:
            alarms.append(verdict.why)
    stopped: dict[str, bool] = {}
    training, gate = stream.hour(num_rows), stream.draw(num_gate)
    for kind in FAULTS:
        how, plant, candidate = *fault(kind, rng, gate), model.copy()
        candidate.learn(plant(training))
        verdict, _ = judged(candidate, plant(gate), published, bounds)
        stopped[f"{kind}: {how}"] = not verdict.is_passed
    return {"alarms": alarms, "num_good": num_hours, "stopped": stopped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--hours", type=int, default=6, help="good hours of each stream, each with a verdict")
    parser.add_argument("--rows", type=int, default=60_000, help="training rows an hour")
    parser.add_argument("--gate-rows", type=int, default=50_000)
    options = parser.parse_args()
    num: Counter[str] = Counter()
    stopped: Counter[str] = Counter()
    alarms: list[str] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        found = run_seed(seed, options.hours, options.rows, options.gate_rows)
        alarms += found["alarms"]
        num["good"] += found["num_good"]
        for kind, is_stopped in found["stopped"].items():
            for name in (kind, kind.partition(":")[0]):
                num[name] += 1
                stopped[name] += is_stopped
    print(json.dumps({"seeds": options.seeds, "gate_rows": options.gate_rows, "good_versions": num["good"],
                      "false_alarms": len(alarms), "why": alarms[:5],
                      "stopped": {kind: f"{stopped[kind]} of {num[kind]}" for kind in sorted(stopped)}}, indent=1))


if __name__ == "__main__":
    main()
