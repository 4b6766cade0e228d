"""Whether a version may be published: its predictions on labelled rows against the published version's, on all rows and
by slice, and the rows themselves against those of the last publication."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from embark.events.drift import Drift, drift
from embark.features.arrays import Doubles, Int64s, Mask
from embark.formatting import format_count, to_finite
from embark.spec import PublishSpec
from embark.values import JsonDict, JsonMap, frozen
from .statistics import (
    AucParts,
    Estimate,
    LabelCount,
    calibration_shift,
    critical,
    log_losses,
    loss_increase,
    miscalibration,
)

ALL_ROWS = "all rows"
_NUM_SCORE_BINS = 10
_LEAST_OF_EACH_LABEL = 20  # Needed in a slice whose AUC is tested.


@frozen
class GateSlice:
    """The rows that have one value of a feature."""

    name: str
    rows: Int64s


@frozen
class ColumnDrift:
    """The drift of a column of the rows."""

    column: str
    drift: Drift


@frozen
class EarlierGate:
    """The measurements at the time when the published version was published, on the rows of that time."""

    auc: Estimate | None
    sums: Mapping[str, tuple[float, float]]  # Sum of the predictions and of the labels, by slice.
    score_edges: Sequence[float]
    score_counts: Mapping[str, Sequence[int]]  # Scores between the edges, by slice.


@dataclass(frozen=True)
class ScoredRows:
    """Labelled rows and the predictions of two versions for them."""

    label: Mask
    candidate: Doubles
    published: Doubles | None = None  # None if no version is published yet.
    slices: Sequence[GateSlice] = ()
    drifts: Sequence[ColumnDrift] = ()
    earlier: EarlierGate | None = None

    def of_slice(self, one: GateSlice) -> ScoredRows:
        """Return the rows of a slice."""
        published = None if self.published is None else self.published[one.rows]
        return ScoredRows(self.label[one.rows], self.candidate[one.rows], published)

    @cached_property
    def auc_parts(self) -> AucParts | None:
        """Return the parts of the AUC, or None if a label is too rare."""
        least = min(int(self.label.sum()), int((~self.label).sum()))
        return AucParts.of(self.label, self.candidate) if least >= _LEAST_OF_EACH_LABEL else None


@frozen
class GateTest:
    """A figure that must not exceed its bound."""

    name: str
    on: str  # All rows, a slice, or a column.
    value: float
    bound: float
    errors: float  # Standard errors that it is beyond the bound; 0 of a test by another statistic.
    num_samples: int
    is_passed: bool
    meaning: str

    @property
    def sentence(self) -> str:
        """Say why the test refuses a version."""
        sure = f", {self.errors:.1f} standard errors beyond" if self.errors and math.isfinite(self.errors) else ""
        return f"{self.on}: {self.meaning} (bound {self.bound:g}{sure}; {format_count(self.num_samples)} rows)"


@frozen
class GateVerdict:
    """The gate's verdict on one version."""

    is_passed: bool
    num_samples: int
    num_tests: int
    auc: float | None
    auc_error: float | None
    log_loss: float
    calibration: float | None
    refusals: tuple[GateTest, ...]  # The furthest beyond its bound first.
    on_all_rows: tuple[GateTest, ...]
    sums: Mapping[str, tuple[float, float]]  # Sum of the predictions and of the labels, by slice.
    score_edges: tuple[float, ...]
    score_counts: Mapping[str, tuple[int, ...]]  # Scores between the edges, by slice.
    rows: str = ""  # Describes the rows that were scored.
    notes: tuple[str, ...] = ()

    @property
    def why(self) -> str:
        """Say in a sentence why the version was refused; empty if it passed."""
        if self.is_passed:
            return ""
        more = f"; and {len(self.refusals) - 1} more" if len(self.refusals) > 1 else ""
        return self.refusals[0].sentence + more


