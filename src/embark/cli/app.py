"""Every command, registered by import path: `embark --help` imports none of them, and a command only its own module."""

import re
import shlex
from collections.abc import Sequence
from typing import Literal

from cyclopts import App, CycloptsError, Group, Parameter, UnknownCommandError, UnusedCliTokensError

from embark import __version__
from embark.errors import UserError, nearest
from embark.values import read_table

COMMANDS: dict[str, dict[str, str]] = read_table(__file__, "commands.toml")
"""Group → command → its line in `--help`; `--help` of the command itself shows its function's docstring."""
SUBCOMMANDS, MODULES, RENAMED = (COMMANDS.pop(name) for name in ("subcommands", "modules", "renamed"))
OPTIONS = Group("Options", sort_key=len(COMMANDS))


def _make_app() -> App:
    root = App(name="embark", version=__version__, help_format="plaintext", group_parameters=OPTIONS,
               suppress_keyboard_interrupt=False,  # it would end without a word
               default_parameter=Parameter(show_default=lambda value: str(value) if value else None),
               help="Train recommendation models on TorchRec, from a laptop to a GPU fleet, from one spec.")
    for number, (title, commands) in enumerate(COMMANDS.items()):
        group = Group(title, sort_key=number)
        for position, (name, summary) in enumerate(commands.items()):
            parent, _, command = name.rpartition(" ")
            path = f"embark.cli.{parent or MODULES.get(command, command)}:{'list_' if command == 'list' else command}"
            if parent and parent not in root:
                root.command(App(name=parent, help=SUBCOMMANDS[parent], help_format="plaintext", group=group,
                                 sort_key=position))
            (root[parent] if parent else root).command(
                path, name=command, help=summary, sort_key=position, group=None if parent else group)
    root["--help"].group = root["--version"].group = OPTIONS
    root.command("embark.cli.app:install_completion", name="--install-completion", group=OPTIONS,
                 help="Install completion for your shell.")
    return root


def install_completion(*, shell: Literal["bash", "zsh", "fish"] | None = None) -> None:
    """Install completion of commands and options for your shell, which is detected unless --shell names it."""
    from cyclopts.completion.detect import ShellDetectionError

    from .console import Console

    try:
        path = app.install_completion(shell=shell)
    except ShellDetectionError as error:
        raise UserError(str(error), "embark --install-completion --shell bash") from error
    Console().result(f"wrote {path}; it works in the next shell that you start")


def explain(error: CycloptsError) -> UserError:
    """Say what is wrong with a command line, and whose `--help` says what is right."""
    fix = " ".join(["embark", *(error.command_chain or ()), "--help"])
    if isinstance(error, UnknownCommandError) and error.unused_tokens and error.app:
        word = error.unused_tokens[0]
        if replacement := RENAMED.get(" ".join([*(error.command_chain or ()), word])):
            return UserError(f"{word}: no such command any more", replacement)
        if not word.startswith("-"):
            return UserError(f"{word}: no such command", nearest(word, [n for n in error.app if n[0] != "-"]))
        return UserError(f"{word}: no such option", fix)
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return UserError(f"unexpected argument {error.unused_tokens[0]!r}", fix)
    return UserError(str(error), fix)


def name_spec(fix: str, words: Sequence[str]) -> str:
    """Put the spec of the command line in place of `SPEC` in a fix, so that it can be pasted."""
    if "SPEC" not in fix:
        return fix
    from embark.spec import PRESETS

    _, bound, _ = app.parse_args(list(words), exit_on_error=False, print_error=False)
    spec = bound.arguments.get("spec", "")
    if spec in PRESETS or str(spec).endswith(".toml"):
        return re.sub(r"\bSPEC\b", lambda _: shlex.quote(spec), fix)
    return fix


def name_clone(fix: str) -> str:
    """Turn a fix that installs an extra into a command for the clone that Embark was installed from: no index has
    it."""
    if "embark-rec[" not in fix:
        return fix
    import json
    from importlib.metadata import distributions
    from urllib.parse import unquote, urlsplit

    found = next(iter(distributions(name="embark-rec")), None)
    source = json.loads((found and found.read_text("direct_url.json")) or "{}")
    if "dir_info" not in source:
        return fix
    if source["dir_info"].get("editable"):
        fix = fix.replace("pip install ", "pip install -e ")
    clone = unquote(urlsplit(source["url"]).path)
    return fix.replace("embark-rec[account]", f"{clone}/cloudsim").replace("embark-rec[", f"{clone}[")


app = _make_app()
