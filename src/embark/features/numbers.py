"""Number columns as dense values: what each transform computes, and its state, which is fitted to training rows.

A sample of training rows is drawn by the rows' positions, so that neither the number of workers nor the size of the
pieces changes the state. Preparation, files in memory, streams and serving encode numbers here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from embark.errors import DataError, UserError
from embark.spec import FeaturesSpec
from embark.spec.features import NumberTransform
from embark.store import commit
from embark.values import frozen
from .arrays import Array, Doubles, Floats, Hashes, Int64s
from .hashing import hash_counters, stream_key
from .schema import Schema

MAX_SAMPLE_VALUES = 1 << 22
MAX_SAMPLE_ROWS = 1 << 16
MAX_SPLIT_ROWS = 1 << 18
"""With more training rows a column is split into buckets only where the spec says so: it takes as many values a row."""
_SLAB_ROWS = 4096  # So few that their columns stay in the processor's cache.
REPEATED_BUCKETS = 3  # Times as many, where one value stands in more rows than a bucket has.
LIMIT = 8.0  # Standard deviations from the mean at which a standardized value is cut.
_SAMPLE = 90_417
_HEAVY_TAIL = 4.0
_NUM_RANKS = 100
_DIGEST_BYTES = sha256().digest_size
_LARGEST = float(np.finfo(np.float32).max)


@frozen
class NumberCode:
    """How one column becomes dense values."""

    column: str
    transform: NumberTransform
    has_flag: bool = False
    fill: float = 0.0  # What a missing cell counts as.
    low: float = -_LARGEST  # Smaller values count as this.
    high: float = _LARGEST
    mean: float = 0.0  # Of the values after a logarithm.
    scale: float = 1.0
    limit: float = _LARGEST  # The largest distance of a scaled value from 0.
    boundaries: tuple[float, ...] = ()  # Rising, of quantile buckets.
    ranks: tuple[float, ...] = ()  # From −1 to 1, of the boundaries of `quantiles`.
    bucket_bounds: tuple[float, ...] | None = None  # Rising, between the rows of a table; None without one.
    why: str = ""  # For people to read.

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its dense values."""
        bins = tuple(f"{self.column}_bin_{number}" for number in range(1, len(self.boundaries)))
        return (bins if self.transform == "piecewise_linear" else (self.column,)) + \
            ((f"{self.column}_missing",) if self.has_flag else ())

    @property
    def is_plain(self) -> bool:
        """Whether a value is a function of the cell alone, without a state."""
        return self == NumberCode(self.column, self.transform, why=self.why)

    def describe(self) -> str:
        """Say in words what becomes of the column, and why."""
        parts = [self.transform.replace("_", "-"), *([f"{len(self.boundaries) - 1} bins"]
                                                     if self.transform == "piecewise_linear" else [])]
        flag = f", with {self.column}_missing" if self.has_flag else ""
        if self.bucket_bounds is not None:
            flag += f", and a table of {len(self.bucket_bounds) + 1} quantile buckets"
        return " of ".join(parts) + flag + (f" ({self.why})" if self.why else "")

    def decoded(self, values: Array, name: str) -> Doubles:
        """Return the cells that encode as these dense values of `name`, where those say it."""
        wide: Doubles = values.astype(np.float64)
        if name != self.column:
            return wide
        if self.transform == "mlperf":
            return np.exp(wide) - 3
        if self.transform == "quantiles":
            return np.interp(wide, self.ranks, self.boundaries)
        wide = wide * self.scale + self.mean
        return np.copysign(np.expm1(np.abs(wide)), wide) if self.transform == "log" else wide


CODES = TypeAdapter(tuple[NumberCode, ...])


