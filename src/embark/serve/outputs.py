"""What a model answers with: one number for each row, or of several tasks an output of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.spec.model import ModelSpec

SCORE = "score"
Row = float | tuple[float, ...]  # One score, or all outputs of all tasks.


@dataclass(frozen=True, slots=True)
class Output:
    """One output: its name, and where its numbers are among those of a row."""

    name: str
    start: int
    num: int
    is_list: bool  # Of classes: a probability of each.

    @property
    def shape(self) -> list[int]:
        """With −1 for the rows, as the Open Inference Protocol has it."""
        return [-1, self.num] if self.is_list else [-1]

    def of(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """[n], or [n, classes], of the scores of rows."""
        if rows.ndim == 1:
            return rows
        found: NDArray[np.float32] = rows[:, self.start : self.start + self.num] if self.is_list else \
            rows[:, self.start]
        return found


def outputs_of(model: ModelSpec) -> tuple[Output, ...]:
    """`score`, or one of each task by its name: probability of a 1, number, or probability of each class."""
    if not model.tasks:
        return (Output(SCORE, 0, 1, is_list=False),)
    starts = np.cumsum([0, *(task.num_outputs for task in model.tasks)]).tolist()
    return tuple(Output(task.name, start, task.num_outputs, task.loss == "softmax")
                 for task, start in zip(model.tasks, starts, strict=False))


def tensors_of(
    outputs: Sequence[Output], scores: NDArray[np.float32],
) -> Iterator[tuple[dict[str, Any], NDArray[np.float32]]]:
    """Of rows that all have scores: the name, type and shape of each output, and its numbers."""
    for output in outputs:
        values = output.of(scores)
        yield {"name": output.name, "datatype": "FP32", "shape": list(values.shape)}, values


def answer_of(model: ModelSpec, rows: Sequence[Row | None], *, is_by_row: bool = False) -> Any:
    """For JSON: a list of scores, or of several tasks one list of each; None for rows without. `is_by_row`: an object
    with all tasks for each row."""
    if not model.tasks:
        return rows
    if is_by_row:
        return [None if row is None else {output.name: _part(output, row) for output in outputs_of(model)}
                for row in rows]
    return {output.name: [None if row is None else _part(output, row) for row in rows] for output in outputs_of(model)}


def _part(output: Output, row: Row) -> Any:
    assert isinstance(row, tuple)
    return list(row[output.start : output.start + output.num]) if output.is_list else row[output.start]
