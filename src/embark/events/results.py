"""Results as plain values and as data frames; pandas is imported when one is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from embark.errors import MissingPackage
from embark.values import JsonDict
from .events import read_events, to_jsonable

if TYPE_CHECKING:
    import pandas as pd

_MEASURES = ("loss", "auc", "log_loss", "normalized_entropy", "calibration", "recall_at_k", "ndcg_at_k", "hit_at_k")


class Tabular(ABC):
    """A result that is a table or has one."""

    __slots__ = ()

    @abstractmethod
    def to_rows(self) -> list[JsonDict]:
        """Return a dict of plain values for each row of the table."""

    def to_dict(self) -> JsonDict:
        """Return all fields as values of JSON: what the command prints with `--json`."""
        found: JsonDict = to_jsonable(self)
        return found

    def to_pandas(self) -> pd.DataFrame:
        """Return the table as a data frame."""
        return data_frame(self.to_rows())


class TrainResult(JsonDict):
    """The values of the last evaluation and of the end of a run; as a table, its curves."""

    def __repr__(self) -> str:
        """Return the single figures: a notebook shows the last value of a cell."""
        shown = {name: value for name, value in self.items() if isinstance(value, (int, float, str))}
        return f"TrainResult({shown})"

    def to_rows(self) -> list[JsonDict]:
        """Return a row for each step that was logged or evaluated; `eval_` columns are of held-out rows."""
        rows: dict[int, JsonDict] = {}
        path = Path(str(self.get("run_dir", ""))) / "events.jsonl"
        for event in read_events(path) if path.is_file() else ():
            if event.kind in ("step", "eval") and isinstance(step := event.values.get("step"), int):
                prefix = "eval_" if event.kind == "eval" else ""
                names = _MEASURES if prefix else (*_MEASURES, "samples_per_s")
                rows.setdefault(step, {"step": step}).update(
                    {prefix + name: event.values[name] for name in names if name in event.values})
        return [rows[step] for step in sorted(rows)]

    def to_dict(self) -> JsonDict:
        """Return the values of the last evaluation and of the end as values of JSON."""
        return {name: to_jsonable(value) for name, value in self.items()}

    def to_pandas(self) -> pd.DataFrame:
        """Return the curves as a data frame, a row for each step that was logged or evaluated."""
        return data_frame(self.to_rows())


def data_frame(rows: Sequence[JsonDict]) -> pd.DataFrame:
    """Return rows as a data frame with the columns of all of them."""
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingPackage("a data frame needs pandas, which is not installed",
                             "pip install 'embark-rec[notebook]'") from error
    return pd.DataFrame(rows, columns=list(dict.fromkeys(name for row in rows for name in row)))
