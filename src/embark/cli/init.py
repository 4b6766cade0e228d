"""`embark init`: write a starter spec."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from embark.cli.console import Console
from embark.cli.options import Flag
from embark.errors import UserError, nearest


@dataclass(frozen=True, slots=True)
class WrittenSpec:
    """The file that was written, and what it started from."""

    path: Path
    preset: str
    new_folder: Path | None  # The one that had to be created for it.


def init(
    preset: str = "quickstart", /, *, out: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
    force: Flag = False, console: Console = Console(),
) -> None:
    """Write a starter spec: laptop, quickstart, criteo-1tb or mlperf-dcnv2.

    Parameters
    ----------
    preset
        The preset to start from.
    out
        The file to write, PRESET.toml by default; - for standard output.
    force
        Overwrite the file if it exists.
    """
    from embark.spec import PRESETS
    from embark.spec.toml import starter
    from embark.store import write_atomic

    if preset not in PRESETS:
        raise UserError(f"{preset}: no such preset", fix=nearest(preset, PRESETS))
    path = out or Path(f"{preset}.toml")
    if str(path) == "-":
        console.file(starter(preset))
        return
    if path.exists() and not force:
        raise UserError(f"{path}: exists already", fix="--force overwrites it; --out FILE writes elsewhere")
    new_folder = None if path.parent.exists() else path.parent
    try:
        write_atomic(path, starter(preset))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", fix="--out FILE writes elsewhere") from error
    console.show(WrittenSpec(path, preset, new_folder), _render)


def _render(console: Console, written: WrittenSpec) -> None:
    created = f"created {written.new_folder}; " if written.new_folder else ""
    console.text(f"{created}wrote {written.path}; next: embark train {shlex.quote(str(written.path))}")
