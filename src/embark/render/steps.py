"""Commands as values: what a script writes down and what a launch runs come from the same ones.

A word is a plain text, or `Shell` text that names variables; a script sets them itself, a launch fills them in.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embark.render.shell_text import Shell, command, run, unless

Words = tuple[str, ...]
_VARIABLE = re.compile(r"\$(?:\{([^}]+)\}|(\w+))")


@dataclass(frozen=True, slots=True)
class Step:
    """Something that is made once: the commands, and the one that succeeds where it is there already."""

    what: str
    """What is made, for a person; empty where nothing new comes of it."""
    commands: tuple[Words, ...]
    unless: Words = ()
    remove: tuple[Words, ...] = ()
    """In this order. One that finds nothing does not stop the next."""
    wait_s: int = 0
    """Until what was made is seen everywhere."""
    why: str = ""


def step_text(step: Step) -> str:
    """For a script."""
    lines = [run(*words) for words in step.commands]
    if step.wait_s:
        lines += ["# It is seen everywhere only after some seconds.", run("sleep", str(step.wait_s))]
    text = unless(command(*step.unless), *lines) if step.unless else "\n".join(lines)
    return f"# {step.why}\n{text}" if step.why else text


def filled(words: Sequence[str], values: Mapping[str, str | Sequence[str]]) -> list[str]:
    """The words as a shell would hand them on, with these variables; `"${NAME[@]}"` is all of a list."""
    found: list[str] = []
    for word in words:
        if not isinstance(word, Shell):
            found.append(word)
            continue
        assert "$(" not in word, f"{word}: what a command prints is not known here"
        (bare,) = shlex.split(word)
        whole = re.fullmatch(r"\$\{(\w+)\[@\]\}", bare)
        if whole:
            found += [str(one) for one in values[whole[1]]]
        else:
            found.append(_VARIABLE.sub(lambda match: str(values[match[1] or match[2]]), bare))
    return found
