"""`@frozen`: an immutable dataclass with slots, which is what Embark computes and passes on."""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    return dataclass(frozen=True, slots=True)(cls)
