"""`[[model.tasks]]`: several labels that one model predicts, and the constraints on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from embark.errors import Mistakes, conflict
from .section import Names, Section

if TYPE_CHECKING:
    from .run import RunSpec

MAX_TASKS = 64
MAX_CLASSES = 10_000
TaskHead = Literal["shared_bottom", "mmoe", "ple"]


class Task(Section):
    """One label, with its loss. A row whose cell is empty has no label for this task and does not train it."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)
    """Name of the task in metrics and outputs: letters, digits, underscores."""
    label: str = ""
    """Column of the data that holds the label; defaults to `name`."""
    loss: Literal["binary", "regression", "softmax", "listwise"] = "binary"
    """`binary`: log loss of a label 0 or 1. `regression`: squared error of a number. `softmax`: cross-entropy of a
    class from 0 to `num_classes` − 1. `listwise`: softmax over the rows of a list, whose labels are relevances."""
    weight: float = Field(default=1.0, ge=0)
    """Factor of its loss in the sum that is minimized."""
    num_classes: int = Field(default=0, ge=0, le=MAX_CLASSES)
    """`softmax` only: number of classes."""
    list_size: int = Field(default=0, ge=0, le=MAX_CLASSES)
    """`listwise` only: rows of a list. So many rows of the data, one behind the other, are one list; rows without a
    label fill up a shorter one."""
    k: int = Field(default=10, ge=1, le=MAX_CLASSES)
    """`listwise` only: NDCG and hit rate are of the first `k` rows of a list."""
    above: float | None = None
    """`binary` only: the label is 1 where the column is larger, such as a rating above 3; without it, 0 or 1."""
    label_is: Annotated[str, Field(min_length=1)] | Names = ()
    """`binary` only: the text, or a list of texts, for which the label is 1; it is 0 for any other."""

    @property
    def column(self) -> str:
        return self.label or self.name

    @property
    def num_outputs(self) -> int:
        """How many numbers the network computes for the task."""
        return self.num_classes if self.loss == "softmax" else 1

    omitted = ("num_classes", "list_size", "k", "above", "label_is")


Tasks = Annotated[tuple[Task, ...], Field(strict=False, max_length=MAX_TASKS)]


def label_columns(tasks: tuple[Task, ...]) -> tuple[str, ...]:
    """Return the columns that hold the labels, each once."""
    return tuple(dict.fromkeys(task.column for task in tasks))


def list_size_of(tasks: tuple[Task, ...]) -> int:
    """Return the number of consecutive rows that stay in one batch of one rank."""
    return max((task.list_size for task in tasks), default=0) or 1


def main_task(tasks: tuple[Task, ...]) -> int:
    """Return the position of the first binary task, whose AUC, normalized entropy and calibration are the run's; −1 if
    none is binary."""
    return next((number for number, task in enumerate(tasks) if task.loss == "binary"), -1)


