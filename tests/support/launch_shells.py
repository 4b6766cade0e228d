"""The commands about launched runs with another shell, in place of this machine's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from embark.launch.shell import Shell


def use_shell(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Shell]) -> None:
    for command in ("launch", "status"):
        monkeypatch.setattr(f"embark.cli.{command}.Shell", make)


class CtrlC(Shell):
    """Ctrl-C at the n-th program, before it is started or after it has done its work."""

    def __init__(self, step: int, *, is_after: bool) -> None:
        self.left, self.is_after = step, is_after

    def ask(self, words, **options):
        return self._count(lambda: super(CtrlC, self).ask(words, **options))

    def change(self, words, **options):
        return self._count(lambda: super(CtrlC, self).change(words, **options))

    def _count(self, run):
        self.left -= 1
        if self.left == 0 and not self.is_after:
            raise KeyboardInterrupt
        done = run()
        if self.left == 0:
            raise KeyboardInterrupt
        return done
