"""What a model answers with: one number for each row, or of several tasks an output of each."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from embark.features.arrays import Floats
from embark.spec import ModelSpec
from embark.values import JsonDict, frozen

SCORE = "score"
Row = float | tuple[float, ...]  # One score, or all outputs of all tasks.


@frozen
class Output:
    """One output of a model: its name, and where its numbers stand in a row of scores."""

    name: str
    start: int
    num: int
    is_list: bool  # Holds a probability for each class.

    @property
    def shape(self) -> list[int]:
        """The shape by the Open Inference Protocol, with -1 for the rows."""
        return [-1, self.num] if self.is_list else [-1]

    def of(self, rows: Floats) -> Floats:
        """Return the numbers of this output, [n] or [n, classes], from the scores of rows."""
        if rows.ndim == 1:
            return rows
        found: Floats = rows[:, self.start : self.start + self.num] if self.is_list else \
            rows[:, self.start]
        return found


def outputs_of(model: ModelSpec) -> tuple[Output, ...]:
    """Return the outputs of a model: `score`, or one for each task by its name (probability of a 1, a number, or the
    probability of each class)."""
    if not model.tasks:
        return (Output(SCORE, 0, 1, is_list=False),)
    starts = np.cumsum([0, *(task.num_outputs for task in model.tasks)]).tolist()
    return tuple(Output(task.name, start, task.num_outputs, task.loss == "softmax")
                 for task, start in zip(model.tasks, starts, strict=False))


def tensors_of(
    outputs: Sequence[Output], scores: Floats
) -> Iterator[tuple[JsonDict, Floats]]:
    """Yield the name, type and shape of each output with its numbers, for rows that all have scores."""
    for output in outputs:
        values = output.of(scores)
        yield {"name": output.name, "datatype": "FP32", "shape": list(values.shape)}, values


def answer_of(model: ModelSpec, rows: Sequence[Row | None], *, is_by_row: bool = False) -> Any:
    """Return scores for JSON: a list, or one list for each task, with None for rows without a score. With `is_by_row`,
    an object with all tasks for each row."""
    if not model.tasks:
        return rows
    if is_by_row:
        return [None if row is None else {output.name: _part(output, row) for output in outputs_of(model)}
                for row in rows]
    return {output.name: [None if row is None else _part(output, row) for row in rows] for output in outputs_of(model)}


def _part(output: Output, row: Row) -> Any:
    assert isinstance(row, tuple)
    return list(row[output.start : output.start + output.num]) if output.is_list else row[output.start]
