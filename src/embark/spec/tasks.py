"""`[[model.tasks]]`: several labels that one model predicts, and the constraints on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from embark.errors import Mistake
from embark.spec.section import Section

if TYPE_CHECKING:
    from embark.spec.run import RunSpec

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

    @property
    def column(self) -> str:
        """The data's column of the label."""
        return self.label or self.name

    @property
    def num_outputs(self) -> int:
        """How many numbers the network gives for it."""
        return self.num_classes if self.loss == "softmax" else 1

    @model_serializer(mode="wrap")
    def _without_unused(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = dump(self)
        unused = {"num_classes": 0, "list_size": 0, "k": 10, "above": None}
        return {key: value for key, value in values.items() if key not in unused or value != unused[key]}


Tasks = Annotated[tuple[Task, ...], Field(strict=False, max_length=MAX_TASKS)]


def label_columns(tasks: tuple[Task, ...]) -> tuple[str, ...]:
    """The data's columns that hold their labels, each once."""
    return tuple(dict.fromkeys(task.column for task in tasks))


def list_size_of(tasks: tuple[Task, ...]) -> int:
    """Rows of the data that belong together and stay in one batch of one rank."""
    return max((task.list_size for task in tasks), default=0) or 1


def main_task(tasks: tuple[Task, ...]) -> int:
    """Position of the first binary task, whose AUC, normalized entropy and calibration are the run's; −1: none is."""
    return next((number for number, task in enumerate(tasks) if task.loss == "binary"), -1)


def task_mistakes(spec: RunSpec) -> Iterator[Mistake]:
    """Conflicts between fields that are each valid alone."""
    model, data, tasks = spec.model, spec.data, spec.model.tasks
    head = {name: type(model).model_fields[name].default for name in HEAD_FIELDS}
    if not tasks:
        for name, default in head.items():
            if getattr(model, name) != default:
                yield _mistake(f"model.{name}", getattr(model, name), "has no effect without [[model.tasks]]",
                               "add tasks, or leave it out")
        if data.task_conflict:
            yield _mistake("data.task_conflict", data.task_conflict, "has no effect without [[model.tasks]]",
                           "add tasks, or leave it out")
        return
    if model.is_own:
        for name, default in head.items():
            if getattr(model, name) != default:
                yield _mistake(f"model.{name}", getattr(model, name), f"has no effect on {model.kind}", "leave it out")
    else:
        unused = {"shared_bottom": HEAD_FIELDS[1:4], "mmoe": HEAD_FIELDS[2:4], "ple": ()}[model.task_head]
        for name in unused:
            if getattr(model, name) != head[name]:
                yield _mistake(f"model.{name}", getattr(model, name),
                               f'has no effect while model.task_head is "{model.task_head}"', "leave it out")
    if model.kind == "two_tower":
        yield _mistake("model.tasks", len(tasks), "two towers have one task", "leave it out, or change model.kind")
    names = [task.name for task in tasks]
    for name in sorted({one for one in names if names.count(one) > 1}):
        yield _mistake("model.tasks", name, "two tasks have this name", "give each task a unique name")
    for index, task in enumerate(tasks):
        if task.loss == "softmax" and task.num_classes < 2:
            yield _mistake(f"model.tasks.{index}.num_classes", task.num_classes,
                           f"task {task.name} is over classes, and needs at least 2", "say how many classes it has")
        elif task.loss != "softmax" and task.num_classes:
            yield _mistake(f"model.tasks.{index}.num_classes", task.num_classes, f'has no effect on "{task.loss}"',
                           'leave it out, or set loss = "softmax"')
        if task.above is not None and task.loss != "binary":
            yield _mistake(f"model.tasks.{index}.above", task.above, f'has no effect on "{task.loss}"',
                           'leave it out, or set loss = "binary"')
    yield from _list_mistakes(spec)
    if not any(task.weight for task in tasks):
        yield _mistake("model.tasks", 0, "every task has weight 0, so there is nothing to minimize",
                       "give one a weight above 0")
    yield from _data_mistakes(spec)


def _list_mistakes(spec: RunSpec) -> Iterator[Mistake]:
    tasks, size = spec.model.tasks, list_size_of(spec.model.tasks)
    for index, task in enumerate(tasks):
        where = f"model.tasks.{index}.list_size"
        if task.loss == "listwise" and task.list_size < 2:
            yield _mistake(where, task.list_size, f"task {task.name} is over lists, of at least 2 rows",
                           "say how many rows a list has")
        elif task.loss == "listwise" and task.list_size != size:
            yield _mistake(where, task.list_size, "lists of all tasks have one size", f"set it to {size}")
        elif task.loss != "listwise" and task.list_size:
            yield _mistake(where, task.list_size, f'has no effect on "{task.loss}"',
                           'leave it out, or set loss = "listwise"')
    if size == 1:
        return
    if spec.data.kind != "columns" and not spec.data.is_own:
        yield _mistake("data.kind", spec.data.kind, "does not keep the rows of a list together",
                       'data.kind = "columns" or your own')
    if spec.data.time_column:
        yield _mistake("data.time_column", spec.data.time_column, "would hold out some rows of a list",
                       "leave it out: whole lists are held out by their position")
    if spec.stream.is_on:
        yield _mistake("stream.source", spec.stream.source, "a stream has no lists of rows", "leave [stream] out")
    if "batch_size" in spec.train.model_fields_set and spec.train.batch_size % size:
        yield _mistake("train.batch_size", spec.train.batch_size, f"is not a multiple of list_size = {size}",
                       f"set it to {max(1, spec.train.batch_size // size) * size}")


def _data_mistakes(spec: RunSpec) -> Iterator[Mistake]:
    data, tasks = spec.data, spec.model.tasks
    columns = label_columns(tasks)
    if data.label not in (*columns, type(data).model_fields["label"].default):
        yield _mistake("data.label", data.label, "has no effect: each of [[model.tasks]] names its own label",
                       "leave it out")
    if data.prepare.label_above is not None:
        yield _mistake("data.prepare.label_above", data.prepare.label_above,
                       "has no effect: a task has its own threshold", "set above of the task")
    if data.kind == "synthetic" and (len(columns) < len(tasks) or any(task.above is not None for task in tasks)):
        yield _mistake("model.tasks", ", ".join(task.name for task in tasks), "synthetic data draws the label of each",
                       "give each a label of its own, and none `above`")
    features = {*data.dense_columns, *data.prepare.sparse_columns, *data.prepare.list_columns,
                *(name for table in spec.model.tables for name in (table.name, table.weights_column))}
    for index, task in enumerate(tasks):
        if data.kind in ("columns", "prepared") and task.column in features:
            yield _mistake(f"model.tasks.{index}.label", task.column,
                           "is also a feature, which would show the model the answer", "name it once")


HEAD_FIELDS = ("task_head", "num_experts", "num_task_experts", "num_extraction_layers", "tower_mlp")


def _mistake(field: str, value: object, what: str, fix: str) -> Mistake:
    return Mistake(where="", field=field, value=str(value), what=what, fix=fix)
