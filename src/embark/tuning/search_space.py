"""Which fields of a spec are searched, and over which values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
class Dimension:
    """The values that a field may take: one of `values` or, in a range, any number from the first to the last of
    them."""

    values: tuple[Any, ...]
    is_range: bool = False
    is_int: bool = False

    @property
    def is_log(self) -> bool:
        return self.is_range and bool(0 < self.values[0] * LOG_RATIO <= self.values[1])

    def contains(self, value: Any) -> bool:
        if not self.is_range:
            return value in self.values
        return isinstance(value, int | float) and bool(self.values[0] <= value <= self.values[1])

    def suggest(self, trial: optuna.Trial, field: str) -> Any:
        if not self.is_range:
            return trial.suggest_categorical(field, self.values)
        low, high = self.values
        if self.is_int:
            return trial.suggest_int(field, low, high, log=self.is_log)
        return trial.suggest_float(field, low, high, log=self.is_log)

    def __str__(self) -> str:
        words = [f"{value:g}" if self.is_range or isinstance(value, float) else str(value) for value in self.values]
        return (".." if self.is_range else ",").join(words)


SearchSpace = Mapping[str, Dimension]
"""Dotted fields, and what each may be."""


def with_values(spec: RunSpec, values: Mapping[str, Any]) -> RunSpec:
    """Give some fields other values; raises `SpecError` if the spec does not allow them."""
    raw = spec.model_dump(exclude_unset=True)
    for field, value in values.items():
        put(raw, field, value)
    return resolve(raw)


def own_values(spec: RunSpec, space: SearchSpace) -> dict[str, Any]:
    """Return the spec's own values of the fields whose dimension contains them."""
    values = flatten(spec.model_dump())
    if values["train.dense_learning_rate"] is None:
        values["train.dense_learning_rate"] = spec.train.learning_rate
    return {field: values[field] for field, dimension in space.items() if dimension.contains(values[field])}


def parse_search(spec: RunSpec, arguments: Sequence[str]) -> SearchSpace:
    """Parse `train.learning_rate=0.001..0.1` and `train.batch_size=256,512`; raises one error with all mistakes."""
    space: dict[str, Dimension] = {}
    mistakes: list[Mistake] = []
    for argument in arguments:
        field, _, text = argument.partition("=")
        try:
            space[field] = _parse(spec, field, text)
        except SpecError as error:
            mistakes += [replace(mistake, where=f"--search {argument}") for mistake in error.mistakes]
        except UserError as error:
            mistakes.append(Mistake(f"--search {argument}", field, text, error.what, error.fix))
    if mistakes:
        raise MistakesError(mistakes, "the search space")
    return space


def _parse(spec: RunSpec, field: str, text: str) -> Dimension:
    section, _, name = field.partition(".")
    if section not in SECTIONS or not text or not name:
        raise UserError("is not a field of [train] or [model] with values",
                        fix="--search train.learning_rate=0.001..0.1, or --search train.batch_size=256,512")
    is_range = ".." in text
    words = text.split(".." if is_range else ",")
    values = tuple(parse_settings([f"{field}={word.strip()}"])[0][field] for word in words)
    for value in values:
        with_values(spec, {field: value})
    if not is_range:
        if len(set(values)) < 2:
            raise UserError("is one value: there is nothing to search", fix=f"--set {field}={text} fixes it")
        return Dimension(values)
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if not are_numbers or len(values) != 2 or not values[0] < values[1]:
        raise UserError("is not a range of numbers from low to high", fix=f"--search {field}=LOW..HIGH")
    return Dimension(values, True, isinstance(getattr(getattr(spec, section), name, None), int))


def default_space(spec: RunSpec, *, has_regularization: bool) -> SearchSpace:
    """Return rates and optimizers of tables and dense layers, the batch, and how strongly the model is regularized, as
    far as the spec allows them. The space contains the spec's own values."""
    train, rate = spec.train, spec.train.learning_rate
    dense_rate = rate if train.dense_learning_rate is None else train.dense_learning_rate
    ranges = {
        "train.learning_rate": Dimension((min(1e-3, rate or 1e-3), max(0.3, rate)), True),
        "train.dense_learning_rate": Dimension((min(3e-4, dense_rate or 3e-4), max(0.1, dense_rate)), True),
    }
    choices: dict[str, tuple[Any, ...]] = {
        "train.optimizer": (train.optimizer, "rowwise_adagrad", "adagrad"),
        "train.dense_optimizer": (train.dense_optimizer, "adagrad", "adam"),
    }
    if not train.num_steps and not train.eval_every:  # else another batch size is another number of samples
        choices["train.batch_size"] = (train.batch_size, train.batch_size // 4, train.batch_size // 16)
    if has_regularization:
        choices |= {"model.dropout": (spec.model.dropout, 0.0, 0.1, 0.3),
                    "train.weight_decay": (train.weight_decay, 0.0, 1e-4, 1e-2),
                    "train.embedding_l2": (train.embedding_l2, 0.0, 1e-6, 1e-5)}
    allowed = {field: tuple(value for value in dict.fromkeys(values) if _is_allowed(spec, field, value))
               for field, values in choices.items()}
    return ranges | {field: Dimension(values) for field, values in allowed.items() if len(values) > 1}


def _is_allowed(spec: RunSpec, field: str, value: Any) -> bool:
    if field == "train.batch_size" and value < MIN_BATCH:
        return False
    try:
        with_values(spec, {field: value})
    except SpecError:
        return False
    return True
