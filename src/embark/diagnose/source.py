"""Files to diagnose (logs, events, manifests; of a run, of a folder, or one by one), and their lines, which may be
huge, coloured, interleaved, cut in half or no text at all."""

import gzip
import io
import re
import string
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast

from embark.errors import UserError
from embark.store import EVENTS, SPEC, RunDir, find_run
from embark.store.run_dir import LOG_FOLDERS, SMALL_FILES
from embark.values import frozen

Form = Literal["log", "events", "manifest"]
STDIN = "-"
MAX_FILES = 2000
_GZIP = b"\x1f\x8b"
_MANIFESTS = (".yaml", ".yml")
_NO_LOGS = frozenset({
    ".toml", ".py", ".pyc", ".md", ".html", ".svg", ".png", ".csv", ".parquet", ".npy", ".npz", ".pt", ".bin", ".so",
    ".zip", ".tar", ".whl", ".distcp", ".lock", ".sh"
})
_SKIPPED_FOLDERS = frozenset({
    "checkpoints", "tensorboard", "wandb", "cache", "programs", ".git", "__pycache__", "node_modules"
})


@frozen
class DiagnosedFile:
    """A file to diagnose."""

    name: str
    form: Form
    path: Path | None = None
    data: bytes | None = None  # The bytes of a remote run's file. Without path and data it is standard input.

    def open(self) -> BinaryIO:
        """Open the file, unpacked."""
        if self.data is not None:
            file = io.BytesIO(self.data)
            return cast(BinaryIO, gzip.open(file)) if self.data.startswith(_GZIP) else file
        if self.path is None:
            return sys.stdin.buffer
        try:
            if self.path.is_file() and _head(self.path, 2) == _GZIP:
                return cast(BinaryIO, gzip.open(self.path))
            return self.path.open("rb")  # a pipe can be opened once
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}", "name a file that can be read") from error


@frozen
class SourceList:
    """The files that names on a command line stand for."""

    sources: tuple[DiagnosedFile, ...]
    spec: DiagnosedFile | None  # The run's own, where a run was named.
    skipped: tuple[str, ...]  # Files that are not text.


def sources_of(names: Sequence[str]) -> SourceList:
    """Return the files of names that are each a run's directory, name or URI; a log; a folder of logs; or `-`."""
    if not names:
        raise UserError("nothing to diagnose", "embark diagnose RUN, a log, a folder of logs, or - to read a pipe")
    if list(names).count(STDIN) > 1:
        raise UserError("standard input can be read only once", "give - once")
    for name in names:
        if name.startswith("-") and name != STDIN and not Path(name).exists():
            raise UserError(f"{name}: no such option", "embark diagnose --help")
    paths: list[Path | None] = []
    named: set[Path] = set()
    spec: DiagnosedFile | None = None
    remote: list[DiagnosedFile] = []
    for name in names:
        path = Path(name)
        if name == STDIN:
            paths.append(None)
        elif path.is_file() or (path.exists() and not path.is_dir()):
            paths.append(path)
            named.add(path)
        else:
            run = None if path.is_dir() else find_run(name)
            if run is not None and run.is_remote:
                there = [one for one in SMALL_FILES if run.store.exists(one)]
                there += [entry.path for log_folder in LOG_FOLDERS for entry in run.store.list(log_folder)]
                files = [_source(Path(one), run) for one in there]
                spec = spec or next((file for file in files if file.name.endswith(SPEC)), None)
                remote += [file for file in files if Path(file.name).suffix not in _NO_LOGS]
                continue
            folder = path if run is None else run.path
            if spec is None and (folder / SPEC).is_file():
                spec = _source(folder / SPEC)
            paths += _below(folder)
    unique = list(dict.fromkeys(paths))
    text = [path for path in unique if path is None or path in named or not _is_binary(path)]
    skipped = tuple(str(path) for path in unique if path not in text)
    return SourceList((*map(_source, text), *remote), spec, skipped)


def _source(path: Path | None, run: RunDir | None = None) -> DiagnosedFile:
    """A file of a remote run is read into memory: diagnosing a run writes nothing."""
    if path is None:
        return DiagnosedFile(STDIN, "log")
    form: Form = "events" if path.name.endswith(EVENTS) else "log"
    if run is not None:
        return DiagnosedFile(f"{run.uri}/{path}", form, data=run.store.read(str(path)))
    return DiagnosedFile(str(path), "manifest" if path.suffix in _MANIFESTS else form, path)


