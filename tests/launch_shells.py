"""The commands about launched runs with another shell, in place of this machine's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from embark.launch.shell import Shell


def use_shell(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Shell]) -> None:
    for command in ("launch", "status", "logs", "cancel"):
        monkeypatch.setattr(f"embark.cli.{command}.Shell", make)
