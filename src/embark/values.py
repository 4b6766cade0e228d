"""What packages pass to each other: immutable dataclasses, and objects as JSON and TOML have them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

JsonDict = dict[str, Any]
JsonMap = Mapping[str, Any]
T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Make a class an immutable dataclass with slots."""
    return dataclass(frozen=True, slots=True)(cls)