@dataclass(frozen=True)
class Numbers:
    """How all number columns become dense values."""

    codes: tuple[NumberCode, ...]

    @staticmethod
    def plain(transform: NumberTransform, columns: Sequence[str]) -> Numbers:
        """Return the codes of a transform that has no state; a missing value counts as 0."""
        return Numbers(tuple(NumberCode(name, transform) for name in columns))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all dense values."""
        return tuple(name for code in self.codes for name in code.names)

    def code_of(self, name: str) -> NumberCode:
        """Return the code of this column, or whose dense value has this name; statistics of values are what they
        are."""
        return self._by_name.get(name) or NumberCode(name, "none")

    @cached_property
    def _by_name(self) -> dict[str, NumberCode]:
        return {name: code for code in self.codes for name in (code.column, *code.names)}

    def by_column(
        self, names: Sequence[str], dense: Array
    ) -> Iterator[tuple[str, Array, Array | None]]:
        """Yield the values of each column that dense values with these names are made of, and where it is missing if
        it has a flag. A column that is split into bins has the values of its cells."""
        positions: dict[str, list[int]] = {}
        for at, name in enumerate(names):
            positions.setdefault(self.code_of(name).column, []).append(at)
        for column, found in positions.items():
            code, flag = self.code_of(column), None
            if code.has_flag and len(found) > 1:
                flag = dense[:, found.pop()]
            values = dense[:, found[0]]
            if code.transform == "piecewise_linear":
                sums = dense[:, found].sum(axis=1, dtype=np.float64)
                values = np.interp(sums, np.arange(len(code.boundaries)), code.boundaries)
            yield column, values, flag

    @cached_property
    def _plain(self) -> str:
        """The transform of all columns if it has no state."""
        transforms = {code.transform if code.is_plain else "" for code in self.codes}
        return transforms.pop() if len(transforms) == 1 else ""

    @cached_property
    def _vectors(self) -> dict[str, Floats]:
        """A number of each column, [columns, 1], by the name of the field."""
        found = {name: np.array([[getattr(code, name)] for code in self.codes], np.float32)
                 for name in ("fill", "low", "high", "mean", "scale", "limit")}
        # Which zero a cut at 0 gives depends on the processor; without −0.0 it is always 0.0.
        found["mean"][((found["low"] == 0) | (found["high"] == 0)) & (found["mean"] == 0)] = -0.0
        return found

    @cached_property
    def _columns(self) -> Mapping[str, list[int]]:
        """The positions of the columns of each transform that is more than a scale."""
        return {how: found for how in ("log", "mlperf", "quantiles", "piecewise_linear")
                if (found := [at for at, code in enumerate(self.codes) if code.transform == how])}

    def encode(self, dense: Floats) -> Floats:
        """Return the dense values of cells [n, columns]: [n, names]. The array of cells may be changed."""
        if self._plain or not self.codes:
            _transform_plain(dense, self._plain)
            return dense
        found = np.empty((len(dense), len(self.names)), np.float32)
        for start in range(0, len(dense), _SLAB_ROWS):
            rows = slice(start, start + _SLAB_ROWS)
            self._encode_slab(dense[rows], found[rows])
        return found

    def _encode_slab(self, dense: Floats, found: Floats) -> None:
        """Write the dense values of some rows, column by column, which is faster than row by row."""
        vectors, values = self._vectors, np.array(dense.T, np.float32, order="C")
        is_missing, bits = np.isnan(values), values.view(np.uint32)
        bits ^= (bits ^ vectors["fill"].view(np.uint32)) * is_missing  # a third of the time of `np.where`
        np.clip(values, vectors["low"], vectors["high"], out=values)
        for how in ("log", "mlperf"):
            if columns := self._columns.get(how):
                part = values[columns]
                _transform_plain(part, how)
                values[columns] = part
        values -= vectors["mean"]
        values /= vectors["scale"]
        np.clip(values, -vectors["limit"], vectors["limit"], out=values)
        for at in self._columns.get("quantiles", ()):
            values[at] = np.interp(values[at], self.codes[at].boundaries, self.codes[at].ranks)
        flags, is_split = is_missing.astype(np.float32), "piecewise_linear" in self._columns
        if len(self.names) == len(self.codes) and not is_split:
            found[:] = values.T
            return
        if not is_split and all(code.has_flag for code in self.codes):
            found[:, ::2], found[:, 1::2] = values.T, flags.T
            return
        position = 0
        for at, code in enumerate(self.codes):
            num = len(code.names) - code.has_flag
            if code.transform == "piecewise_linear":
                edges = np.array(code.boundaries)  # float64, in which no difference is infinite
                shares = (values[at][:, None] - edges[:-1]) / np.diff(edges)
                found[:, position : position + num] = np.clip(shares, 0, 1)
            else:
                found[:, position] = values[at]
            position += num
            if code.has_flag:
                found[:, position] = flags[at]
                position += 1


def recorded_numbers(record: Any, features: FeaturesSpec, columns: Sequence[str]) -> Numbers:
    """Read the state in a manifest or an artifact; those without one name a transform that has none."""
    if record is None:
        how = features.numbers
        return Numbers.plain("log" if how == "auto" else how, columns)
    found = read_numbers(record)
    if tuple(code.column for code in found.codes) != tuple(columns):
        raise DataError("the record of the numbers' transforms is of other columns",
                        "prepare the data again, with this version of Embark")
    return found


def read_numbers(record: Any) -> Numbers:
    """Read the state in a manifest or an artifact."""
    try:
        return Numbers(CODES.validate_json(json.dumps(record)))
    except (ValidationError, ValueError) as error:
        raise DataError(f"the record of the numbers' transforms is not readable ({str(error)[:200]})",
                        "prepare the data again, with this version of Embark") from None


def numbers_of(fitted: str, columns: Sequence[str]) -> Numbers:
    """Read the state of a spec; without one, cells are the dense values."""
    if not fitted:
        return Numbers.plain("none", columns)
    try:
        found = Numbers(CODES.validate_json(fitted))
    except ValidationError as error:
        raise UserError(f"features.fitted: is not what a run wrote ({error.errors()[0]['msg']})", "leave it out") \
            from None
    if found.names != tuple(columns):
        raise UserError(f"features.fitted: is of the columns {', '.join(found.names)}, not {', '.join(columns)}",
                        "leave it out")
    return found


def _transform_plain(dense: Floats, method: str) -> None:
    """Transform the array in place. A missing value counts as 0 first, as in the MLPerf reference."""
    np.copyto(dense, 0, where=np.isnan(dense))
    if method == "mlperf":
        np.maximum(dense, np.float32(-2), out=dense)
        dense += np.float32(3)
        np.log(dense, out=dense)
    elif method == "log":
        size = np.abs(dense)
        np.log1p(size, out=size)
        np.copysign(size, dense, out=dense)


@frozen
class NumberSample:
    """Cells of training rows: those whose draws are the lowest, and how many of all rows have no value."""

    draws: Hashes  # [n], rising.
    dense: Floats  # [n, columns]
    num_missing: Int64s  # [columns]: of all training rows.
    num_rows: int

    @staticmethod
    def of(seed: int, stream: int, positions: Int64s, dense: Floats, highest: np.uint64 | None = None) -> NumberSample:
        """Draw from training rows; `stream` tells files apart. Draws above `highest` are of no interest."""
        draws = hash_counters(stream_key(seed, _SAMPLE, stream), positions)
        low = np.arange(len(draws)) if highest is None else np.flatnonzero(draws <= highest)
        chosen = low[np.argsort(draws[low])[: sample_rows(dense.shape[1])]]
        return NumberSample(draws[chosen], dense.take(chosen, axis=0), np.isnan(dense).sum(axis=0), len(dense))

    @staticmethod
    def none(num_columns: int) -> NumberSample:
        """Return the sample of no rows."""
        return NumberSample(np.empty(0, np.uint64), np.empty((0, num_columns), np.float32),
                            np.zeros(num_columns, np.int64), 0)

    @staticmethod
    def join(several: Sequence[NumberSample]) -> NumberSample:
        """Return the sample of all rows together."""
        draws, dense = (np.concatenate([getattr(one, name) for one in several]) for name in ("draws", "dense"))
        chosen = np.argsort(draws, kind="stable")[: sample_rows(dense.shape[1])]
        return NumberSample(draws[chosen], dense[chosen], np.sum([one.num_missing for one in several], axis=0),
                            sum(one.num_rows for one in several))

    def write(self, path: Path) -> None:
        """Write it to a file with its checksum, complete or not at all."""
        content = BytesIO()
        for array in (self.draws, self.dense, self.num_missing, np.array(self.num_rows)):
            np.save(content, array)
        with open(f"{path}.part", "wb") as file:
            file.write(sha256(content.getbuffer()).digest())
            file.write(content.getbuffer())
            commit(file, path)

    @staticmethod
    def read(path: Path) -> NumberSample:
        """Read it from a file."""
        data = path.read_bytes()
        if sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
            raise DataError(f"{path} is damaged", "--fresh starts the preparation over")
        content = BytesIO(data[_DIGEST_BYTES:])
        draws, dense, num_missing, num_rows = (np.load(content) for _ in range(4))
        return NumberSample(draws, dense, num_missing, int(num_rows))


class DrawnRows:
    """The lowest draws of all training rows that one process has seen. What they keep out of the sample of a segment
    would not be in that of all rows, so the segments' samples are small."""

    def __init__(self) -> None:
        self._lowest = np.empty(0, np.uint64)
        self.highest: np.uint64 | None = None

    def add(self, sample: NumberSample) -> None:
        """Take the draws of a sample; those of rows that were seen before count once."""
        rising = np.sort(np.concatenate([self._lowest, sample.draws]), kind="stable")
        rising = rising[np.flatnonzero(np.diff(rising, prepend=~rising[:1]))]
        num = sample_rows(sample.dense.shape[1])
        self._lowest = rising[:num]
        self.highest = rising[num - 1] if len(rising) >= num else None


