"""Which folder a spec is rendered into, and the spec that the folder keeps: its own, or a copy of one elsewhere."""

import os
import shlex
from collections.abc import Container, Sequence
from pathlib import Path

from embark.errors import UserError
from embark.kubernetes.names import dns_label
from embark.spec import RunSpec, flatten, load_spec, set_in_text, to_toml
from embark.spec.load import parse_settings
from embark.spec.paths import paths_from
from embark.spec.toml import inline
from .folder import SPEC, File, FolderSpec, Record, checksum, read_record
from .yaml_text import comment

MAX_SHOWN = 5  # Fields of which a message says how two specs differ.
MAX_LENGTH = 80
ABOUT = ("The run. All rendered files of this folder follow from it: edit it and run `embark render run.toml`, or let "
         "`embark render run.toml --set place.nodes=4` do both.")


def folder_spec(source: str, sets: Sequence[str], out: Path | None) -> FolderSpec:
    """Return the spec that a folder keeps. Settings of a spec that lies in the folder are written into it.

    Refuses to replace the spec of a folder by another one.
    """
    spec, path = load_spec(source, sets), Path(source)
    home = path.parent if path.is_file() else None
    if out is not None:
        folder = out
    else:
        folder = home if home and read_record(home).spec == path.name else Path("deploy") / dns_label(spec.name)
    record = read_record(folder)
    there = folder / (record.spec or SPEC)
    if home is not None and home.resolve() == folder.resolve():
        if record.spec not in ("", path.name) and there.is_file():
            _refuse_another(there, source, spec)
        own = [*sets, *_paths(spec, folder, only=parse_settings(sets)[0])]
        text, settings = set_in_text(path.read_text(encoding="utf-8"), own, where=source)
        return FolderSpec(folder, spec, File(path.name, text), origin=(), settings=settings)
    text = _copied_text(path, spec, [*sets, *_paths(spec, folder)]) if home else \
        set_in_text(spec_text(spec), _paths(spec, folder), where=source)[0]
    origin = (os.path.relpath(path, folder) if home else source, *sets)
    if there.is_file() and not _is_copy(there, record, origin):
        _refuse_another(there, source, spec)
        text = there.read_text(encoding="utf-8")
    return FolderSpec(folder, spec, File(there.name, text), origin, settings=())


def spec_text(spec: RunSpec) -> str:
    """`run.toml` with only what differs from the defaults: what a person would write."""
    return "\n".join([*comment(ABOUT), "", to_toml(spec, only_set=True)])


def _copied_text(path: Path, spec: RunSpec, sets: Sequence[str]) -> str:
    """Return the text of a spec elsewhere, with its name, which is the file's if the spec has none."""
    text = path.read_text(encoding="utf-8")
    return set_in_text(text, [*sets, f'name="{spec.name}"'], where=str(path))[0]


def _paths(spec: RunSpec, folder: Path, only: Container[str] | None = None) -> list[str]:
    """Return settings for a spec in `folder`, from which relative paths go."""
    return [f"{field}={inline(list(value) if isinstance(value, tuple) else value)}"
            for field, value in paths_from(spec, folder).items() if only is None or field in only]


def _is_copy(there: Path, record: Record, origin: tuple[str, ...]) -> bool:
    """Return whether it is unedited since it was made from the same spec with the same settings."""
    return record.origin == origin and record.checksums.get(there.name) == checksum(there.read_bytes())


def _refuse_another(there: Path, source: str, spec: RunSpec) -> None:
    old, new = (flatten(one.model_dump(mode="json")) for one in (load_spec(str(there)), spec))
    fields = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if not fields:
        return
    shown = [f"  {key}: {_shown(old.get(key))} there, {_shown(new.get(key))} by {source}" for key in fields[:MAX_SHOWN]]
    more = [f"  and {len(fields) - MAX_SHOWN} more"] if len(fields) > MAX_SHOWN else []
    what = f"{there}: this folder is rendered from it, and it says something else:"
    raise UserError("\n".join([what, *shown, *more]),
                    f"embark render {shlex.quote(str(there))} --set … changes it; --out takes another folder; "
                        f"or delete {there}")


def _shown(value: object) -> str:
    text = "nothing" if value is None else inline(value)
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 1]}…"
