"""`embark init`: write a starter spec."""

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from embark.errors import UserError, nearest
from embark.values import frozen
from .console import Console, Flag

_STARTER_MODEL = Path(__file__).parents[1] / "trainers" / "torch" / "starter_model.py"


@frozen
class WrittenSpec:
    """The file that was written, and what it started from."""

    path: Path
    model: Path | None  # The file with a custom model.
    preset: str
    new_folder: Path | None  # The one that had to be created for it.


def init(
    preset: str = "quickstart", /, *, out: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
    model: Flag = False, force: Flag = False, console: Console = Console()
) -> None:
    """Write a starter spec: laptop, quickstart, criteo-1tb, mlperf-dcnv2, mlperf-hstu, or one for a file of yours.

    Parameters
    ----------
    preset
        The preset to start from, or a file of rows to train on.
    out
        The spec to write, PRESET.toml by default, or the file's name with .toml; - for standard output.
    model
        Also write a custom model to start from, my_model.py, beside it.
    force
        Overwrite files that exist.
    """
    from embark.data.prepare.starter import starter_of_file
    from embark.spec import PRESETS, set_in_text
    from embark.spec.toml import starter
    from embark.store import write_atomic

    is_file = preset not in PRESETS and Path(preset).is_file()
    if preset not in PRESETS and not is_file:
        raise UserError(f"{preset}: no such preset, and no file", nearest(preset, PRESETS))
    path = out or Path(f"{Path(preset).name.partition('.')[0] if is_file else preset}.toml")
    if is_file and Path(preset).suffix == ".toml":
        raise UserError(f"{preset}: is a spec, and no file of rows", f"embark train {shlex.quote(preset)}")
    if str(path) == "-":
        if model:
            raise UserError("--model writes a file beside the spec", "leave --model or --out - out")
        console.file(starter_of_file(Path(preset), Path("spec.toml")) if is_file else starter(preset))
        return
    text = starter_of_file(Path(preset), path, may_be_log=not model) if is_file else starter(preset, path)
    files = {path: text}
    if model:
        files = {path: set_in_text(text, ["model.kind=my_model:MyModel"], where=str(path))[0],
                 path.with_name("my_model.py"): _STARTER_MODEL.read_text(encoding="utf-8")}
    if there := [file for file, content in files.items() if not force and _is_other(file, content)]:
        raise UserError(f"{there[0]}: exists already", "--force overwrites it; --out FILE writes elsewhere")
    new_folder = None if path.parent.exists() else path.parent
    try:
        for file, content in files.items():
            write_atomic(file, content)
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror}", "--out FILE writes elsewhere") from error
    console.show(WrittenSpec(path, [*files][1] if model else None, preset, new_folder), _render)


def _is_other(file: Path, content: str) -> bool:
    return file.exists() and not (file.is_file() and file.read_bytes() == content.encode())


def _render(console: Console, written: WrittenSpec) -> None:
    from embark.spec import PRESETS

    created = f"created {written.new_folder}; " if written.new_folder else ""
    also = f" and {written.model}" if written.model else ""
    command = "train" if written.preset in PRESETS else "data prepare --dry-run"
    console.text(f"{created}wrote {written.path}{also}; next: embark {command} {shlex.quote(str(written.path))}")
