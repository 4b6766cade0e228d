"""Where a run's files are, as far as the page needs to know: a folder here, or whatever the caller has a way into."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

EVENTS = "events.jsonl"
SPEC = "spec.toml"
MAX_LOGS = 64
_LOG_FOLDERS = ("logs", "ranks")


@dataclass(frozen=True, slots=True)
class LogFile:
    """A text file of a run's, known by its place in the list and not by a path."""

    name: str
    """As people read it, relative to the run."""
    size_bytes: int


class Place(Protocol):
    """A run's files. Nothing here raises for a file that is not there: it may go at any time."""

    @property
    def uri(self) -> str:
        """Names the run among all others."""

    @property
    def is_remote(self) -> bool:
        """Behind a network, where looking costs, and where the run's files come now and then."""

    def size_bytes(self, name: str) -> int | None:
        """Of a file; None where there is none."""

    def read(self, name: str, start: int, num_bytes: int) -> bytes:
        """What there is from `start` on, `num_bytes` at most."""

    def logs(self) -> list[LogFile]:
        """Those that hold lines for people."""


class FolderPlace:
    """A folder of this machine."""

    def __init__(self, path: Path, also: Mapping[str, Path] | None = None) -> None:
        """`also`: logs that are kept elsewhere, by the name they are to have."""
        self._path = path
        self._also = dict(also or {})
        self.uri = str(path)
        self.is_remote = False
        self._is_inside: dict[str, bool] = {}

    @property
    def elsewhere(self) -> list[Path]:
        """Logs that are not in the folder."""
        return list(self._also.values())

    def size_bytes(self, name: str) -> int | None:
        path = self._also.get(name, self._path / name)
        try:
            if not path.is_file():
                return None
            # A link may lead out of the run, and a copied run must not show what else this machine holds.
            self._is_inside[name] = name in self._also or path.resolve().is_relative_to(self._path.resolve())
            return path.stat().st_size if self._is_inside[name] else None
        except OSError:
            return None

    def read(self, name: str, start: int, num_bytes: int) -> bytes:
        if name not in self._is_inside:
            self.size_bytes(name)
        if not self._is_inside.get(name):
            return b""
        try:
            file = os.open(self._also.get(name, self._path / name), os.O_RDONLY)
        except OSError:
            return b""
        try:
            return os.pread(file, num_bytes, start)
        except OSError:
            return b""
        finally:
            os.close(file)

    def logs(self) -> list[LogFile]:
        found = [LogFile(name, size) for name in self._also if (size := self.size_bytes(name)) is not None]
        for folder, deep in ((self._path, False), *((self._path / name, True) for name in _LOG_FOLDERS)):
            for path in sorted(folder.rglob("*") if deep else folder.glob("*.log")):
                size = self.size_bytes(path.relative_to(self._path).as_posix())
                if size is not None and len(found) < MAX_LOGS:
                    found.append(LogFile(path.relative_to(self._path).as_posix(), size))
        return found
