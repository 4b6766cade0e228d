"""A spec's file on disk, edited in place."""

from collections.abc import Sequence
from pathlib import Path

from embark.errors import UserError
from embark.spec import load_spec
from embark.spec.load import set_in_text
from embark.store.atomic_file import write_atomic


def set_in_file(path: Path, sets: Sequence[str]) -> tuple[str, ...]:
    """Write `key=value` settings into a TOML spec, whose comments and order stay; returns the lines that are new.

    A setting that `load_spec` refuses raises before anything is written.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file", fix="`embark init` writes a starter spec")
    load_spec(str(path), sets)
    text, lines = set_in_text(path.read_text(encoding="utf-8"), sets, where=str(path))
    if lines:
        try:
            write_atomic(path, text)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}", fix="make the file writable, or copy it") from error
    return lines
