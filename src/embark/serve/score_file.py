"""`embark score`: raw rows of files, and their scores as Parquet, one for each row and in the same order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embark.data.export.parquet_files import write_parquet
from embark.data.prepare.inputs import InputFile, Inputs, open_inputs
from embark.data.prepare.later_rows import schema_in
from embark.data.prepare.sampling import CRITEO_COLUMNS
from embark.data.prepare.tasks import open_reader
from embark.errors import DataError, UserError, nearest
from embark.export.artifact import Artifact, RowFormat, open_artifact, open_features
from embark.export.outputs import outputs_of
from embark.export.portable import input_arrays
from embark.features.arrow.cells import as_utf8, is_text, normalize_array
from embark.features.arrow.row_parser import Location, RowParser
from embark.features.layout import Rows
from embark.features.rows import MAX_QUOTED, RawRows
from embark.features.schema import Schema
from embark.spec.data import PrepareSpec
from embark.values import JsonDict, frozen

NOT_FINITE = "the score is not finite: a dense value is too large"
_CHUNK_BYTES = 8 << 20


@frozen
class ScoreResult:
    """The result of scoring a file."""

    uri: str
    version: int
    rows: str
    path: str
    num_rows: int
    num_scored: int
    mean_score: float | None
    reasons: dict[str, int]  # Number of rows without a score, by reason.
    examples: tuple[str, ...]
    num_lists_cut: int = 0


def score_file(
    artifact: str, rows: str, to: str | Path, *, keep: Sequence[str] = (), version: int | None = None,
    model_file: str = "", force: bool = False,
) -> ScoreResult:
    """Score the raw rows at `rows` (a CSV, JSON Lines or Parquet file, a folder or a glob) into the Parquet file `to`:
    column `score`, or one for each task, and before it the columns of the input that `keep` names. A row that cannot be
    read has no score. `model_file` is a custom model's code."""
    target = Path(to)
    if target.suffix in (".csv", ".tsv", ".json", ".jsonl"):
        raise UserError(f"{target}: scores are written as Parquet", f"--to {target.with_suffix('.parquet')}")
    if target.is_dir():
        raise UserError(f"{target}: is a folder", "name the Parquet file to write")
    if target.exists() and not force:
        raise UserError(f"{target}: exists", "--force replaces it, or name another file")
    opened, (inputs, files) = open_artifact(artifact, version), open_inputs(rows)
    if taken := [output.name for output in outputs_of(opened.info.model) if output.name in keep]:
        raise UserError(f"--keep {taken[0]}: is what the scores are called", "rename the column of the input")
    if any((path := inputs.local_path(file.uri)) and target.exists() and target.samefile(path) for file in files):
        raise UserError(f"{target}: is one of the files to score", "name another file with --to")
    from embark.trainers.torch.scoring.open_model import open_on_cpu

    scoring = _Scoring(opened, inputs, files, tuple(keep), open_on_cpu(opened, model_file).score)
    write_parquet(target, scoring.batches(), {"artifact": opened.uri, "version": str(opened.version)})
    return ScoreResult(
        uri=opened.uri, version=opened.version, rows=rows, path=str(target), num_rows=scoring.num_rows,
        num_scored=scoring.num_scored, reasons=dict(scoring.reasons.most_common()), examples=tuple(scoring.examples),
        num_lists_cut=scoring.num_lists_cut,
        mean_score=scoring.total / scoring.num_scored if scoring.num_scored else None)


def model_inputs(exported: str, rows: str) -> dict[str, NDArray[Any]]:
    """Return the tensors that the model in a folder of `embark export --format` takes for the raw rows at `rows`, by
    their names in features.json. A row that cannot be read is an error."""
    opened, parts = open_features(exported), list[Rows]()

    def encode(raw: RawRows) -> NDArray[np.float32]:
        parts.append(opened.encoder.encode(raw))
        return np.zeros(len(raw), np.float32)

    scoring = _Scoring(opened, *open_inputs(rows), (), encode)
    for _ in scoring.batches():
        pass
    if scoring.reasons:
        raise DataError(f"{rows}: {scoring.num_rows - scoring.num_scored} of {scoring.num_rows} rows cannot be read: "
                        f"{'; '.join(scoring.examples or scoring.reasons)}", "leave them out")
    return input_arrays(opened.info, Rows.join(parts))


