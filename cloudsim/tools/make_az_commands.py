"""Writes az's commands and flags for the stand-in account, from azure-cli's own command table.

In an environment with azure-cli: python cloudsim/tools/make_az_commands.py
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "src/cloudsim/commands/az.toml"
GROUPS = (
    "account", "acr", "ad signed-in-user", "ad sp show", "aks", "consumption budget", "deployment group",
    "deployment sub", "extension", "feature", "group", "identity", "identity federated-credential", "monitor account",
    "monitor action-group", "monitor activity-log", "monitor autoscale", "monitor autoscale rule",
    "monitor metrics alert", "netappfiles account", "netappfiles pool",
    "netappfiles volume", "network nsg", "network nsg rule", "network public-ip", "network vnet",
    "network vnet subnet", "ppg", "provider", "role assignment", "role definition", "storage account",
    "storage account keys", "storage blob", "storage container", "storage container-rm", "vm", "vm availability-set",
    "vm identity", "vm run-command",
)
COMMANDS = (
    "aks nodepool add", "aks nodepool delete", "aks nodepool list", "aks nodepool scale", "aks nodepool show",
    "aks nodepool update", "aks nodepool upgrade", "login", "logout", "version", "vmss list",
)
GLOBAL = {"--debug": "bool", "--help": "bool", "--only-show-errors": "bool", "--verbose": "bool",
          "--output": "choice:json|jsonc|none|table|tsv|yaml|yamlc", "--query": "value", "--subscription": "value"}
AMLFS = {
    "create": (["--amlfs-name", "--resource-group"], {
        "--location": "value", "--sku": "value", "--storage-capacity": "value", "--zones": "list",
        "--filesystem-subnet": "value", "--maintenance-window": "value", "--hsm-settings": "value",
        "--mi-user-assigned": "list", "--encryption-setting": "value", "--root-squash-settings": "value",
        "--tags": "list", "--no-wait": "bool"}),
    "show": (["--amlfs-name", "--resource-group"], {}),
    "delete": (["--amlfs-name", "--resource-group"], {"--yes": "bool", "--no-wait": "bool"}),
    "list": ([], {}),
    "wait": (["--amlfs-name", "--resource-group"], {"--created": "bool", "--deleted": "bool", "--exists": "bool",
                                                    "--interval": "int", "--timeout": "int", "--custom": "value"}),
}
ML = {
    "online-deployment create": (["--file"], {"--all-traffic": "bool", "--endpoint-name": "value", "--file": "value",
                                              "--local": "bool", "--name": "value", "--no-wait": "bool"}),
    "online-deployment delete": (["--endpoint-name", "--name"], {"--endpoint-name": "value", "--name": "value",
                                                                 "--no-wait": "bool", "--yes": "bool"}),
    "online-deployment list": (["--endpoint-name"], {"--endpoint-name": "value"}),
    "online-deployment show": (["--endpoint-name", "--name"], {"--endpoint-name": "value", "--name": "value"}),
    "online-endpoint create": ([], {"--auth-mode": "value", "--file": "value", "--name": "value", "--no-wait": "bool",
                                    "--set": "list"}),
    "online-endpoint delete": (["--name"], {"--name": "value", "--no-wait": "bool", "--yes": "bool"}),
    "online-endpoint invoke": (["--name"], {"--deployment-name": "value", "--name": "value",
                                            "--request-file": "value"}),
    "online-endpoint show": (["--name"], {"--name": "value"}),
    "online-endpoint update": ([], {"--file": "value", "--name": "value", "--no-wait": "bool", "--set": "list",
                                    "--traffic": "value"}),
}
WORKSPACE = {"--resource-group": "value", **dict.fromkeys((
    "--application-insights", "--container-registry", "--description", "--display-name", "--file", "--key-vault",
    "--location", "--name"), "value"), "--no-wait": "bool", "--storage-account": "value", "--tags": "list"}
ML_SOURCE = "https://learn.microsoft.com/cli/azure/ml"
"""Extensions, which cannot be installed beside the generator: from their reference."""
AMLFS_SOURCE = "https://learn.microsoft.com/cli/azure/amlfs"


def main() -> None:
    from azure.cli.core import __version__, get_default_cli
    from azure.cli.core.file_util import create_invoker_and_load_cmds_and_args
    from knack.events import EVENT_INVOKER_POST_CMD_TBL_CREATE

    cli = get_default_cli()
    needed: dict[str, set[str]] = {}

    def collect(_: Any, commands_loader: Any) -> None:
        """Record what a command requires before azure-cli adds --ids, which may replace some of it."""
        for name, command in commands_loader.command_table.items():
            needed[name] = {key for key, one in command.arguments.items() if one.options.get("required")}

    cli._event_handlers[EVENT_INVOKER_POST_CMD_TBL_CREATE].insert(0, collect)
    create_invoker_and_load_cmds_and_args(cli)
    lines = [
        "# Written by cloudsim/tools/make_az_commands.py from azure-cli's command table.",
        "[program]", f'version = "{__version__}"',
        f'source = "azure-cli {__version__} of PyPI, by its own argument parsers; {AMLFS_SOURCE}, {ML_SOURCE}"',
        f'date = "{datetime.now(UTC):%Y-%m-%d}"',
        'unknown_flag = "unrecognized arguments: {flag} ({command})"',
        "unknown_command = \"'{words}' is misspelled or not recognized by the system.\"",
        'missing_flag = "the following arguments are required: {flag} ({command})"',
        "usage_code = 2", "ignores_case = true", "",
        "[flags]", *(f"{name} = {json.dumps(kind)}" for name, kind in GLOBAL.items()), "",
        "[aliases]", '"-o" = "--output"', '"-h" = "--help"', "",
    ]
    for name in sorted(parsers := _parsers(cli.invocation.parser)):
        if name.rpartition(" ")[0] in GROUPS or name in COMMANDS:
            lines += _lines(name, *_form(parsers[name], needed.get(name, set())))
    for name, (required, flags) in AMLFS.items():
        common = {"--amlfs-name": "value", "--resource-group": "value"}
        short = {"--name": "--amlfs-name", "-n": "--amlfs-name", "-g": "--resource-group", "-l": "--location",
                 "-y": "--yes"}
        lines += _lines(f"amlfs {name}", required, [], {**common, **flags}, short, AMLFS_SOURCE)
    for name, (required, flags) in ML.items():
        common = {"--resource-group": "value", "--workspace-name": "value"}
        short = {"-f": "--file", "-n": "--name", "-g": "--resource-group", "-w": "--workspace-name", "-y": "--yes"}
        lines += _lines(f"ml {name}", [*common, *required], [], {**common, **flags}, short, ML_SOURCE)
    lines += _lines("ml workspace create", ["--resource-group"], [], WORKSPACE, {
        "-f": "--file", "-n": "--name", "-g": "--resource-group", "-l": "--location"}, f"{ML_SOURCE}/workspace")
    TARGET.write_text("\n".join(lines))


def _parsers(parser: Any, words: Sequence[str] = ()) -> dict[str, argparse.ArgumentParser]:
    """Map the words of each command to its parser."""
    found: dict[str, argparse.ArgumentParser] = {}
    for one in parser._actions:
        if isinstance(one, argparse._SubParsersAction):
            for word, below in one.choices.items():
                found |= _parsers(below, (*words, word))
    return found or {" ".join(words): parser}


def _form(parser: argparse.ArgumentParser, needed: set[str]) -> tuple[
        list[str], list[str], dict[str, str], dict[str, str]]:
    """Return the required flags, the positional arguments, the flags with their kinds, and other names of flags."""
    required: list[str] = []
    positionals: list[str] = []
    flags: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for action in parser._actions:
        names = [str(one) for one in action.option_strings]
        if not names:
            if action.dest not in ("command", "_subcommand") and not action.dest.startswith("_"):
                positionals.append(action.dest.upper() + ("?" if action.nargs in ("?", "*") else ""))
            continue
        first = next((one for one in names if one.startswith("--")), names[0])
        if first == "--cmd" or first.startswith("--_"):  # the handler's own
            continue
        aliases |= {one: first for one in names if one != first and one not in ("-o", "-h")}
        if first in GLOBAL:
            continue
        flags[first] = _kind(action)
        if action.required:
            required.append(first)
        elif action.dest in needed:
            required.append(f"{first}|--ids")
    return required, positionals, flags, aliases


def _kind(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "bool"
    if action.nargs == "?":
        return "switch"
    if action.nargs in ("+", "*") or isinstance(action.nargs, int):
        return "list"
    if action.choices:
        return "choice:" + "|".join(_texts(action.choices))
    return "int" if action.type is int else "value"


def _texts(choices: Iterable[Any]) -> list[str]:
    return [str(getattr(one, "value", one)) for one in choices]


def _lines(name: str, required: list[str], positionals: list[str], flags: dict[str, str], aliases: dict[str, str],
           source: str = "") -> list[str]:
    lines = [f'[commands."{name}"]']
    if positionals:
        lines.append(f"positionals = {json.dumps(positionals)}")
    if required:
        lines.append(f"required = {json.dumps(required)}")
    if source:
        lines.append(f'source = "{source}"')
    return [*lines, f"flags = {_inline(flags)}", f"aliases = {_inline(aliases)}", ""]


def _inline(values: dict[str, str]) -> str:
    return f"{{ {', '.join(f'{json.dumps(key)} = {json.dumps(value)}' for key, value in values.items())} }}"


if __name__ == "__main__":
    main()
