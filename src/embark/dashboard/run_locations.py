"""Which runs the words of `embark watch` mean, and where their files are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from embark.errors import UserError, nearest
from embark.launch.backends.local.supervisor import LOG
from embark.launch.run_registry import list_runs
from embark.report.locations import EVENTS, MAX_LOGS, SPEC, FolderPlace, LogFile, Place
from embark.store import ObjectStore, open_store, run_uri
from embark.store.errors import NotFound

ROOT = "runs"
MAX_RUNS = 200


class DoorPlace:
    """A run behind a uri."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.uri = store.uri
        self.is_remote = True
        self._sizes: dict[str, int] = {}

    def size_bytes(self, name: str) -> int | None:
        try:
            self._sizes[name] = self.store.size(name)
        except NotFound:
            self._sizes.pop(name, None)
        return self._sizes.get(name)

    def read(self, name: str, start: int, num_bytes: int) -> bytes:
        if name not in self._sizes:
            self.size_bytes(name)
        num_bytes = min(num_bytes, self._sizes.get(name, 0) - start)
        return self.store.read_range(name, start, num_bytes) if num_bytes > 0 else b""

    def logs(self) -> list[LogFile]:
        return [LogFile(entry.path, entry.size_bytes) for folder in ("logs", "ranks")
                for entry in self.store.list(folder)][:MAX_LOGS]


@dataclass
class Places:
    """The runs that are meant, as they are when asked: under a folder, new ones come."""

    words: Sequence[str]
    _finders: list[Callable[[], Iterator[tuple[str, Place]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for word in self.words or [ROOT]:
            self._finders.append(_finder(word, is_named=bool(self.words)))

    def __call__(self) -> list[tuple[str, Place]]:
        return [pair for find in self._finders for pair in find()][:MAX_RUNS]


def _finder(word: str, *, is_named: bool) -> Callable[[], Iterator[tuple[str, Place]]]:
    if "://" in word and not word.startswith("file://"):
        return _remote_finder(word.rstrip("/"))
    path = Path(word.removeprefix("file://")).expanduser()
    by_name = Path(run_uri(ROOT, word)).expanduser()
    for folder in (path, by_name):
        if folder.is_dir():
            return partial(_one_run if _is_run(folder) else _runs_in, folder)
    if not is_named:
        raise UserError(f"there is no {ROOT}/ here",
                        fix="embark train writes runs; embark watch DIR names another folder")
    names = [found.name for found in Path(ROOT).glob("*") if found.is_dir()] if Path(ROOT).is_dir() else []
    raise UserError(f"{word}: no such run or folder", fix=nearest(word, names) if names else
                    "name a run's directory, a folder of runs, or a uri of either")


def _is_run(folder: Path) -> bool:
    return (folder / SPEC).is_file() or (folder / EVENTS).is_file()


def _one_run(folder: Path) -> Iterator[tuple[str, Place]]:
    yield folder.resolve().name, _place(folder, _launch_logs())


def _runs_in(folder: Path) -> Iterator[tuple[str, Place]]:
    """The newest first."""
    if not folder.is_dir():
        return
    found = [path for path in folder.iterdir() if path.is_dir() and _is_run(path)]
    logs = _launch_logs()
    for path in sorted(found, key=_changed_s, reverse=True):
        yield path.name, _place(path, logs)


def _place(run: Path, logs: Mapping[str, Path]) -> FolderPlace:
    log = logs.get(str(run.expanduser().absolute()))
    return FolderPlace(run, {"launch log": log} if log else None)


def _launch_logs() -> dict[str, Path]:
    """What the processes of runs that `embark launch` started on this machine print, by the run's directory."""
    handles = [held.handle for held in list_runs().runs if held.handle.backend == "local"]
    return {handle.run_uri: Path(str(handle.where["folder"])) / LOG for handle in handles}


def _changed_s(run: Path) -> float:
    try:
        return max((run / name).stat().st_mtime for name in (EVENTS, SPEC) if (run / name).is_file())
    except (OSError, ValueError):
        return 0.0


def _remote_finder(uri: str) -> Callable[[], Iterator[tuple[str, Place]]]:
    store = open_store(uri)
    if store.exists(EVENTS) or store.exists(SPEC):
        place = DoorPlace(store)
        return lambda: iter([(uri.rpartition("/")[2], place)])
    # A bucket is listed once: each time it would be every file of every checkpoint.
    names = sorted({entry.path.partition("/")[0] for entry in store.list() if entry.path.count("/") == 1
                    and entry.path.rpartition("/")[2] in (EVENTS, SPEC)})
    if not names:
        raise UserError(f"{uri}: no run there, neither {EVENTS} nor {SPEC}, and none in a folder below",
                        fix="name what `embark train` wrote to: store.root, or store.root/NAME")
    places = [(name, DoorPlace(open_store(f"{uri}/{name}"))) for name in names]
    return lambda: iter(places)

