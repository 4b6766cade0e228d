"""Shell text. A plain `str` is a value and is quoted; `Shell` is this program's own text and is inserted unchanged.

Scripts are Jinja templates that shellcheck can read: `@@value@@` is quoted for the shell unless it is `Shell`, and a
line that begins with `#%` is a statement.
"""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embark.render.yaml_text import header

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parent / "templates"
MAX_WIDTH = 110


class Shell(str):
    """Text that the shell reads unchanged, such as `"$ZONE"`. Never made of a value from outside."""

    __slots__ = ()


def render_template(name: str, **values: Any) -> str:
    """A file of `templates/`, with these values."""
    return _environment().get_template(name).render(values)


def script(about: str, *parts: str) -> str:
    """A bash script that stops at its first error."""
    body = "\n\n".join(part.strip("\n") for part in parts if part.strip())
    return f"#!/usr/bin/env bash\n{script_header(about)}\n{body}\n"


def script_header(about: str) -> Shell:
    return Shell(f"{header(about)}set -euo pipefail\n")


def command(*words: str, indent: int = 0) -> Shell:
    """One command, broken before its options where it is long; `indent` is of its first line."""
    quoted = [quote(word) for word in words]
    line = " ".join(quoted)
    if indent + len(line) <= MAX_WIDTH:
        return Shell(line)
    lines, now = [], ""
    for index, word in enumerate(quoted):
        if word.lstrip("\"'").startswith("-") and index > 0 and now:
            lines.append(now.rstrip())
            now = " " * (indent + 2)
        now += word + " "
    return Shell(" \\\n".join([*lines, now.rstrip()]))


def run(*words: str, indent: int = 0) -> Shell:
    """A command that changes something: printed, and skipped in a dry run."""
    return command(Shell("run"), *words, indent=indent)


def variable(name: str) -> Shell:
    return Shell(f'"${name}"')


def option(name: str, value: str) -> Shell:
    """`--name=value`, the value quoted unless it is `Shell`."""
    return Shell(f"{name}={quote(value)}")


def quote(word: Any) -> str:
    return str(word) if isinstance(word, Shell) else shlex.quote(str(word))


def comment_text(text: str) -> Shell:
    """For a line that is a comment already: no character of `text` ends it."""
    return Shell(" ".join("".join(c if c.isprintable() else " " for c in text).split()))


def needed_setting(name: str, default: str, what: str) -> Shell:
    """A variable with a default; without one the caller's environment must set it. `what` is this program's text."""
    return Shell(f"{name}=${{{name}:-{quote(default)}}}" if default else f": \"${{{name}:?{what}}}\"")


def _file_header(about: str) -> Shell:
    return Shell(header(about))


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, finalize=quote,
        variable_start_string="@@", variable_end_string="@@", line_statement_prefix="#%",
        block_start_string="<%", block_end_string="%>", comment_start_string="<%#", comment_end_string="#%>",
        keep_trailing_newline=True, autoescape=False)
    environment.globals.update(header=script_header, file_header=_file_header, comment=comment_text, command=command,
                               run=run, shell=Shell)
    return environment
