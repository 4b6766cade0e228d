"""The flags that every verb takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from embark.console import Console

Flag = Annotated[bool, Parameter(negative="", show_default=False)]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Manners:
    """What every verb takes."""

    json: Flag = False
    """Print JSON for programs, nothing for people."""
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative="", show_default=False)] = False
    """Print results, warnings and errors only."""

    def console(self) -> Console:
        return Console(json=self.json, quiet=self.quiet)
