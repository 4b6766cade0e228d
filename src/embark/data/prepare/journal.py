"""What is done already, in `.preparing/` beside the data: a stop at any moment costs the segments in work, no more."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from embark.errors import UserError
from embark.store.atomic_file import write_atomic

PREPARING = ".preparing"
_SETTINGS = "settings.json"


class Journal:
    """One record a task, written whole or not at all, after what it speaks of is on disk."""

    def __init__(self, out: Path) -> None:
        self.directory = out / PREPARING
        self._lock: int | None = None

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.directory / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UserError(f"{self.directory.parent}: another process is preparing data here",
                            fix="wait for it, or give another data.path") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)

    def begin(self, settings: dict[str, Any]) -> bool:
        """Go on with the same settings, or begin with them; True if there was something. Others are refused."""
        settings = json.loads(json.dumps(settings))
        path = self.directory / _SETTINGS
        if not path.exists():
            write_atomic(path, _text(settings))
            return False
        differing = _differences("", json.loads(path.read_text()), settings)
        if differing:
            shown = "; ".join(differing[:5]) + (f"; and {len(differing) - 5} more" if len(differing) > 5 else "")
            raise UserError(f"{self.directory.parent}: holds the beginning of another preparation: {shown}",
                            fix="--fresh begins again, or give another data.path")
        return True

    def read(self, name: str) -> dict[str, Any] | None:
        """A task's record, if it is done."""
        try:
            value: dict[str, Any] = json.loads((self.directory / f"{name}.json").read_text())
        except FileNotFoundError:
            return None
        return value

    def write(self, name: str, record: dict[str, Any]) -> None:
        """The task is done."""
        path = self.directory / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(record))

    def remove(self) -> None:
        """All is done."""
        shutil.rmtree(self.directory, ignore_errors=True)



def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"


def _differences(place: str, was: Any, now: Any) -> list[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        return [d for key in sorted(was.keys() | now.keys())
                for d in _differences(f"{place}.{key}" if place else key, was.get(key), now.get(key))]
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return [d for i, (a, b) in enumerate(zip(was, now, strict=True)) for d in _differences(f"{place}[{i}]", a, b)]
    return [] if was == now else [f"{place} was {_short(was)}, is {_short(now)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