@dataclass(slots=True)
class _Scoring:
    artifact: Artifact
    inputs: Inputs
    files: Sequence[InputFile]
    keep: tuple[str, ...]
    score: Callable[[RawRows], NDArray[np.float32]]
    num_rows: int = 0
    num_scored: int = 0
    total: float = 0.0
    num_lists_cut: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the output, one portion of rows at a time."""
        rows, encoder = self.artifact.info.rows, self.artifact.encoder
        schema = _schema_of_files(rows, self.inputs, self.files)
        if lacking := [name for name in self.keep if schema.columns and name not in schema.columns]:
            raise UserError(f"--keep {lacking[0]}: {self.files[0].uri} has no such column",
                            nearest(lacking[0], schema.columns))
        parser = _NumberingParser(schema, rows.prepare, self.keep)
        reader = open_reader(schema, rows.prepare, self.inputs, parser)
        for file in self.files:
            for segment in reader.segments(file, 1 << 62):
                for raw in reader.read(segment, _CHUNK_BYTES):
                    self.examples += [f"{file.uri}, line {bad.line + 1:,}: {bad.why}" for bad in raw.bad]
                    del self.examples[MAX_QUOTED:]
                    raw = encoder.readable(raw)
                    self.num_lists_cut += raw.num_cut
                    yield self._batch(raw, parser)

    def _batch(self, raw: RawRows, parser: _NumberingParser) -> pa.RecordBatch:
        found = self.score(raw)
        is_finite = np.isfinite(found) if found.ndim == 1 else np.isfinite(found).all(axis=1)
        scores = np.zeros((parser.num_rows, *found.shape[1:]), np.float32)
        is_there = np.zeros(parser.num_rows, np.bool_)
        scores[raw.positions[is_finite]] = found[is_finite]
        is_there[raw.positions] = is_finite
        self.num_rows += parser.num_rows
        self.num_scored += int(is_finite.sum())
        outputs = outputs_of(self.artifact.info.model)
        self.total += float(outputs[0].of(scores).sum(dtype=np.float64))
        self.reasons.update(raw.reasons)
        if not is_finite.all():
            self.reasons[NOT_FINITE] += int((~is_finite).sum())
        return pa.RecordBatch.from_pydict({**parser.kept, **{
            output.name: _column(output.of(scores), is_there) for output in outputs}})


class _NumberingParser(RowParser):
    """Numbers the rows of each portion, those that cannot be read included, and keeps columns for the output."""

    def __init__(self, schema: Schema, prepare: PrepareSpec, keep: Sequence[str]) -> None:
        super().__init__(schema, prepare)
        self._keep = keep
        self.num_rows = 0
        self.kept: JsonDict = {}

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys([*super().columns, *self._keep]))

    def parse(self, column: Callable[[str], Any], location: Location, where: str) -> RawRows:
        lines = np.sort(np.concatenate([location.lines, [bad.line for bad in location.bad]]).astype(np.int64))
        numbers = np.searchsorted(lines, location.lines)
        self.num_rows = len(lines)
        indices = np.full(len(lines), -1, np.int64)
        indices[numbers] = np.arange(len(numbers))
        self.kept = {name: _kept(normalize_array(column(name))).take(pa.array(indices, mask=indices < 0))
                     for name in self._keep}
        return super().parse(column, replace(location, positions=numbers), where)


def _schema_of_files(rows: RowFormat, inputs: Inputs, files: Sequence[InputFile]) -> Schema:
    """Return the columns of the files. Criteo's files are read with or without their label, as any text without a
    header."""
    if rows.columns.format != "criteo":
        return schema_in(rows.columns, rows.prepare, inputs, files)
    names = CRITEO_COLUMNS
    head = inputs.read(files[0].uri, 0, 1 << 16).split(b"\n", 1)[0]
    if head.count(b"\t") == len(names) - 2:
        names = names[1:]
    elif head.count(b"\t") != len(names) - 1:
        raise DataError(f"{files[0].uri}: its first line does not have Criteo's {len(names)} fields between tabs, or "
                        f"{len(names) - 1} without the label", "write the rows in the format of the training data")
    return replace(rows.columns, format="csv", delimiter="\t", has_header=False, columns=names)


def _column(values: NDArray[np.float32], is_there: NDArray[np.bool_]) -> Any:
    if values.ndim == 1:
        return pa.array(values, mask=~is_there)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1], mask=pa.array(~is_there))


def _kept(array: Any) -> Any:
    return as_utf8(array) if is_text(array.type) else array
