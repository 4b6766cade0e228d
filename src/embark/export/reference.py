"""What a model was evaluated on, in an artifact: of each column the bins of its values and how many rows lie in each,
and the histogram of the scores. A server counts requests in the same bins. No row and no value of text is kept."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from embark.data import open_source
from embark.data.loader import Batch, SampleSource, weights_by_feature
from embark.data.prepared import Rows
from embark.errors import EmbarkError
from embark.events.drift import NUM_SCORE_BINS
from embark.features.arrays import Array, Int64s
from embark.features.encoding import RowEncoder
from embark.features.numbers import Numbers
from embark.formatting import pluralize
from embark.spec import RunSpec, Table

REFERENCE = "reference.json"
MAX_ROWS = 65_536  # Size of the sample.
_PIECES = 16  # Parts of the sample, spread over all rows.
_LEAST_HELD_OUT = 1_000  # With fewer held-out rows, training rows are taken.
_NUM_QUANTILES = 10
_NUM_TOP, _ALL_TOP, _NUM_TAIL = 10, 24, 8  # Ids with a bin of their own; all where they are few; bins of the rest.
_LENGTHS = (0, 1, 2, 4, 8, 16, 32, 64, 128)

Count = Annotated[int, Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ColumnBins(_Section):
    """The bins of one column, for the values that the model reads."""

    name: str
    kind: Literal["dense", "ids", "length"]
    zero: float = 0.0  # `dense`: the value that replaces a missing one, which has the first bin.
    top: tuple[int, ...] = ()  # `ids`: frequent ids, ascending; each has a bin of its own, after the bin of id 0.
    edges: tuple[float, ...]  # Upper ends of the bins, ascending and included in their bin.
    labels: tuple[str, ...]
    counts: tuple[Count, ...]  # Reference rows in each bin.

    def count(self, values: Array) -> Int64s:
        """Count the values in each bin."""
        bins = np.searchsorted(self.edges, values, side="left")
        if self.kind == "ids":
            top = np.asarray(self.top, np.int64)
            index = np.searchsorted(top, values)
            is_top = top[np.minimum(index, len(top) - 1)] == values if len(top) else np.zeros(len(values), np.bool_)
            bins = np.where(values == 0, 0, np.where(is_top, 1 + index, 1 + len(top) + bins))
        elif self.kind == "dense":
            bins = np.where(values == self.zero, 0, 1 + bins)
        return np.bincount(bins, minlength=len(self.counts))


class Reference(_Section):
    """The statistics of the rows that one version was evaluated on."""

    rows: Literal["held-out", "training"] = "held-out"
    num_rows: Count = 0
    label_rate: float | None = None
    columns: tuple[ColumnBins, ...] = ()
    why_none: str = ""  # Why there are no columns.
    scores: tuple[Count, ...] = ()  # Scores of the run's last evaluation by bin; empty if unknown.

    def count(self, rows: Rows, encoder: RowEncoder, rng: np.random.Generator) -> list[Int64s]:
        """Count rows of requests by column and bin."""
        found = {(kind, name): values for kind, name, values in _values(rows, encoder, rng)}
        return [column.count(found.get((column.kind, column.name), np.empty(0))) for column in self.columns]


def make_reference(
    spec: RunSpec, encoder: RowEncoder, evaluated: Any, source: SampleSource | None
) -> Reference:
    """Compute the statistics of the held-out rows of `source` (by default the run's), or of training rows if few are
    held out. `evaluated` is the run's last evaluation."""
    counts = evaluated.get("score_counts") if isinstance(evaluated, dict) else None
    is_counted = isinstance(counts, list) and len(counts) == NUM_SCORE_BINS and all(
        type(one) is int and one >= 0 for one in counts)
    scores = tuple(counts) if counts and is_counted else ()
    if spec.stream.is_on and spec.data.kind == "synthetic" and source is None:
        return Reference(scores=scores, why_none="the run follows a stream, whose rows are not read on export")
    if spec.model.is_next_item:
        return Reference(scores=scores, why_none="rows to score have a candidate, which the log's users do not have")
    if spec.data.is_custom and source is None:
        return Reference(scores=scores, why_none="the rows of custom data are not read on export")
    try:
        return _of_source(source or open_source(spec), spec, encoder).model_copy(update={"scores": scores})
    except (EmbarkError, OSError) as error:
        return Reference(scores=scores, why_none=getattr(error, "what", str(error)).partition("\n")[0])


def _of_source(source: SampleSource, spec: RunSpec, encoder: RowEncoder) -> Reference:
    is_held_out = source.num_eval_samples >= min(_LEAST_HELD_OUT, source.num_train_samples)
    num = source.num_eval_samples if is_held_out else source.num_train_samples
    batches = [source.eval_rows(start, stop) if is_held_out else source.train_rows(0, start, stop)
               for start, stop in _pieces(num)]
    rng, tables = np.random.default_rng(0), spec.model.table_list()
    label = np.concatenate([batch.label for batch in batches])
    columns: dict[tuple[Kind, str], list[Array]] = {}
    for batch in batches:
        for kind, name, values in _values(encoded_rows(batch, tables, encoder), encoder, rng):
            columns.setdefault((kind, name), []).append(values)
    return Reference(rows="held-out" if is_held_out else "training", num_rows=len(label),
                     label_rate=float(label.mean()) if label.ndim == 1 else None, columns=tuple(
                         _BINS[kind](name, np.concatenate(values), encoder)
                         for (kind, name), values in columns.items()))


def _pieces(num: int) -> Iterator[tuple[int, int]]:
    if num <= MAX_ROWS:
        yield 0, num
        return
    size = MAX_ROWS // _PIECES
    yield from ((start, start + size) for start in (i * (num - size) // (_PIECES - 1) for i in range(_PIECES)))


Kind = Literal["dense", "ids", "length"]


def encoded_rows(batch: Batch, tables: Sequence[Table], encoder: RowEncoder) -> Rows:
    """Return the rows of a loaded batch as the encoder gives them; `tables` are in the batch's order."""
    names = [table.name for table in tables]
    ends = np.cumsum(batch.lengths.sum(axis=1, dtype=np.int64))
    ids = dict(zip(names, np.split(batch.ids, ends[:-1]), strict=True))
    lengths, weights = dict(zip(names, batch.lengths, strict=True)), weights_by_feature(batch, tables)
    own = [(one.feature, lengths[one.feature.weights_of or one.feature.name]) for one in encoder.maps]
    return Rows(batch.label, batch.dense, tuple(
        weights[one.feature.name] if one.feature.weights_of else encoder.rows_of(one, ids[one.feature.name])
        for one in encoder.maps), tuple(
        None if not feature.is_ragged and (num == 1).all() else num for feature, num in own))


def _values(
    rows: Rows, encoder: RowEncoder, rng: np.random.Generator
) -> Iterator[tuple[Kind, str, Array]]:
    """Yield one value of each row for each column. A list gives its length and one of its ids, since the ids of one row
    are not independent."""
    for name, dense, _ in encoder.numbers.by_column(encoder.layout.dense, rows.dense):
        yield "dense", name, dense  # which counts missing values, too
    for feature, ids, lengths in zip(encoder.layout.features, rows.ids, rows.lengths, strict=True):
        if feature.weights_of:
            continue
        flat, num_rows = ids.reshape(-1).astype(np.int64), len(rows)
        nums = np.full(num_rows, len(flat) // max(1, num_rows))
        if feature.is_ragged and lengths is not None:
            nums = lengths.astype(np.int64)
            yield "length", feature.name, nums
        elif len(flat) == num_rows:
            yield "ids", feature.name, flat
            continue
        chosen = (np.cumsum(nums) - nums + (rng.random(num_rows) * nums).astype(np.int64))[nums > 0]
        yield "ids", feature.name, flat[chosen]


def _counted(values: Array, labels: Sequence[str], **fields: Any) -> ColumnBins:
    """Return bins with the number of values in each."""
    bins = ColumnBins(labels=tuple(labels), counts=(0,) * len(labels), **fields)
    return bins.model_copy(update={"counts": tuple(bins.count(values).tolist())})


def _quantiles(values: Array, num_bins: int) -> Array:
    """Return the edges between bins that hold about as many values each."""
    if not len(values):
        return np.empty(0)
    edges = np.unique(np.quantile(values, np.linspace(0, 1, num_bins + 1)[1:-1], method="lower"))
    return edges[:-1] if edges[-1] >= values.max() else edges


def _range_labels(edges: Sequence[str]) -> list[str]:
    if not edges:
        return []
    return [f"up to {edges[0]}", *(f"{low} to {high}" for low, high in pairwise(edges)), f"above {edges[-1]}"]


def _dense_bins(name: str, values: Array, encoder: RowEncoder) -> ColumnBins:
    code = encoder.numbers.code_of(name)
    missing = Numbers((code,)).encode(np.full((1, 1), np.nan, np.float32))
    if encoder.layout.dense_bits != 32:
        missing = missing.astype(np.float16).astype(np.float32)
    _, zero, _ = next(Numbers((code,)).by_column(code.names, missing))
    edges = _quantiles(values[values != zero[0]], _NUM_QUANTILES)
    labels = _range_labels([f"{value:.3g}" for value in code.decoded(edges, name)]) or ["other"]
    first = "0" if encoder.plain_ids else "missing or 0" if code.is_plain else "missing"
    return _counted(values, [first, *labels], name=name, kind="dense", edges=tuple(edges.tolist()),
                    zero=float(zero[0]))


def _id_bins(name: str, values: Array, encoder: RowEncoder) -> ColumnBins:
    ids, nums = np.unique(values[values != 0], return_counts=True)
    num_top = len(ids) if len(ids) <= _ALL_TOP else _NUM_TOP
    top = np.sort(ids[np.argsort(-nums, kind="stable")[:num_top]])
    edges = _quantiles(values[(values != 0) & ~np.isin(values, top)], _NUM_TAIL)
    tail = [f"other ids {label}" for label in _range_labels([f"{value:.0f}" for value in edges])]
    id_map = next(one for one in encoder.maps if one.feature.name == name)
    zero = "missing or id 0"
    if encoder.plain_ids:
        zero = "id 0"
    elif id_map.keys is not None and not id_map.hashed_rows:
        zero = "missing or unseen"
    labels = [zero, *(f"id {value}" for value in top.tolist()), *(tail or ["other ids"])]
    return _counted(values, labels, name=name, kind="ids", edges=tuple(edges.tolist()), top=tuple(top.tolist()))


def _length_bins(name: str, values: Array, encoder: RowEncoder) -> ColumnBins:
    most = next(feature.multi_hot for feature in encoder.layout.features if feature.name == name)
    edges = [edge for edge in _LENGTHS if edge < most]
    labels = ["no ids", *(pluralize(high, "id") if low + 1 == high else f"{low + 1} to {high} ids"
                          for low, high in pairwise([*edges, most]))]
    return _counted(values, labels, name=name, kind="length", edges=tuple(edges))


_BINS = {"dense": _dense_bins, "ids": _id_bins, "length": _length_bins}
