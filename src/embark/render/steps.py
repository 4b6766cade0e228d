"""Commands as values: a script and a launch are made of the same ones.

A word is a plain text, or `Shell` text that names variables; a script sets them itself, a launch substitutes them.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embark.render.shell_text import Shell, command, run

Words = tuple[str, ...]
_VARIABLE = re.compile(r"\$(?:\{([^}]+)\}|(\w+))")


@dataclass(frozen=True, slots=True)
class Step:
    """Something that is created once: the commands, and the one that succeeds if it already exists."""

    what: str
    """What is created, for a person; empty where nothing new comes of it."""
    commands: tuple[Words, ...]
    unless: Words = ()
    remove: tuple[Words, ...] = ()
    """In this order. One that finds nothing does not stop the next."""
    wait_s: int = 0
    """Until the new object is visible everywhere."""
    why: str = ""


def step_text(step: Step, indent: int = 0) -> Shell:
    """For a script; the first line is not indented."""
    pad = "\n" + " " * indent
    lines = [f"# {step.why}"] if step.why else []
    if step.unless:
        lines.append(f"if ! {command(*step.unless, indent=indent)} >/dev/null 2>&1; then")
    inner = 2 if step.unless else 0
    lines += [" " * inner + run(*words, indent=indent + inner) for words in step.commands]
    if step.wait_s:
        lines += [" " * inner + "# It is visible everywhere only after some seconds.",
                  " " * inner + run("sleep", str(step.wait_s))]
    return Shell(pad.join([*lines, *(["fi"] if step.unless else [])]))


def substitute(words: Sequence[str], values: Mapping[str, str | Sequence[str]]) -> list[str]:
    """The words as a shell would pass them, with these variables; `"${NAME[@]}"` is all of a list."""
    passed: list[str] = []
    for word in words:
        if not isinstance(word, Shell):
            passed.append(word)
            continue
        assert "$(" not in word, f"{word}: the output of a command is not known here"
        (bare,) = shlex.split(word)
        array = re.fullmatch(r"\$\{(\w+)\[@\]\}", bare)
        if array:
            passed += [str(one) for one in values[array[1]]]
        else:
            passed.append(_VARIABLE.sub(lambda match: str(values[match[1] or match[2]]), bare))
    return passed
