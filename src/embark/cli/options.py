"""The flags that every verb takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from embark.cli.console import Console

Flag = Annotated[bool, Parameter(negative="", show_default=False)]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What every verb takes."""

    json: Flag = False
    """Print JSON for programs, nothing for people."""
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative="", show_default=False)] = False
    """Print results, warnings and errors only."""

    def console(self) -> Console:
        return Console(json=self.json, quiet=self.quiet)

SPEC_HELP = "A TOML file, a preset's name (laptop, quickstart, criteo-1tb, mlperf-dcnv2), or module:function."
SET_HELP = "Override a field: --set train.batch_size=4096. May be given many times."
Spec = Annotated[str, Parameter(help=SPEC_HELP)]
Settings = Annotated[tuple[str, ...], Parameter(name=("--set", "-s"), help=SET_HELP, negative="", show_default=False)]
