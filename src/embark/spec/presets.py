"""Preset specs, from presets.toml."""

import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from embark.spec.run import RunSpec

_TABLES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
ABOUT: dict[str, str] = {name: table.pop("about") for name, table in _TABLES.items()}
"""A sentence on each preset."""


def _preset(name: str) -> RunSpec:
    return RunSpec.model_validate({"name": name, **_TABLES[name]})


PRESETS: dict[str, Callable[[], RunSpec]] = {name: partial(_preset, name) for name in _TABLES}
