"""Every error a user can meet, and the exit code each one ends the process with.

    EmbarkError            1   anything else
    ├── UserError         64   the input is wrong; never retry
    │   ├── MistakesError      … several mistakes at once, such as in the catalog's files
    │   │   └── SpecError          … in the spec or in --set
    │   ├── DataError          … in the data the spec names
    │   ├── MissingPackage     … an extra that is not installed
    │   ├── OverBudget         … place.budget_usd is spent; saved
    │   └── RunInUse           … another process trains the run
    ├── Fault             70   something broke that a retry may fix
    ├── Preempted         75   saved; start it again
    ├── Diverged           1   the loss is no longer a number
    └── Interrupted      130   Ctrl-C
"""

import atexit
import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, NoReturn


class ExitCode(IntEnum):
    """The process's exit code, for the shell, torchrun and job controllers."""

    DONE = 0
    OTHER = 1
    BAD_INPUT = 64
    FAULT = 70
    PREEMPTED = 75
    INTERRUPTED = 130


class EmbarkError(Exception):
    """The root of the tree. `what` went wrong and, where known, the `fix`."""

    exit_code: ClassVar[ExitCode] = ExitCode.OTHER

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n  fix: {self.fix}" if self.fix else self.what


class UserError(EmbarkError):
    """The input is wrong. Running it again gives the same error."""

    exit_code = ExitCode.BAD_INPUT


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a file or setting: where, what, and the fix."""

    where: str  # File and line, or the `--set` argument.
    field: str  # Dotted name, such as `train.batch_size`.
    value: str  # The value as the user wrote it; empty if there was none.
    what: str
    fix: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: {self.field}" if self.where else self.field
        written = f" = {self.value}" if self.value else ""
        fix = f"\n    fix: {self.fix}" if self.fix else ""
        return f"{place}{written}\n    {self.what}{fix}"


Mistakes = Iterator[Mistake]


def conflict(field: str, value: object, what: str, fix: str) -> Mistake:
    """Describe a field of a spec that conflicts with the others; `load_spec` adds its file and line."""
    return Mistake("", field, str(value), what, fix)


class MistakesError(UserError):
    """All the mistakes of one input, at once."""

    def __init__(self, mistakes: Sequence[Mistake], subject: str, *, fix: str = "") -> None:
        self.mistakes = tuple(mistakes)
        count = "1 mistake" if len(self.mistakes) == 1 else f"{len(self.mistakes)} mistakes"
        super().__init__(f"{count} in {subject}\n" + "\n".join(f"  {m}" for m in self.mistakes), fix=fix)


class SpecError(MistakesError):
    """All the mistakes of one spec, at once."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        super().__init__(mistakes, "the spec")


class DataError(UserError):
    """The data that the spec names is missing, or is not what the spec says."""


class MissingPackage(UserError):
    """A package of an extra is needed and not installed."""


class OverBudget(UserError):
    """The budget is spent. Started again, the run would only spend more."""


class RunInUse(UserError):
    """Another process trains this run. Started again, it would find the same."""


class Fault(EmbarkError):
    """Something outside the input broke; the run can be started again."""

    exit_code = ExitCode.FAULT


class Preempted(EmbarkError):
    """The machine is being preempted; what could be saved is saved."""

    exit_code = ExitCode.PREEMPTED


class Diverged(EmbarkError):
    """The loss is no longer a number, and never will be."""


class Interrupted(EmbarkError):
    """The user pressed Ctrl-C."""

    exit_code = ExitCode.INTERRUPTED


def leave(code: int) -> NoReturn:
    """End this process with `code` whatever else it has loaded: threads of torch's own, which nobody can stop, abort an
    ordinary exit now and then, after everything is saved."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean …?`, or all names, for the fix of a misspelt name."""
    names = sorted(known)
    return did_you_mean(near_names(name, names, 1)) or "one of: " + ", ".join(names)


def near_names(name: str, known: Iterable[str], num: int) -> list[str]:
    """Return at most `num` names, ignoring case: those that contain `name`, the shortest first, then similar ones."""
    word, by_lower = name.lower(), {one.lower(): one for one in known}
    holding = sorted((one for one in by_lower if len(word) > 1 and word in one), key=len)
    close = difflib.get_close_matches(word, by_lower, n=num)
    return [by_lower[one] for one in dict.fromkeys((*holding, *close))][:num]


def did_you_mean(names: Sequence[str]) -> str:
    """`did you mean 'a' or 'b'?`; empty without names."""
    return "did you mean " + " or ".join(map(repr, names)) + "?" if names else ""
