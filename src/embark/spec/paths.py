"""Relative paths of the data: in a spec's file they go by its folder, in `--set` by the current directory.

`store.root` goes by the current directory in both: there `embark watch`, `report` and the others look for runs.
"""

import os
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from embark.values import JsonDict
from .run import RunSpec

FIELDS = ("data.path", "stream.path", "publish.data", "data.prepare.input", "data.prepare.id_map_from")


def join_paths(raw: JsonDict, folder: Path) -> None:
    """Make the paths that a file in `folder` names relative to the current directory."""
    if folder == Path():
        return
    for field in FIELDS:
        *parents, last = field.split(".")
        section: Any = raw
        for name in parents:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and last in section:
            section[last] = _changed(section[last], lambda path: os.path.normpath(folder / path))


def paths_from(spec: RunSpec, folder: Path) -> JsonDict:
    """Return the dotted fields of `spec` that name relative paths, with what a file in `folder` has to say for them."""
    return _relative_paths(spec, lambda path: os.path.relpath(path, folder))


def with_absolute_paths(spec: RunSpec) -> RunSpec:
    """Make relative paths absolute, for a spec that is read elsewhere on this machine or from another directory."""
    for field, value in _relative_paths(spec, os.path.abspath).items():
        spec = _replaced(spec, field.split("."), value)
    return spec


def without_local_input(spec: RunSpec) -> RunSpec:
    """Drop the relative paths that `[data.prepare]` reads."""
    local = {field.rpartition(".")[2] for field in _relative_paths(spec, str) if field.startswith("data.prepare.")}
    if not local:
        return spec
    prepare = spec.data.prepare
    prepare = type(prepare).model_validate(prepare.model_dump(exclude_unset=True, exclude=local))
    return spec.changed(data=spec.data.changed(prepare=prepare))


def _relative_paths(spec: RunSpec, change: Callable[[str], str]) -> JsonDict:
    values = {field: reduce(getattr, field.split("."), spec) for field in FIELDS}
    return {field: _changed(value, change) for field, value in values.items() if _is_relative(value)}


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_changed(path, change) for path in value)
    return change(value) if _is_relative(value) else value


def _is_relative(value: Any) -> bool:
    """Tell whether a field names a relative path, or a list of paths has one."""
    if isinstance(value, list | tuple):
        return any(map(_is_relative, value))
    return isinstance(value, str) and bool(value) and "://" not in value and not value.startswith(("/", "~"))


def _replaced(section: Any, names: Sequence[str], value: Any) -> Any:
    """Replace a field of a section, or of a section in it."""
    name, *inner = names
    return section.model_copy(update={name: _replaced(getattr(section, name), inner, value) if inner else value})
