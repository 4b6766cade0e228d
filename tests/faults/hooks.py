"""What a test does to a rank before it begins: called in the forked process, with the rank first."""

from __future__ import annotations

import importlib
import os
import signal
import time
from typing import Any


def die_in(rank: int, victim: int, method: str, word: str, count: int) -> None:
    """SIGKILL itself as `module:Class.method` is called with `word` in its first argument for the `count`-th time."""
    if rank != victim:
        return
    left = [count]

    def before(words: tuple[Any, ...]) -> None:
        if word in str(words[:1]):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    _before(method, before)


def slow(rank: int, method: str, word: str, seconds: float, mark: str, only: int = -1) -> None:
    """Wait at each call of `module:Class.method` with `word` in its first argument; `mark` is a file that says so."""
    if only not in (-1, rank):
        return

    def before(words: tuple[Any, ...]) -> None:
        if word in str(words[:1]):
            open(mark, "w").close()
            time.sleep(seconds)

    _before(method, before)


def hasty(rank: int, **fields: float) -> None:
    """Stores are waited for less than they are by default."""
    from embark.store import door

    patience = door.Patience
    door.Patience = lambda: patience(**fields)  # type: ignore[assignment,misc]


def _before(method: str, call: Any) -> None:
    module, _, names = method.partition(":")
    owner_name, _, name = names.rpartition(".")
    owner = getattr(importlib.import_module(module), owner_name)
    original = getattr(owner, name)

    def replaced(self: Any, *words: Any, **more: Any) -> Any:
        call(words)
        return original(self, *words, **more)

    setattr(owner, name, replaced)