def _below(folder: Path) -> Iterator[Path]:
    found = 0
    is_run = (folder / SPEC).is_file() or (folder / EVENTS).is_file()
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if _SKIPPED_FOLDERS & set(parts[:-1]) or path.suffix in _NO_LOGS or not path.is_file():
            continue
        # A link may lead out of a run, and a copied run must not show what else this machine holds.
        if is_run and not path.resolve().is_relative_to(folder.resolve()):
            continue
        found += 1
        if found > MAX_FILES:
            raise UserError(f"{folder}: more than {MAX_FILES:,} files", "name the logs")
        yield path


def _is_binary(path: Path) -> bool:
    try:
        head = _head(path, 4096)
    except OSError:
        return False
    return b"\0" in head and not head.startswith(_GZIP)


def _head(path: Path, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(num_bytes)


BLOCK_BYTES = 1 << 18
MAX_LINE_BYTES = 1 << 20  # A longer line is looked at in pieces.
SHORT_BYTES = 1 << 14  # Longer lines are searched only around the needle.
CONTEXT_BYTES = 2000
MAX_PIECES = 50

_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_FOLD = bytes.maketrans((string.ascii_uppercase + string.digits).encode(), (string.ascii_lowercase + "0" * 10).encode())
_RANKS = tuple(re.compile(pattern) for pattern in (
    r"\[rank(\d{1,5})\]:", r"\[[Rr]ank (\d{1,5})\]", r"\bRank (\d{1,5})\]", r"^\[(?:default)?(\d{1,5})\]:",
    r"(?i)\brank[ =:]{1,2}(\d{1,5})\b"
))
_ISO = re.compile(r"\b20\d\d-(\d\d-\d\d)[T _](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(r"\b[IWEF](\d{1,2})(\d\d) (\d\d:\d\d:\d\d)\.(\d{1,9})")


class Line(NamedTuple):
    """A line, and the key by which it is searched."""

    number: int
    data: bytes  # The line without colours.
    key: bytes
    """The line in lower case with every digit 0: lines that differ in figures alone are searched once."""


def lines(file: BinaryIO) -> Iterator[list[Line]]:
    """Yield the file in lists of whole lines, so that memory is bounded whatever the file."""
    rest = b""
    number = 1
    while data := file.read(BLOCK_BYTES):
        data = rest + data
        cut = data.rfind(b"\n") + 1
        if not cut and len(data) < MAX_LINE_BYTES:
            rest = data
            continue
        cut = cut or len(data)
        rest = data[cut:]
        yield _split(data[:cut], number)
        number += data.count(b"\n", 0, cut)
    if rest:
        yield _split(rest, number)


def fold(text: str) -> bytes:
    """Fold a text as keys of lines are."""
    return text.encode().translate(_FOLD)


def pieces(line: Line, needle: bytes) -> Iterator[str]:
    """Yield the line's text; of a progress bar or a very long line, what is around each occurrence of the needle."""
    if len(line.data) <= SHORT_BYTES and b"\r" not in line.data:
        yield line.data.decode("utf-8", "replace")
        return
    index, last = line.key.find(needle), -1
    for _ in range(MAX_PIECES):
        if index < 0:
            return
        begin = max(line.data.rfind(b"\r", 0, index) + 1, index - CONTEXT_BYTES)
        back = line.data.find(b"\r", index)
        end = min(back if back >= 0 else len(line.data), index + CONTEXT_BYTES)
        if begin != last:
            yield line.data[begin:end].decode("utf-8", "replace")
        last = begin
        index = line.key.find(needle, end)


def rank_of(text: str) -> int | None:
    """Return the rank that a line names; None if it names none."""
    head = text[:400]
    return next((int(found[1]) for pattern in _RANKS if (found := pattern.search(head))), None)


def time_of(text: str) -> str:
    """Return the time that a line names, without the year, since some forms have none."""
    head = text[:200]
    if found := _ISO.search(head):
        return f"{found[1]} {found[2]}.{(found[3] or '0'):0<6.6}"
    if found := _GLOG.search(head):
        return f"{int(found[1]):02d}-{found[2]} {found[3]}.{found[4]:0<6.6}"
    return ""


def _split(data: bytes, number: int) -> list[Line]:
    if b"\x1b" in data:
        data = _ANSI.sub(b"", data)
    data = data.replace(b"\r\n", b"\n")
    each = data.removesuffix(b"\n").split(b"\n")
    keys = data.translate(_FOLD).removesuffix(b"\n").split(b"\n")
    return [Line(number + index, *both) for index, both in enumerate(zip(each, keys, strict=True))]
