"""`embark.predict`: the scores of rows in memory, by the scorer of `embark serve`."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from embark.errors import DataError, EmbarkError, UserError, nearest
from embark.export.artifact import open_artifact, open_versions
from embark.export.outputs import outputs_of
from embark.features.arrow.row_parser import RowParser, json_array
from embark.formatting import pluralize
from embark.store.checkpoint_inspect import find_trained
from embark.values import JsonMap, frozen
from .request_rows import RequestColumns, RequestScorer, TensorColumns

if TYPE_CHECKING:
    import pandas as pd

NUM_ROWS = 65_536  # Rows that are scored together.
_AS_TRAINED = "give the column the values that it had in the training data; `pandas.read_csv(…, dtype=str)` keeps " \
              "text as it is in the file"
_VERSION = re.compile(r"(.*?)/*version-0*(\d+)/*")
_NUM_QUOTED = 3


def predict(
    run: str, rows: pd.DataFrame | pa.Table | Sequence[JsonMap], *, version: int | None = None,
    model_file: str = "",
) -> Any:
    """Return the scores of raw rows, in their order: what `embark score` gives for the same rows.

    `run` is a run (its newest checkpoint, or that of `RUN@best` and `RUN@STEP`), an exported model, or one version's
    folder. Of a DataFrame the scores are a Series with its index, or with several tasks a DataFrame; of dicts and Arrow
    tables they are an array, or a dict of them. A row that cannot be read has NaN, and a warning says why; it is an
    error if no row can. `model_file` is the code of an exported custom model.
    """
    scorer = _scorer_of(run, version, model_file)
    columns = _columns_of(rows, scorer)
    found = [scorer.score([_Portion(columns, start, min(NUM_ROWS, len(columns) - start))])[0]
             for start in range(0, len(columns), NUM_ROWS)]
    outputs = outputs_of(scorer.artifact.info.model)
    values, errors = [np.empty((0, *((outputs[-1].start + outputs[-1].num,) if len(outputs) > 1 else ())), np.float32)
                      ], []
    for number, scores in enumerate(found):
        if isinstance(scores, EmbarkError):
            raise type(scores)(scores.what.replace("the request: ", ""), fix=_AS_TRAINED)
        values.append(scores.values)
        errors += [(number * NUM_ROWS + row, why) for row, why in scores.errors]
    if errors:
        _tell(errors, len(columns))
    of_rows = np.concatenate(values[1:] or values)
    by_output = {output.name: output.of(of_rows) for output in outputs}
    return _like(rows, by_output)


def _like(rows: Any, by_output: dict[str, NDArray[np.float32]]) -> Any:
    """Return the scores in the kind of container that the rows came in."""
    if not _is_pandas(rows):
        return by_output if len(by_output) > 1 else next(iter(by_output.values()))
    import pandas as pd

    frame = pd.DataFrame({name: values if values.ndim == 1 else list(values) for name, values in by_output.items()},
                         index=rows.index)
    return frame if len(by_output) > 1 else frame.iloc[:, 0]


def _tell(errors: Sequence[tuple[int, str]], num_rows: int) -> None:
    """Warn of the rows without a score, or raise if there is no other."""
    quoted = "; ".join(f"row {row:,}: {why}" for row, why in errors[:_NUM_QUOTED])
    what = f"{pluralize(len(errors), 'row')} of {num_rows:,} cannot be scored: {quoted}"
    if len(errors) == num_rows:
        raise DataError(what, _AS_TRAINED)
    warnings.warn(f"{what}. Their scores are NaN.", stacklevel=3)


def _scorer_of(run: str, version: int | None, model_file: str) -> RequestScorer:
    """Open the exported model, or export the run's checkpoint to a temporary folder."""
    uri, named = run.rstrip("/") or run, _VERSION.fullmatch(run)
    if named and version is None:
        uri, version = named[1] or ".", int(named[2])
    if named or open_versions(uri).committed():
        artifact = open_artifact(uri, version)
        return _opened(artifact.uri, artifact.version, artifact.identity, model_file)
    if version is not None:
        raise UserError(f"{run}: version {version} is of an exported model, and this is none",
                        f"leave `version` out, or name the folder that `embark export {run}` writes")
    trained = find_trained(run)
    checkpoint = trained.checkpoint
    mark = repr(sorted((name, one.sha256) for name, one in checkpoint.files.items()))
    return _exported(trained.run_dir.uri, checkpoint.step, mark)


@lru_cache(maxsize=1)
def _opened(uri: str, version: int, identity: str, model_file: str) -> RequestScorer:
    """Load a version; the last one stays loaded for the next call."""
    from embark.trainers.torch.scoring.open_model import open_on_cpu

    artifact = open_artifact(uri, version, identity=identity)
    return RequestScorer(artifact, open_on_cpu(artifact, model_file).score)


@lru_cache(maxsize=1)
def _exported(run: str, step: int, mark: str) -> RequestScorer:
    """Load a checkpoint; the last one stays loaded for the next call."""
    from embark.export.export_run import export_run
    from embark.trainers.torch.scoring.open_model import open_on_cpu

    with TemporaryDirectory(prefix="embark-predict-") as folder:  # Mapped files outlive their names.
        written = export_run(run, folder, step=step)
        artifact = open_artifact(written.uri)
        return RequestScorer(artifact, open_on_cpu(artifact, written.model_file).score)


