"""Relative paths of the data: in a spec's file they go by its folder, in `--set` by the current directory.

`store.root` goes by the current directory in both: there `embark watch`, `report` and the others look for runs.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from embark.spec.run import RunSpec

FIELDS = ("data.path", "stream.path", "publish.data", "data.prepare.input", "data.prepare.id_map_from")
_PREPARE_FIELDS = ("input", "id_map_from")


def join_paths(raw: dict[str, Any], folder: Path) -> None:
    """Make the paths that a file in `folder` names ones of the current directory."""
    if folder != Path():
        _map_paths(raw, lambda path: os.path.normpath(folder / path))


def paths_from(spec: RunSpec, folder: Path) -> dict[str, Any]:
    """The dotted fields of `spec` that name relative paths, with what a file in `folder` has to say for them."""
    return _paths_in(spec, lambda path: os.path.relpath(path, folder))


def with_absolute_paths(spec: RunSpec) -> RunSpec:
    """Make relative paths absolute, for a spec that is read elsewhere on this machine or from another directory."""
    found = _paths_in(spec, os.path.abspath)
    data = spec.data
    if changes := {name: found[f"data.prepare.{name}"] for name in _PREPARE_FIELDS if f"data.prepare.{name}" in found}:
        data = data.model_copy(update={"prepare": data.prepare.model_copy(update=changes)})
    if "data.path" in found:
        data = data.model_copy(update={"path": found["data.path"]})
    for section, name in (("stream", "path"), ("publish", "data")):
        if path := found.get(f"{section}.{name}"):
            spec = spec.model_copy(update={section: getattr(spec, section).model_copy(update={name: path})})
    return spec if data is spec.data else spec.model_copy(update={"data": data})


def without_local_input(spec: RunSpec) -> RunSpec:
    """Drop the relative paths that `[data.prepare]` reads."""
    found, prepare = _paths_in(spec, str), spec.data.prepare
    local = {name for name in _PREPARE_FIELDS if f"data.prepare.{name}" in found}
    if not local:
        return spec
    prepare = type(prepare).model_validate(prepare.model_dump(exclude_unset=True, exclude={*local, "new_ids"}))
    return spec.model_copy(update={"data": spec.data.model_copy(update={"prepare": prepare})})


def _paths_in(spec: RunSpec, change: Callable[[str], str]) -> dict[str, Any]:
    prepare = {name: getattr(spec.data.prepare, name) for name in _PREPARE_FIELDS}
    return _map_paths({"data": {"path": spec.data.path, "prepare": prepare}, "stream": {"path": spec.stream.path},
                       "publish": {"data": spec.publish.data}}, change)


def _map_paths(raw: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Change the relative paths of nested dicts in place; returns the dotted fields that have any."""
    changed: dict[str, Any] = {}
    for field in FIELDS:
        *parents, last = field.split(".")
        section: Any = raw
        for name in parents:
            section = section.get(name) if isinstance(section, Mapping) else None
        value = section.get(last) if isinstance(section, dict) else None
        if isinstance(value, str) and _is_relative(value):
            section[last] = changed[field] = change(value)
        elif isinstance(value, list | tuple) and any(isinstance(one, str) and _is_relative(one) for one in value):
            section[last] = changed[field] = type(value)(
                change(one) if isinstance(one, str) and _is_relative(one) else one for one in value)
    return changed


def _is_relative(path: str) -> bool:
    return bool(path) and "://" not in path and not path.startswith(("/", "~"))
