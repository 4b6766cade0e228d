"""Writes docs/reference/commands.md: every command of `embark` with its arguments and options.

`make docs` runs it. Everything comes from the command line itself, so the page and `--help` cannot differ.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from cyclopts import App, Argument

from embark.cli.app import COMMANDS, app

HEAD = """# Commands

{num_commands} commands, in the groups of `embark --help`. `embark COMMAND --help` shows the same in the terminal.
`--json` prints JSON for programs and `--quiet` only results, warnings and errors.

Exit codes: 0 done, 64 bad input or budget spent (never retry), 70 a fault worth a retry, 75 preempted and saved,
130 Ctrl-C, 1 anything else.
"""


def command_app(name: str) -> App:
    """Return the application of a command such as `train` or `data prepare`."""
    found = app
    for word in name.split():
        found = found[word]
    return found


def usage(name: str, arguments: list[Argument]) -> str:
    """Return the line a user types, with optional arguments in brackets."""
    positional = [argument for argument in arguments if not argument.name.startswith("-")]
    words = [argument.name if argument.required else f"[{argument.name}]" for argument in positional]
    return " ".join(["embark", name, *words])


def shown_arguments(name: str) -> list[Argument]:
    collection = command_app(name).assemble_argument_collection(parse_docstring=True)
    return [argument for argument in collection if argument.show and argument.name not in ("--json", "--quiet")]


def one_line(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip().replace("|", "\\|")


def section(name: str, summary: str) -> Iterator[str]:
    """Yield the lines of one command: its usage, its description and a table of its arguments."""
    arguments = shown_arguments(name)
    yield f"\n### `{usage(name, arguments)}`\n"
    function = command_app(name).default_command
    paragraphs = [one_line(part) for part in re.split(r"\n\s*\n", (function and function.__doc__) or summary)]
    yield "\n\n".join(part for part in paragraphs if part and not part.startswith((":param", "Args:", "Parameters")))
    if arguments:
        yield "\n| | |\n|---|---|"
        for argument in arguments:
            names = ", ".join(f"`{part}`" for part in argument.names if not part.startswith("--no-"))
            yield f"| {names or f'`{argument.name}`'} | {one_line(argument.parameter.help)} |"


def page() -> str:
    lines = [HEAD.format(num_commands=sum(map(len, COMMANDS.values())))]
    for group, commands in COMMANDS.items():
        lines.append(f"\n## {group}")
        for name, summary in commands.items():
            lines.extend(section(name, summary))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
