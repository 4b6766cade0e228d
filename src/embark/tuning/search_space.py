"""Which fields of a spec are searched, and over which values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from embark.errors import Mistake, MistakesError, SpecError, UserError
from embark.spec import RunSpec, resolve
from embark.spec.load import parse_settings, put
from embark.spec.toml import flatten

if TYPE_CHECKING:
    import optuna

SECTIONS = ("model", "train")
LOG_RATIO = 10  # A range this wide is searched on a logarithmic scale.
MIN_BATCH = 16


@dataclass(frozen=True, slots=True)
class Range:
    """All numbers from `low` to `high`."""

    low: float
    high: float
    is_int: bool = False

    @property
    def is_log(self) -> bool:
        return 0 < self.low * LOG_RATIO <= self.high

    @property
    def ends(self) -> tuple[Any, ...]:
        return (self.low, self.high)

    def contains(self, value: Any) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def suggest(self, trial: optuna.Trial, field: str) -> Any:
        if self.is_int:
            return trial.suggest_int(field, int(self.low), int(self.high), log=self.is_log)
        return trial.suggest_float(field, self.low, self.high, log=self.is_log)

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}"


@dataclass(frozen=True, slots=True)
class Choices:
    """One of these values."""

    values: tuple[Any, ...]

    @property
    def ends(self) -> tuple[Any, ...]:
        return self.values

    def contains(self, value: Any) -> bool:
        return value in self.values

    def suggest(self, trial: optuna.Trial, field: str) -> Any:
        return trial.suggest_categorical(field, self.values)

    def __str__(self) -> str:
        return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in self.values)


SearchSpace = Mapping[str, Range | Choices]
"""Dotted fields, and what each may be."""


def with_values(spec: RunSpec, values: Mapping[str, Any]) -> RunSpec:
    """The spec with other values of some fields; raises `SpecError` where it does not allow them."""
    raw = spec.model_dump(exclude_unset=True)
    for field, value in values.items():
        put(raw, field, value)
    return resolve(raw)


def own_values(spec: RunSpec, space: SearchSpace) -> dict[str, Any]:
    """What the spec itself has, of the fields whose space contains it."""
    values = flatten(spec.model_dump())
    if values["train.dense_learning_rate"] is None:
        values["train.dense_learning_rate"] = spec.train.learning_rate
    return {field: values[field] for field, dimension in space.items() if dimension.contains(values[field])}


def parse_search(spec: RunSpec, arguments: Sequence[str]) -> SearchSpace:
    """`train.learning_rate=0.001..0.1` or `train.batch_size=256,512,1024`; raises one error with all mistakes."""
    space: dict[str, Range | Choices] = {}
    mistakes: list[Mistake] = []
    for argument in arguments:
        field, _, text = argument.partition("=")
        try:
            space[field] = _parse(spec, field, text)
        except SpecError as error:
            mistakes += [Mistake(f"--search {argument}", one.field, one.value, one.what, one.fix)
                         for one in error.mistakes]
        except UserError as error:
            mistakes.append(Mistake(f"--search {argument}", field, text, error.what, error.fix))
    if mistakes:
        raise MistakesError(mistakes, "the search space")
    return space


def _parse(spec: RunSpec, field: str, text: str) -> Range | Choices:
    section, _, name = field.partition(".")
    if section not in SECTIONS or not text or not name:
        raise UserError("is not a field of [train] or [model] with values",
                        fix="--search train.learning_rate=0.001..0.1, or --search train.batch_size=256,512")
    low, dots, high = text.partition("..")
    words = (low, high) if dots else text.split(",")
    parsed = [parse_settings([f"{field}={word.strip()}"])[0][field] for word in words]
    for value in parsed:
        with_values(spec, {field: value})
    if not dots:
        if len(set(parsed)) < 2:
            raise UserError("is one value: there is nothing to search", fix=f"--set {field}={text} fixes it")
        return Choices(tuple(parsed))
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in parsed) \
            or not parsed[0] < parsed[1]:
        raise UserError("is not a range of numbers from low to high", fix=f"--search {field}=LOW..HIGH")
    is_int = isinstance(getattr(getattr(spec, section), name, None), int)
    return Range(parsed[0], parsed[1], is_int)


def default_space(spec: RunSpec, *, has_regularization: bool) -> SearchSpace:
    """Rates and optimizers of tables and dense layers, the batch, and how strongly the model is regularized: what of it
    the spec allows. It contains the spec's own values."""
    return dict(_allowed(spec, _candidates(spec, has_regularization=has_regularization)))


def _candidates(spec: RunSpec, *, has_regularization: bool) -> SearchSpace:
    train = spec.train
    rate, dense_rate = train.learning_rate, train.dense_learning_rate
    dense_rate = rate if dense_rate is None else dense_rate
    space: dict[str, Range | Choices] = {
        "train.learning_rate": Range(min(1e-3, rate or 1e-3), max(0.3, rate)),
        "train.dense_learning_rate": Range(min(3e-4, dense_rate or 3e-4), max(0.1, dense_rate)),
        "train.optimizer": _with(train.optimizer, "rowwise_adagrad", "adagrad"),
        "train.dense_optimizer": _with(train.dense_optimizer, "adagrad", "adam"),
    }
    if not train.num_steps and not train.eval_every:  # else another batch size is another number of samples
        space["train.batch_size"] = _with(train.batch_size, train.batch_size // 4, train.batch_size // 16)
    if has_regularization:
        space |= {"model.dropout": _with(spec.model.dropout, 0.0, 0.1, 0.3),
                  "train.weight_decay": _with(train.weight_decay, 0.0, 1e-4, 1e-2),
                  "train.embedding_l2": _with(train.embedding_l2, 0.0, 1e-6, 1e-5)}
    return space


def _with(own: Any, *others: Any) -> Choices:
    return Choices(tuple(dict.fromkeys((own, *others))))


def _allowed(spec: RunSpec, space: SearchSpace) -> Iterator[tuple[str, Range | Choices]]:
    for field, dimension in space.items():
        allowed = [value for value in dimension.ends if _is_allowed(spec, field, value)]
        if isinstance(dimension, Range):
            yield field, dimension
        elif len(allowed) > 1:
            yield field, Choices(tuple(allowed))


def _is_allowed(spec: RunSpec, field: str, value: Any) -> bool:
    if field == "train.batch_size" and value < MIN_BATCH:
        return False
    try:
        with_values(spec, {field: value})
    except SpecError:
        return False
    return True
