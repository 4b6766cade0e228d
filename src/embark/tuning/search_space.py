"""Which fields of a spec are searched, and over which values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from embark.errors import SpecError, UserError
from embark.spec import POOLED_KINDS, RunSpec, flatten, resolve
from embark.spec.load import parse_settings, put
from embark.spec.model import OWN_FIELDS
from embark.values import JsonDict, JsonMap, frozen, read_table

if TYPE_CHECKING:
    import optuna

SECTIONS = ("model", "train", "features")
DEFAULTS = read_table(__file__, "default_space.toml")
LOG_RATIO = 10  # A range this wide is searched on a logarithmic scale.
MIN_BATCH = 16


@frozen
class Dimension:
    """The values that a field may take: one of `values` or, in a range, any number from the first to the last of
    them."""

    values: tuple[Any, ...]
    is_range: bool = False
    is_int: bool = False

    @property
    def is_log(self) -> bool:
        return bool(0 < self.values[0] * LOG_RATIO <= self.values[1])

    def contains(self, value: Any) -> bool:
        if not self.is_range:
            return value in self.values
        return isinstance(value, int | float) and bool(self.values[0] <= value <= self.values[1])

    def suggest(self, trial: optuna.Trial, field: str) -> Any:
        if not self.is_range:
            return trial.suggest_categorical(field, self.values)
        suggest = trial.suggest_int if self.is_int else trial.suggest_float
        return suggest(field, *self.values, log=self.is_log)

    def __str__(self) -> str:
        return (".." if self.is_range else ",").join(
            f"{value:g}" if isinstance(value, float) else str(value) for value in self.values)


SearchSpace = Mapping[str, Dimension]
"""Dotted fields, and what each may be."""


def with_values(spec: RunSpec, values: JsonMap) -> RunSpec:
    """Give some fields other values, lists as text of TOML; raises `SpecError` if the spec does not allow them."""
    raw = spec.model_dump(exclude_unset=True)
    if kind := values.get("model.kind"):  # which has no fields of the spec's own kind
        raw["model"] = {name: value for name, value in raw.get("model", {}).items()
                        if name not in OWN_FIELDS or kind in OWN_FIELDS[name]}
    for field, value in values.items():
        is_list = isinstance(value, str) and value.startswith("[")
        put(raw, field, json.loads(value) if is_list else value)
    return resolve(raw)


def own_values(spec: RunSpec, fields: Iterable[str]) -> JsonDict:
    """Return the spec's own values of these fields, lists as text."""
    values = flatten(spec.model_dump()) | {f"{section}.{name}": value for section in SECTIONS
                                           for name, value in getattr(spec, section)}
    values["train.dense_learning_rate"] = values["train.dense_learning_rate"] or spec.train.learning_rate
    return {field: json.dumps(values[field]) if isinstance(values[field], tuple | list) else values[field]
            for field in fields}


def parse_search(spec: RunSpec, arguments: Sequence[str]) -> SearchSpace:
    """Parse `train.learning_rate=0.001..0.1` and `train.batch_size=256,512`."""
    return dict(_parse(spec, argument) for argument in arguments)


def _parse(spec: RunSpec, argument: str) -> tuple[str, Dimension]:
    field, _, text = argument.partition("=")
    section, _, name = field.partition(".")
    if section not in SECTIONS or not text or not name:
        raise UserError(f"--search {argument}: is not a field of [train], [model] or [features] with values",
                        "--search train.learning_rate=0.001..0.1, or --search train.batch_size=256,512")
    is_range = ".." in text
    words = text.split("..") if is_range else re.split(r",(?![^\[]*\])", text)  # not at commas within a list
    read = (parse_settings([f"{field}={word.strip()}"])[0][field] for word in words)
    values = tuple(json.dumps(value) if isinstance(value, list) else value for value in read)
    for value in values:
        with_values(spec, {field: value})
    if not is_range:
        if len(set(values)) < 2:
            raise UserError(f"--search {argument}: is one value: there is nothing to search",
                            f"--set {field}={text} fixes it")
        return field, Dimension(values)
    if {*map(type, values)} - {int, float} or len(values) != 2 or not values[0] < values[1]:
        raise UserError(f"--search {argument}: is not a range of numbers from low to high",
                        f"--search {field}=LOW..HIGH")
    return field, Dimension(values, True, isinstance(getattr(getattr(spec, section), name, None), int))


def default_space(
    spec: RunSpec, *, has_regularization: bool, has_own_pace: bool = False, has_features: bool = False
) -> SearchSpace:
    """Return rates and optimizers of tables and dense layers, the batch, how strongly the model is regularized, its
    kind, width and layers, the epochs and the features, as far as the spec allows them. The space contains the spec's
    own values. `has_own_pace`: each trial's batch decides when it is evaluated, and early stopping how long it is
    trained. `has_features`: features can be other ones."""
    is_of = {"pooled": spec.model.kind in POOLED_KINDS, "": True,
             "bottom": spec.model.kind in ("dlrm", "dcnv2") and spec.model.num_dense > 0}
    space: dict[str, Dimension] = {}
    for field, own in own_values(spec, DEFAULTS).items():
        about = DEFAULTS[field]
        if "range" in about:
            low, high = about["range"]
            space[field] = Dimension((min(low, own or low), max(high, own)), True)
            continue
        choices = about.get("choices") or [own // part for part in about["parts"] if own // part >= MIN_BATCH]
        if not is_of[about.get("is_of", "")] or (field.startswith("features.") and not has_features):
            continue
        if field == "model.kind" and not has_regularization:  # JAX has no others
            choices = choices[:2]
        allowed = tuple(value for value in dict.fromkeys([own, *choices]) if _is_allowed(spec, field, value))
        if len(allowed) > 1 and (has_regularization or not about.get("is_regularization")):
            space[field] = Dimension(allowed)
    # Another batch size would be another number of samples.
    if not has_own_pace and (spec.train.num_steps or spec.train.eval_every):
        space.pop("train.batch_size", None)
    if has_own_pace or spec.train.num_steps or spec.data.kind == "synthetic":
        space.pop("train.num_epochs", None)
    return space


def _is_allowed(spec: RunSpec, field: str, value: Any) -> bool:
    try:
        with_values(spec, {field: value})
    except SpecError:
        return False
    return True
