"""A cloud's own command line, asked for JSON; every failure becomes a check with its fix."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from embark.doctor.check import Check, Verdict
from embark.formatting import to_one_line
from embark.launch.shell import Shell


class CheckFailed(Exception):
    """The command line gave no answer: the check that says why."""

    def __init__(self, check: Check) -> None:
        super().__init__(check.found)
        self.check = check


@dataclass(frozen=True, slots=True)
class Refusal:
    """Texts of an error, and what they mean."""

    texts: tuple[str, ...]
    verdict: Verdict
    found: str
    """`{said}`: the error itself."""
    expected: str
    fix: str


@dataclass(frozen=True, slots=True)
class CloudCli:
    """`az` or `gcloud`."""

    program: str
    title: str
    install: str
    flags: tuple[str, ...]
    """That make it print JSON."""
    upgrade: str
    refusals: Sequence[Refusal]
    shell: Shell

    def require(self) -> None:
        if shutil.which(self.program) is None:
            found = f"{self.program}, {self.title}'s command line, is not installed"
            raise CheckFailed(Check("account", "wrong", found, f"{self.program} on the path", self.install))

    def ask(self, name: str, *words: str) -> Any:
        """Its answer. `name`: of the check that fails where there is none."""
        done = self.shell.ask([self.program, *words, *self.flags], timeout_s=120)
        if done.has_timed_out:
            raise CheckFailed(Check(name, "wrong", f"{self.program} did not answer in time", "an answer",
                                    "check the network, or a proxy"))
        if not done.is_ok:
            said = to_one_line(done.err)
            for one in self.refusals:
                if any(text in said for text in one.texts):
                    found = one.found.format(said=said[:160])
                    raise CheckFailed(Check(name, one.verdict, found, one.expected, one.fix))
            raise CheckFailed(Check(name, "warning", f"{self.program} refused: {said[:240]}", "an answer",
                                    "ask again, or look in the console"))
        try:
            return json.loads(done.out or "[]")
        except ValueError:
            found = f"{self.program} did not print JSON: {to_one_line(done.out)[:100]}"
            raise CheckFailed(Check(name, "warning", found, "JSON", self.upgrade)) from None
