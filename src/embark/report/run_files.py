"""The files of a run, in a directory of this machine or behind a URI, the lines of those that grow, and the runs that a
command means."""

from collections.abc import Callable, Sequence
from pathlib import Path

from embark.errors import UserError, nearest
from embark.events.events import LineSplitter
from embark.launch.run_registry import list_runs
from embark.launch.supervisor import LOG
from embark.store import EVENTS, SPEC, NotFound, open_store, run_uri
from embark.store.run_dir import LOG_FOLDERS, files_below
from embark.values import frozen

LAUNCH_LOG = "launch log"
ROOT = "runs"
MAX_RUNS = 200
MAX_LOGS = 64
BLOCK_BYTES = 1 << 20
REMOTE_BLOCK_BYTES = 8 << 20  # Larger blocks for object stores, where each block is a request.
_CHECKED_BYTES = 64


@frozen
class LogFile:
    """A log of a run, named relative to the run."""

    name: str
    size_bytes: int


class RunFiles:
    """A run's files, which may change or disappear at any time: one that is not there reads as empty."""

    def __init__(self, uri: str | Path, launch_log: Path | None = None) -> None:
        """`launch_log`: what a run that `embark launch` started on this machine prints."""
        self.uri = str(uri)
        self.is_remote = "://" in self.uri and not self.uri.startswith("file://")
        self.root = Path(self.uri.removeprefix("file://")).expanduser()
        self.store = open_store(self.uri)
        self.name = self.uri.rstrip("/").rpartition("/")[2] if self.is_remote else self.root.resolve().name
        self.launch_log = launch_log
        self._sizes: dict[str, int] = {}

    def size_bytes(self, name: str) -> int | None:
        """Return the size of a file; None where there is none."""
        try:
            self._sizes[name] = self.store.size(name) if self.is_remote else self._path(name).stat().st_size
        except (OSError, NotFound):
            self._sizes.pop(name, None)
        return self._sizes.get(name)

    def read(self, name: str, start: int, num_bytes: int) -> bytes:
        """Return what there is from `start` on, `num_bytes` at most."""
        if self.is_remote:
            known = self._sizes[name] if name in self._sizes else self.size_bytes(name) or 0
            num_bytes = min(num_bytes, known - start)
            return self.store.read_range(name, start, num_bytes) if num_bytes > 0 else b""
        try:
            with self._path(name).open("rb", buffering=0) as file:
                file.seek(start)
                return file.read(num_bytes)
        except OSError:
            return b""

    def read_text(self, name: str, max_bytes: int = 1 << 20) -> str | None:
        size = self.size_bytes(name)
        return None if size is None else self.read(name, 0, min(size, max_bytes)).decode("utf-8", "replace")

    def logs(self) -> list[LogFile]:
        if self.is_remote:
            return [LogFile(entry.path, entry.size_bytes) for folder in LOG_FOLDERS
                    for entry in self.store.list(folder)][:MAX_LOGS]
        paths = [*sorted(self.root.glob("*.log")),
                 *(path for folder in LOG_FOLDERS for path in sorted(files_below(self.root / folder)))]
        names = [path.relative_to(self.root).as_posix() for path in paths]
        names = [LAUNCH_LOG, *names] if self.launch_log else names
        return [LogFile(name, size) for name in names if (size := self.size_bytes(name)) is not None][:MAX_LOGS]

    def _path(self, name: str) -> Path:
        if name == LAUNCH_LOG and self.launch_log is not None:
            return self.launch_log
        path = self.root / name
        # A link may lead out of the run, and a copied run must not show what else this machine holds.
        if not path.is_file() or not path.resolve().is_relative_to(self.root.resolve()):
            raise FileNotFoundError(name)
        return path


Finder = Callable[[], list[RunFiles]]  # The runs that there are now.


def find_runs(words: Sequence[str]) -> Finder:
    """Return a finder of the runs that the words of a command name, by default those of ./runs.

    Below a directory, new ones may appear.
    """
    finders = [_finder(word, is_named=bool(words)) for word in words or [ROOT]]
    return lambda: [files for find in finders for files in find()][:MAX_RUNS]


