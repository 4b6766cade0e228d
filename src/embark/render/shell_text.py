"""Shell text. A plain `str` is a value and goes in quoted; `Shell` is this program's own text and goes in as it is."""

from __future__ import annotations

import shlex

from embark.render.yaml_text import header

MAX_WIDTH = 110

PRELUDE = """\
DRY_RUN=${DRY_RUN:-0}

# Says a command, and runs it unless DRY_RUN is 1.
run() {
  printf '+' >&2
  printf ' %q' "$@" >&2
  printf '\\n' >&2
  if [ "$DRY_RUN" = 1 ]; then return 0; fi
  "$@"
}"""


class Shell(str):
    """Text that the shell is to read as it stands, such as `"$ZONE"`. Never made of a value from outside."""

    __slots__ = ()


def script(about: str, *parts: str) -> str:
    """A whole bash script that stops at its first error."""
    head = f"#!/usr/bin/env bash\n{header(about)}set -euo pipefail"
    return "\n\n".join([head, *(part.strip("\n") for part in parts if part.strip())]) + "\n"


def command(*words: str, indent: str = "") -> str:
    """One command, broken before its options where it is long."""
    quoted = [quote(word) for word in words]
    line = indent + " ".join(quoted)
    if len(line) <= MAX_WIDTH:
        return line
    lines, now = [], indent
    for index, word in enumerate(quoted):
        starts_option = word.lstrip("\"'").startswith("-") and index > 0
        if starts_option and now.strip():
            lines.append(now.rstrip())
            now = f"{indent}  "
        now += word + " "
    return " \\\n".join([*lines, now.rstrip()])


def output_of(*words: str) -> Shell:
    """What a command prints, as one word."""
    return Shell(f'"$({" ".join(quote(word) for word in words)})"')


def run(*words: str, indent: str = "") -> str:
    """A command that changes something: said, and left out of a dry run."""
    return command(Shell("run"), *words, indent=indent)


def unless(test: str, *body: str) -> str:
    """`body`, where the command `test` fails: what is there already is left as it is."""
    inner = "\n".join(_indented(part) for part in body)
    return f"if ! {test} >/dev/null 2>&1; then\n{inner}\nfi"


def function(name: str, what: str, *body: str) -> str:
    inner = "\n".join(_indented(part) for part in body)
    return "\n".join([*_comment_lines(what), f"{name}() {{", inner, "}"])


def verbs(*names: str, usage: str) -> str:
    """The script's last lines: its first word names the function to run, with the rest."""
    choices = "|".join(names)
    return f"""\
case ${{1:-}} in
  {choices}) "$@" ;;
  *)
    printf 'usage: %s {usage}\\n' "$0" >&2
    exit 64
    ;;
esac"""


def setting(name: str, default: str, why: str = "") -> str:
    """A variable that the caller's environment may set."""
    return "\n".join([*_comment_lines(why), f"{name}=${{{name}:-{quote(default)}}}"])


def needed(name: str, what: str) -> str:
    """A variable that the caller's environment must set. `what` is this program's own text."""
    return f": \"${{{name}:?{what}}}\""


def variable(name: str) -> Shell:
    return Shell(f'"${name}"')


def option(name: str, value: str) -> Shell:
    """`--name=value`, the value quoted where it is no `Shell`."""
    return Shell(f"{name}={quote(value)}")


def quote(word: str) -> str:
    return str(word) if isinstance(word, Shell) else shlex.quote(word)


def comment(text: str) -> str:
    return "\n".join(_comment_lines(text))


def _comment_lines(text: str) -> list[str]:
    """Every line break that a reader of the script might take for one makes a new comment line."""
    return [f"# {line}".rstrip() for line in text.splitlines()]


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else line for line in text.splitlines())
