"""Immutable dataclasses, objects as JSON and TOML have them, and the tables that lie beside a module."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform

JsonDict = dict[str, Any]
JsonMap = Mapping[str, Any]
T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Make a class an immutable dataclass with slots."""
    return dataclass(frozen=True, slots=True)(cls)


def read_table(module: str, name: str) -> JsonDict:
    """Read a TOML file that lies beside a module: `read_table(__file__, "rules.toml")`."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))