def _finder(word: str, *, is_named: bool) -> Finder:
    if "://" in word and not word.startswith("file://"):
        return _remote_finder(word.rstrip("/"))
    for folder in (Path(word.removeprefix("file://")).expanduser(), Path(run_uri(ROOT, word)).expanduser()):
        if folder.is_dir():
            return lambda: _local_runs([folder] if _is_run(folder) else
                                       _newest_first(folder) or _newest_first(folder / ROOT))
    if not is_named:  # the first run makes it
        return lambda: _local_runs(_newest_first(Path(ROOT)))
    names = [found.name for found in Path(ROOT).glob("*") if found.is_dir()] if Path(ROOT).is_dir() else []
    raise UserError(f"{word}: no such run or directory", nearest(word, names) if names else
                    "name a run's directory, a directory of runs, or a URI of either")


def _is_run(folder: Path) -> bool:
    return (folder / SPEC).is_file() or (folder / EVENTS).is_file()


def _newest_first(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if path.is_dir() and _is_run(path)] if folder.is_dir() else []
    return sorted(found, key=_changed_s, reverse=True)


def _changed_s(run: Path) -> float:
    try:
        return max((run / name).stat().st_mtime for name in (EVENTS, SPEC) if (run / name).is_file())
    except (OSError, ValueError):
        return 0.0


def _local_runs(folders: Sequence[Path]) -> list[RunFiles]:
    launched = [one.handle for one in list_runs().runs if one.handle.backend == "local"]
    logs = {handle.run_uri: Path(str(handle.where.get("folder", ""))) / LOG for handle in launched}
    return [RunFiles(folder, logs.get(str(folder.expanduser().absolute()))) for folder in folders]


def _remote_finder(uri: str) -> Finder:
    store = open_store(uri)
    if store.exists(EVENTS) or store.exists(SPEC):
        found = [RunFiles(uri)]
    else:  # Listed once: each time it would be every file of every checkpoint.
        names = sorted({entry.path.partition("/")[0] for entry in store.list() if entry.path.count("/") == 1
                        and entry.path.rpartition("/")[2] in (EVENTS, SPEC)})
        found = [RunFiles(f"{uri}/{name}") for name in names]
    if not found:
        raise UserError(f"{uri}: no run there: neither {EVENTS} nor {SPEC}, nor a directory with one of them",
                        "name what `embark train` wrote to: store.root, or store.root/NAME")
    return lambda: found


@frozen
class NewLines:
    """The result of one call of `look`."""

    lines: tuple[bytes, ...] = ()  # Complete lines only.
    is_missing: bool = False
    is_new: bool = False  # The file was replaced or truncated: what was read before is no longer part of it.
    is_end: bool = True  # There was nothing more to read.


class Tail:
    """Reads the lines of a file, a block at a time, from where the last call ended."""

    def __init__(self, files: RunFiles, name: str) -> None:
        self._files = files
        self._name = name
        self._reset()

    def _reset(self) -> None:
        self._offset = 0
        self._last = b""
        self._splitter = LineSplitter()

    @property
    def offset(self) -> int:
        """The number of bytes that have been read."""
        return self._offset

    def look(self) -> NewLines:
        size = self._files.size_bytes(self._name)
        if size is None:
            was_there = self._offset > 0
            self._reset()
            return NewLines(is_missing=True, is_new=was_there)
        if size == self._offset:
            return NewLines()
        is_new = size < self._offset
        if is_new:
            self._reset()
        block = self._next_block()
        if block is None:  # the bytes before have changed: another file
            is_new = True
            self._reset()
            block = self._next_block() or b""
        self._offset += len(block)
        self._last = (self._last + block)[-_CHECKED_BYTES:]
        return NewLines(tuple(self._splitter.lines(block)), is_new=is_new, is_end=self._offset >= size or not block)

    def _next_block(self) -> bytes | None:
        """Return the bytes that follow; None where those before them have changed."""
        known = len(self._last)
        block_bytes = REMOTE_BLOCK_BYTES if self._files.is_remote else BLOCK_BYTES
        read = self._files.read(self._name, self._offset - known, known + block_bytes)
        return read[known:] if read[:known] == self._last else None