def judge(rows: ScoredRows, bounds: PublishSpec) -> GateVerdict:
    """Judge a version. The tests share `false_alarm_rate`: the more there are, the surer each must be."""
    tested = [one for one in rows.slices if len(one.rows) >= bounds.min_slice_rows]
    slices = {one.name: rows.of_slice(one) for one in tested}
    drawn = list(chain(_tests(rows, bounds, ALL_ROWS, 1.0), _tests_of_time(rows, slices, bounds), *(
        _tests(part, bounds, name, bounds.slice_factor) for name, part in slices.items()
        if rows.published is not None)))  # a first version may know a slice badly
    beyond = critical(bounds.false_alarm_rate, len(drawn))
    tests = [*(_decided(one, beyond) for one in drawn), *(
        _drift_test(one, bounds) for one in chain(rows.drifts, _score_drifts(rows, slices)))]
    refusals = sorted((one for one in tests if not one.is_passed), key=lambda one: (one.on != ALL_ROWS, -one.errors))
    auc = rows.auc_parts.measured() if rows.auc_parts else None
    labels, every = float(rows.label.sum()), {ALL_ROWS: rows, **slices}
    edges = np.unique(np.quantile(rows.candidate, np.linspace(0, 1, _NUM_SCORE_BINS + 1)[1:-1]))
    return GateVerdict(
        is_passed=not refusals, num_samples=len(rows.label), num_tests=len(tests),
        auc=auc.value if auc else None, auc_error=auc.error if auc else None,
        log_loss=float(log_losses(rows.label, rows.candidate).mean()),
        sums={name: (float(part.candidate.sum()), float(part.label.sum())) for name, part in every.items()},
        score_edges=tuple(edges.tolist()),
        score_counts={name: _counts(part.candidate, edges) for name, part in every.items()},
        calibration=float(rows.candidate.sum()) / labels if labels else None, refusals=tuple(refusals),
        on_all_rows=tuple(one for one in tests if one.on == ALL_ROWS))


@frozen
class _PendingTest:
    """A test before the number of tests is known."""

    name: str
    on: str
    figure: Estimate | LabelCount
    bound: float
    num_samples: int
    meaning: str
    is_log: bool = False  # Figure and bound are log(1 + x) of the shown values.


def _decided(one: _PendingTest, beyond: float) -> GateTest:
    errors, value, bound = one.figure.beyond(one.bound), one.figure.value, one.bound
    if one.is_log:
        value, bound = math.expm1(value), math.expm1(bound)
    return GateTest(name=one.name, on=one.on, value=value, bound=bound, errors=errors,
                    num_samples=one.num_samples, is_passed=not errors > beyond, meaning=one.meaning)


def _tests(rows: ScoredRows, bounds: PublishSpec, on: str, factor: float) -> Iterator[_PendingTest]:
    num = len(rows.label)
    if num < 2:
        return
    off, bound = miscalibration(rows.label, rows.candidate), math.log1p(factor * bounds.max_calibration_error)
    # A slice in which the published version is as far off is no reason to keep that version.
    if on == ALL_ROWS or rows.published is None or \
            off.value > miscalibration(rows.label, rows.published).value + bound / 2:
        predicted, labels = float(rows.candidate.mean()), float(rows.label.mean())
        yield _PendingTest("calibration", on, off, bound, num,
                           f"the mean prediction is {predicted:.4g} and the mean label {labels:.4g}", is_log=True)
    if rows.published is None:
        return
    increase = loss_increase(log_losses(rows.label, rows.published), log_losses(rows.label, rows.candidate))
    yield _PendingTest("log loss", on, increase, factor * bounds.max_loss_increase, num,
                       f"the log loss is {100 * increase.value:.2g} % higher than the published version's")
    if parts := rows.auc_parts:
        drop = parts.measured(AucParts.of(rows.label, rows.published))
        yield _PendingTest("AUC", on, drop, factor * bounds.max_auc_drop, num,
                           f"the AUC is {drop.value:.4f} lower than the published version's")