def task_mistakes(spec: RunSpec) -> Mistakes:
    """Find conflicts of `[[model.tasks]]` with the model and the data."""
    model, tasks = spec.model, spec.model.tasks
    if not tasks:
        for section, fields in (("model", HEAD_FIELDS), ("data", ["task_conflict"])):
            yield from getattr(spec, section).unused(section, fields, "without [[model.tasks]]",
                                                     "add tasks, or leave it out")
        return
    if model.is_custom:
        yield from model.unused("model", HEAD_FIELDS, f"on {model.kind}", "leave it out")
    else:
        unused = {"shared_bottom": HEAD_FIELDS[1:4], "mmoe": HEAD_FIELDS[2:4], "ple": ()}[model.task_head]
        yield from model.unused("model", unused, f'while model.task_head is "{model.task_head}"', "leave it out")
    if model.kind in ("two_tower", "tabm"):
        yield conflict("model.tasks", len(tasks), f'"{model.kind}" has one task', "leave it out, or change model.kind")
    if len({(task.column, task.label_is) for task in tasks}) > len(label_columns(tasks)):
        yield conflict("model.tasks", len(tasks), "two of the same column have another label_is", "give both the same")
    names = [task.name for task in tasks]
    for name in sorted({one for one in names if names.count(one) > 1}):
        yield conflict("model.tasks", name, "two tasks have this name", "give each task a unique name")
    for index, task in enumerate(tasks):
        if task.loss == "softmax" and task.num_classes < 2:
            yield conflict(f"model.tasks.{index}.num_classes", task.num_classes,
                           f"task {task.name} is over classes, and needs at least 2", "say how many classes it has")
        for loss, field in (("softmax", "num_classes"), ("binary", "above"), ("binary", "label_is"),
                            ("listwise", "list_size")):
            if task.loss != loss:
                yield from task.unused(f"model.tasks.{index}", [field], f'on "{task.loss}"',
                                       f'leave it out, or set loss = "{loss}"')
    yield from _list_mistakes(spec)
    if not any(task.weight for task in tasks):
        yield conflict("model.tasks", 0, "every task has weight 0, so there is nothing to minimize",
                       "give one a weight above 0")
    yield from _data_mistakes(spec)


def _list_mistakes(spec: RunSpec) -> Mistakes:
    tasks, size = spec.model.tasks, list_size_of(spec.model.tasks)
    for index, task in enumerate(tasks):
        where = f"model.tasks.{index}.list_size"
        if task.loss == "listwise" and task.list_size < 2:
            yield conflict(where, task.list_size, f"task {task.name} is over lists, of at least 2 rows",
                           "say how many rows a list has")
        elif task.loss == "listwise" and task.list_size != size:
            yield conflict(where, task.list_size, "lists of all tasks have one size", f"set it to {size}")
    if size == 1:
        return
    if spec.data.kind != "columns" and not spec.data.is_custom:
        yield conflict("data.kind", spec.data.kind, "does not keep the rows of a list together",
                       'data.kind = "columns" or your own')
    if spec.data.time_column:
        yield conflict("data.time_column", spec.data.time_column, "would hold out some rows of a list",
                       "leave it out: whole lists are held out by their position")
    if spec.stream.is_on:
        yield conflict("stream.source", spec.stream.source, "a stream has no lists of rows", "leave [stream] out")
    if "batch_size" in spec.train.model_fields_set and spec.train.batch_size % size:
        yield conflict("train.batch_size", spec.train.batch_size, f"is not a multiple of list_size = {size}",
                       f"set it to {max(1, spec.train.batch_size // size) * size}")


def _data_mistakes(spec: RunSpec) -> Mistakes:
    data, tasks = spec.data, spec.model.tasks
    columns = label_columns(tasks)
    if data.label not in (*columns, type(data).model_fields["label"].default):
        yield conflict("data.label", data.label, "has no effect: each of [[model.tasks]] names its own label",
                       "leave it out")
    for field, of_task in (("label_above", "above"), ("label_is", "label_is")):
        if not data.prepare.has_default(field):
            yield conflict(f"data.prepare.{field}", getattr(data.prepare, field),
                           "has no effect: a task has its own", f"set {of_task} of the task")
    if data.kind == "synthetic" and (len(columns) < len(tasks) or any(task.above is not None for task in tasks)):
        yield conflict("model.tasks", ", ".join(task.name for task in tasks), "synthetic data draws the label of each",
                       "give each a label of its own, and none `above`")
    features = {*data.dense_columns, *data.prepare.sparse_columns, *data.prepare.list_columns,
                *(name for table in spec.model.tables for name in (table.name, table.weights_column))}
    for index, task in enumerate(tasks):
        if data.kind in ("columns", "prepared") and task.column in features:
            yield conflict(f"model.tasks.{index}.label", task.column,
                           "is also a feature, which would show the model the answer", "name it once")


HEAD_FIELDS = ("task_head", "num_experts", "num_task_experts", "num_extraction_layers", "tower_mlp")
