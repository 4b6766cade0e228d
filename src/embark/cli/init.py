"""`embark init`: write a starter spec."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from embark.cli.console import Console, Flag
from embark.errors import UserError, nearest

_STARTER_MODEL = Path(__file__).parents[1] / "trainers" / "torch" / "starter_model.py"


@dataclass(frozen=True, slots=True)
class WrittenSpec:
    """The file that was written, and what it started from."""

    path: Path
    model: Path | None  # The file with a custom model.
    preset: str
    new_folder: Path | None  # The one that had to be created for it.


def init(
    preset: str = "quickstart", /, *, out: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
    model: Flag = False, force: Flag = False, console: Console = Console(),
) -> None:
    """Write a starter spec: laptop, quickstart, criteo-1tb, mlperf-dcnv2 or mlperf-hstu.

    Parameters
    ----------
    preset
        The preset to start from.
    out
        The file to write, PRESET.toml by default; - for standard output.
    model
        Also write a custom model to start from, my_model.py, beside it.
    force
        Overwrite files that exist.
    """
    from embark.spec import PRESETS
    from embark.spec.load import set_in_text
    from embark.spec.toml import starter
    from embark.store import write_atomic

    if preset not in PRESETS:
        raise UserError(f"{preset}: no such preset", fix=nearest(preset, PRESETS))
    path = out or Path(f"{preset}.toml")
    if str(path) == "-":
        if model:
            raise UserError("--model writes a file beside the spec", fix="leave --model or --out - out")
        console.file(starter(preset))
        return
    text = starter(preset, path)
    files = {path: text}
    if model:
        files = {path: set_in_text(text, ["model.kind=my_model:MyModel"], where=str(path))[0],
                 path.with_name("my_model.py"): _STARTER_MODEL.read_text(encoding="utf-8")}
    if there := [file for file, content in files.items() if not force and _is_other(file, content)]:
        raise UserError(f"{there[0]}: exists already", fix="--force overwrites it; --out FILE writes elsewhere")
    new_folder = None if path.parent.exists() else path.parent
    try:
        for file, content in files.items():
            write_atomic(file, content)
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror}", fix="--out FILE writes elsewhere") from error
    console.show(WrittenSpec(path, [*files][1] if model else None, preset, new_folder), _render)


def _is_other(file: Path, content: str) -> bool:
    return file.exists() and not (file.is_file() and file.read_bytes() == content.encode())


def _render(console: Console, written: WrittenSpec) -> None:
    created = f"created {written.new_folder}; " if written.new_folder else ""
    also = f" and {written.model}" if written.model else ""
    console.text(f"{created}wrote {written.path}{also}; next: embark train {shlex.quote(str(written.path))}")