def _tests_of_time(rows: ScoredRows, slices: Mapping[str, ScoredRows], bounds: PublishSpec) -> Iterator[_PendingTest]:
    """Yield tests against the rows of the last publication. If labels or columns are wrong, a version that learned from
    such rows looks better; but the published version no longer predicts them as it did."""
    if rows.earlier is None or rows.published is None:
        return
    if rows.earlier.auc and rows.auc_parts:
        for whose, parts in (("this version's", rows.auc_parts),
                             ("the published version's", AucParts.of(rows.label, rows.published))):
            now, then = parts.measured(), rows.earlier.auc
            drop = Estimate(then.value - now.value, math.hypot(now.error, then.error))
            yield _PendingTest("AUC since publication", ALL_ROWS, drop, bounds.max_auc_shift, len(rows.label),
                               f"{whose} AUC is {now.value:.4f}, and was {then.value:.4f} at the last publication")
    for name, part in {ALL_ROWS: rows, **slices}.items():
        if name in rows.earlier.sums and part.published is not None:
            shift = calibration_shift(*rows.earlier.sums[name], float(part.published.sum()), float(part.label.sum()))
            factor = 2.0 if name == ALL_ROWS else bounds.slice_factor
            yield _PendingTest(
                "calibration since publication", name, shift, math.log1p(factor * bounds.max_calibration_error),
                len(part.label), "the published version's mean prediction over the mean label was "
                f"{_ratio(*rows.earlier.sums[name])} at its publication and is now "
                f"{_ratio(float(part.published.sum()), float(part.label.sum()))}", is_log=True)


def _score_drifts(rows: ScoredRows, slices: Mapping[str, ScoredRows]) -> Iterator[ColumnDrift]:
    """Yield drifts of the scores, which show columns that are wrong in one slice alone."""
    if rows.earlier is None:
        return
    for name, part in {ALL_ROWS: rows, **slices}.items():
        then = rows.earlier.score_counts.get(name)
        if then is not None and part.published is not None and len(then) == len(rows.earlier.score_edges) + 1:
            now = _counts(part.published, np.asarray(rows.earlier.score_edges))
            yield ColumnDrift(f"the published version's scores, {name}", drift(then, now))


def _counts(scores: Doubles, edges: Doubles) -> tuple[int, ...]:
    return tuple(np.bincount(np.searchsorted(edges, scores), minlength=len(edges) + 1).tolist())


def _ratio(predictions: float, labels: float) -> str:
    return f"{(predictions + 0.5) / (labels + 0.5):.3g}"


def _drift_test(one: ColumnDrift, bounds: PublishSpec) -> GateTest:
    found = one.drift
    return GateTest(name="drift", on=one.column, value=found.psi, bound=bounds.max_psi, errors=0.0,
                    num_samples=found.num, is_passed=not (found.level and found.psi > bounds.max_psi),
                    meaning=f"moved since the last publication, PSI {found.psi:.2f}")


def to_record(verdict: GateVerdict) -> JsonDict:
    """Return the verdict as JSON to be stored beside the version."""
    def tests(several: Sequence[GateTest]) -> list[JsonDict]:
        return [{**asdict(one), "errors": one.errors if math.isfinite(one.errors) else None, "why": one.sentence}
                for one in several]

    return {**asdict(verdict), "passed": verdict.is_passed, "why": verdict.why,
            "refusals": tests(verdict.refusals[:50]), "on_all_rows": tests(verdict.on_all_rows)}


def earlier_gate(record: JsonMap) -> EarlierGate:
    """Read the published version's record, which is empty if there was no gate."""
    auc, error = to_finite(record.get("auc")), to_finite(record.get("auc_error"))
    return EarlierGate(None if auc is None or error is None else Estimate(auc, error), record.get("sums", {}),
                       record.get("score_edges", ()), record.get("score_counts", {}))
