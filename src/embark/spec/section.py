"""Base class of every section of a spec: frozen, strict, no unknown keys."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

NUM_REMEMBERED = 8
S = TypeVar("S", bound="Section")
R = TypeVar("R")


class Section(BaseModel):
    """A section. The docstring under a field is its help text everywhere."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False,
    )


def remembered(function: Callable[[S], R]) -> Callable[[S], R]:
    """A function of a section whose last results are kept, by identity: to hash a section takes as long as to compute
    most of them, and a copy of it has its own. What it returns is not to be changed."""
    known: list[tuple[S, R]] = []

    @wraps(function)
    def find(section: S) -> R:
        for one, result in known:
            if one is section:
                return result
        result = function(section)
        known[:] = [(section, result), *known[:NUM_REMEMBERED - 1]]
        return result

    return find