@frozen
class _Portion(RequestColumns):
    """Some of the rows."""

    whole: RequestColumns
    start: int
    num_rows: int

    def __len__(self) -> int:
        return self.num_rows

    @property
    def names(self) -> Any:
        return self.whole.names

    def column(self, name: str, parser: RowParser) -> Any:
        return self.whole.column(name, parser)[self.start : self.start + self.num_rows]


def _columns_of(rows: Any, scorer: RequestScorer) -> RequestColumns:
    """Return the columns that the model takes, as Arrow arrays; raise if one is missing."""
    if isinstance(rows, Sequence) and not isinstance(rows, str | bytes) and all(isinstance(r, Mapping) for r in rows):
        _check_names({str(name) for row in rows for name in row}, scorer, num_rows=len(rows))
        return TensorColumns(len(rows), {name: _of_values([row.get(name) for row in rows], name, scorer)
                                         for name in scorer.columns})
    if _is_pandas(rows):
        _check_names([str(name) for name in rows.columns], scorer, num_rows=len(rows))
        arrays = {name: _of_series(rows[name], name, scorer) for name in scorer.columns}
    elif hasattr(rows, "__arrow_c_stream__"):
        table = pa.table(rows)
        _check_names(table.column_names, scorer, num_rows=len(table))
        arrays = {name: table[name].combine_chunks() for name in scorer.columns}
    else:
        raise UserError(f"rows: {type(rows).__name__} is neither a DataFrame, an Arrow table nor a list of dicts",
                        "`embark.score_file` scores files")
    return TensorColumns(len(rows), {name: _as_trained(array, name, scorer) for name, array in arrays.items()})


def _check_names(given: Any, scorer: RequestScorer, *, num_rows: int) -> None:
    lacking = [name for name in scorer.columns if name not in given] if num_rows else []
    if lacking:
        near = nearest(lacking[0], given) if given else ""
        raise DataError(f"the rows have no column {', '.join(map(repr, lacking))}, which the model takes",
                        f"{near or 'add it'}; a column of None stands for values that are missing")


def _is_pandas(rows: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(rows, pandas.DataFrame)


def _of_series(series: Any, name: str, scorer: RequestScorer) -> Any:
    """Return a column of a DataFrame as an Arrow array; cells of several types as JSON has them."""
    if getattr(series, "ndim", 1) != 1:
        raise DataError(f"the rows have several columns {name!r}", "rename all but one")
    try:
        array = pa.array(series, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return _of_values(series.tolist(), name, scorer)
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _of_values(cells: Sequence[Any], name: str, scorer: RequestScorer) -> Any:
    """Return cells as an Arrow array: of numbers, or of text as JSON has it, in which 7 and 7.0 are two words."""
    values = [_plain_cell(value, name) for value in cells]
    if {type(value) for value in values} <= {int, float, type(None)} and not _holds_text(name, scorer):
        with suppress(pa.ArrowInvalid, OverflowError):
            return pa.array(values)
    return json_array(values, scorer.parser.split_cell)


def _holds_text(name: str, scorer: RequestScorer) -> bool:
    return any(column.source == name and column.kind == "text" for column in scorer.artifact.info.rows.columns.sparse)


def _plain_cell(value: Any, name: str) -> Any:
    """Return a cell as a value of JSON, None where there is none; raise if it is nothing that a file could hold."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return None if value != value else value
    if isinstance(value, list | tuple):
        return [_plain_cell(one, name) for one in value]
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, date | datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise DataError(f"column {name!r} holds {type(value).__name__}, which no file of rows could hold", _AS_TRAINED)


def _as_trained(array: Any, name: str, scorer: RequestScorer) -> Any:
    """Undo what reading a file as a DataFrame did to a column: whole numbers with missing values are floats there, and
    days are times. Words that are not words any more are refused."""
    kind, schema = array.type, scorer.artifact.info.rows.columns
    if array.null_count == len(array):  # an empty column of a file is one of fractions in a DataFrame
        return pa.nulls(len(array))
    formats = {time.format for time in schema.times if time.name == name}
    if pa.types.is_timestamp(kind) and formats == {"date"}:
        days = array.cast(pa.date32(), safe=False)
        if days.cast(kind).equals(array):
            return days
    if not (pa.types.is_floating(kind) or pa.types.is_boolean(kind)) or not _holds_text(name, scorer):
        return array
    if pa.types.is_floating(kind) and array.null_count and _is_whole(array):
        return array.cast(pa.int64())
    if schema.format == "jsonl":
        return json_array(array.to_pylist())
    if schema.format != "parquet":
        raise DataError(f"column {name!r} holds {'booleans' if pa.types.is_boolean(kind) else 'fractions'}, and the "
                        "model was trained on the words of a file, which they cannot be turned back into",
                        f"read it as text: pandas.read_csv(…, dtype={{{name!r}: str}})")
    return array


def _is_whole(array: Any) -> bool:
    is_whole = pc.and_(pc.equal(pc.floor(array), array), pc.less(pc.abs(array), 2.0**53))
    return bool(pc.all(is_whole).as_py())
