"""What is done already, in `.preparing/` beside the data: an interruption costs only the segments being read."""

import fcntl
import json
import operator
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from embark.errors import UserError
from embark.store import write_atomic

PREPARING = ".preparing"
_SETTINGS = "settings.json"


class Journal:
    """One record a task, written atomically after what it describes is on disk."""

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
                            fix="wait for it, or set another data.path") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)

    def begin(self, settings: dict[str, Any]) -> None:
        """Start with these settings, or resume with the same ones; others are refused."""
        settings = json.loads(json.dumps(settings))
        path = self.directory / _SETTINGS
        if not path.exists():
            write_atomic(path, json.dumps(settings, indent=1) + "\n")
            return
        differing = differences(json.loads(path.read_text()), settings)
        if differing:
            shown = "; ".join(f"{place} was {_short(was)}, is {_short(now)}" for place, was, now in differing[:5])
            more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
            raise UserError(f"{self.directory.parent}: holds another, unfinished preparation: {shown}{more}",
                            fix="--fresh starts over, or set another data.path")

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


def differences(
    was: Any, now: Any, place: str = "", is_same: Callable[[Any, Any], bool] = operator.eq
) -> list[tuple[str, Any, Any]]:
    """Where two values of JSON differ, and what each has there."""
    if isinstance(was, dict) and isinstance(now, dict):
        return [d for key in dict.fromkeys([*was, *now])
                for d in differences(was.get(key), now.get(key), f"{place}.{key}" if place else key, is_same)]
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return [d for i, (a, b) in enumerate(zip(was, now, strict=True))
                for d in differences(a, b, f"{place}[{i}]", is_same)]
    return [] if is_same(was, now) else [(place, was, now)]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
