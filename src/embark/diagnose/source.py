"""Files to read: logs, events, manifests; of a run, of a folder, or one by one."""

import gzip
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

from embark.errors import UserError

Form = Literal["log", "events", "manifest"]
STDIN = "-"
MAX_FILES = 2000
_MANIFESTS = (".yaml", ".yml")
_NO_LOGS = frozenset({
    ".toml", ".py", ".pyc", ".md", ".html", ".svg", ".png", ".csv", ".parquet", ".npy", ".npz", ".pt", ".bin", ".so",
    ".zip", ".tar", ".whl", ".distcp", ".lock", ".sh",
})
_SKIPPED_FOLDERS = frozenset({"checkpoints", "tensorboard", ".git", "__pycache__", "node_modules"})


@dataclass(frozen=True, slots=True)
class Source:
    """A file to read."""

    name: str
    form: Form
    path: Path | None
    """None: standard input."""

    def open(self) -> BinaryIO:
        """Its bytes, unpacked."""
        if self.path is None:
            return sys.stdin.buffer
        try:
            if self.path.is_file() and _head(self.path, 2) == b"\x1f\x8b":
                return cast(BinaryIO, gzip.open(self.path))
            return self.path.open("rb")  # a pipe can be opened once
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}", fix="name a file that can be read") from error


@dataclass(frozen=True, slots=True)
class SourceList:
    """The files that names on a command line stand for."""

    sources: tuple[Source, ...]
    spec: Path | None
    """The run's own, where a run was named."""
    skipped: tuple[str, ...]
    """Files that are not text."""


def sources_of(names: Sequence[str]) -> SourceList:
    """Each name a run's directory, name or uri; a log; a folder of logs; or `-`."""
    if not names:
        raise UserError("nothing to diagnose", fix="embark diagnose RUN, a log, a folder of logs, or - to read a pipe")
    if list(names).count(STDIN) > 1:
        raise UserError("standard input can be read only once", fix="give - once")
    for name in names:
        if name.startswith("-") and name != STDIN and not Path(name).exists():
            raise UserError(f"{name}: no such option", fix="embark diagnose --help")
    paths: list[Path | None] = []
    named: set[Path] = set()
    spec: Path | None = None
    for name in names:
        path = Path(name)
        if name == STDIN:
            paths.append(None)
        elif path.is_file() or (path.exists() and not path.is_dir()):
            paths.append(path)
            named.add(path)
        else:
            folder = path if path.is_dir() else _run_folder(name)
            if spec is None and (folder / "spec.toml").is_file():
                spec = folder / "spec.toml"
            paths += _below(folder)
    unique = list(dict.fromkeys(paths))
    text = [path for path in unique if path is None or path in named or not _is_binary(path)]
    skipped = tuple(str(path) for path in unique if path not in text)
    return SourceList(tuple(_source(path) for path in text), spec, skipped)


def _run_folder(name: str) -> Path:
    """The small files of a remote run are downloaded."""
    from embark.store import find_run

    run = find_run(name)
    run.fetch()
    return run.path


def _source(path: Path | None) -> Source:
    if path is None:
        return Source(STDIN, "log", None)
    if path.name.endswith("events.jsonl"):
        return Source(str(path), "events", path)
    return Source(str(path), "manifest" if path.suffix in _MANIFESTS else "log", path)


def _below(folder: Path) -> Iterator[Path]:
    found = 0
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if _SKIPPED_FOLDERS & set(parts[:-1]) or path.suffix in _NO_LOGS or not path.is_file():
            continue
        found += 1
        if found > MAX_FILES:
            raise UserError(f"{folder}: more than {MAX_FILES:,} files", fix="name the logs")
        yield path


def _is_binary(path: Path) -> bool:
    try:
        head = _head(path, 4096)
    except OSError:
        return False
    return b"\0" in head and not head.startswith(b"\x1f\x8b")


def _head(path: Path, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(num_bytes)