def sample_rows(num_columns: int) -> int:
    """Return how many rows a sample has at most."""
    return max(1024, min(MAX_SAMPLE_ROWS, MAX_SAMPLE_VALUES // max(1, num_columns)))


def fixed_numbers(features: FeaturesSpec, columns: Sequence[str], *, is_criteo: bool) -> Numbers | None:
    """Return codes that need no statistics; None where some column does."""
    if features.missing_flags is True or any(name in features.columns for name in columns):
        return None if columns else Numbers(())
    if features.numbers == "mlperf" or (is_criteo and features.numbers == "auto") or not columns:
        return Numbers.plain("mlperf", columns)
    return None


def with_bounds(schema: Schema, numbers: Numbers) -> Schema:
    """Return the schema with the boundaries between the quantile buckets that are tables."""
    bounds = {code.column: code.bucket_bounds or () for code in numbers.codes}
    return replace(schema, sparse=tuple(replace(column, buckets=(bounds[column.parts[0]],))
                                        if column.kind == "bucket" else column for column in schema.sparse))


def fit_numbers(
    features: FeaturesSpec, columns: Sequence[str], sample: NumberSample, *, may_add: bool,
    bucketed: Collection[str] = ()
) -> Numbers:
    """Choose the transform of each column and compute its state; `may_add` values beside a column unasked. The buckets
    of those that are `bucketed` are a table."""
    codes, may_split = [], may_add and sample.num_rows <= MAX_SPLIT_ROWS
    for at, name in enumerate(columns):
        cells = sample.dense[:, at].astype(np.float64)
        code = _fit(features, name, cells, has_missing=bool(sample.num_missing[at]), may_add=may_add,
                    may_split=may_split)
        if name in bucketed:
            code = replace(code, bucket_bounds=_bounds(cells, features.bucket_rows(name) - 1))
        codes.append(code)
    found = Numbers(tuple(codes))
    if twins := [name for name in found.names if found.names.count(name) > 1]:
        raise UserError(f"two dense values are called {twins[0]!r}: a column, and what is made of another one",
                        "rename the column, or set features.missing_flags = false")
    return found


def _fit(features: FeaturesSpec, name: str, cells: Doubles, *, has_missing: bool,
         may_add: bool, may_split: bool) -> NumberCode:
    own = features.of(name)
    values = cells[np.isfinite(cells)]
    values = np.clip(values, -_LARGEST if own.min is None else own.min, _LARGEST if own.max is None else own.max)
    if not len(values):
        values = np.zeros(1)
    transform, why = own.transform or features.numbers, "as the spec says"
    if transform == "auto":
        transform, why = _choose(values)
        if may_split:
            transform, why = "piecewise_linear", f"with more than {MAX_SPLIT_ROWS:,} training rows {transform}: {why}"
    wanted = features.missing_flags if own.missing_flag is None else own.missing_flag
    has_flag = has_missing and may_add and transform not in ("mlperf", "none") if wanted == "auto" else wanted
    low, high = own.min, own.max
    if transform == "clip":
        ends = np.quantile(values, [0.01, 0.99])
        low, high = (float(ends[0]) if low is None else low, float(ends[1]) if high is None else high)
        values = np.clip(values, low, high)
    fill = float(np.float32(values.mean()))
    if transform == "mlperf":
        fill = 0.0  # as in the reference
    mean, scale, limit = 0.0, 1.0, _LARGEST
    boundaries: tuple[float, ...] = ()
    ranks: tuple[float, ...] = ()
    if transform == "log":
        wide = np.copysign(np.log1p(np.abs(values)), values)
        fill = float(np.copysign(np.expm1(abs(wide.mean())), wide.mean()))
        mean, scale, limit = float(wide.mean()), float(wide.std()), LIMIT
    elif transform == "standardize":
        near = np.clip(values, *np.quantile(values, [0.001, 0.999]))  # one absurd value is no scale for the others
        fill = mean = float(near.mean())
        scale, limit = float(near.std()), LIMIT
    elif transform in ("piecewise_linear", "quantiles"):
        num = (own.num_buckets or features.num_buckets) if transform == "piecewise_linear" else _NUM_RANKS
        if transform == "piecewise_linear":  # a value of many rows, such as 0, leaves the other rows their buckets
            once, counts = np.unique(values, return_counts=True)
            if own.num_buckets is None and features.has_default("num_buckets") and counts.max() * num > len(values):
                num *= REPEATED_BUCKETS
            values = np.repeat(once, np.minimum(counts, -(-len(values) // num)))
        edges = np.quantile(values, np.linspace(0, 1, num + 1)).astype(np.float32)
        distinct = np.unique(edges)
        if len(distinct) == 1:  # a constant column still has a value
            distinct = np.array([distinct[0], np.nextafter(distinct[0], np.float32(_LARGEST))], np.float32)
        boundaries = tuple(distinct.tolist())
        low, high = boundaries[0], boundaries[-1]  # beyond them nothing differs
        if transform == "quantiles":
            places = [np.searchsorted(edges, distinct, side) for side in ("left", "right")]
            ranks = tuple((np.clip((places[0] + places[1] - 1) / num, 0, 2) - 1).tolist())
    return NumberCode(name, transform, bool(has_flag), fill, -_LARGEST if low is None else low,
                      _LARGEST if high is None else high, mean, scale if scale > 1e-12 else 1.0, limit, boundaries,
                      ranks, why=why)


def _bounds(cells: Doubles, num_buckets: int) -> tuple[float, ...]:
    """Return the boundaries between buckets of about as many rows each."""
    values = cells[np.isfinite(cells)]
    edges = np.quantile(values if len(values) else np.zeros(1), np.linspace(0, 1, num_buckets + 1)[1:-1])
    return tuple(np.unique(edges.astype(np.float32)).tolist())


def _choose(values: Doubles) -> tuple[NumberTransform, str]:
    low, middle, high = np.quantile(values, [0.01, 0.5, 0.99])
    if values.min() >= 0 and high - middle > _HEAVY_TAIL * (middle - low):
        return "log", f"amounts from 0 with a long tail: half are up to {middle:.3g}, 1 % above {high:.3g}"
    return "standardize", f"98 % are from {low:.3g} to {high:.3g}"
