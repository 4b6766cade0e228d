"""`az`: parses its arguments, calls the function that answers, and formats the output."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jmespath  # type: ignore[import-untyped]
import yaml
from jmespath.exceptions import JMESPathError  # type: ignore[import-untyped]

from cloudsim.account import AnsweredBy, Call
from cloudsim.azure.arm import Subscription
from cloudsim.grammar import ParsedCommand, load_grammar, load_handlers
from cloudsim.state import Refusal

ANSWERS = load_handlers("azure", "arm")
PARENT_FLAGS = {"virtualNetworks": "--vnet-name", "netAppAccounts": "--account-name", "capacityPools": "--pool-name"}
TABLES = {"vm list": ("name", "resourceGroup", "powerState", "publicIps", "location", "zones")}
"""Commands whose tables have columns of their own: azure-cli, vm/_format.py."""


class Az:
    """The stand-in for az."""

    name = "az"
    answered_by: AnsweredBy = "stand-in"

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.grammar = load_grammar("az")

    def run(self, call: Call) -> str:
        if call.words in (("--version",), ("version",)):
            return f"azure-cli {self.grammar.version}\n"
        command = replace(self.grammar.parse(call.words), call=call)
        first = command.path[0]
        if first in ("amlfs", "ml") and first not in self.subscription.extensions:
            raise Refusal(f"'{first}' is misspelled or not recognized by the system. The command is in the extension "
                          f"{first}: az extension add --name {first}", 2)
        answer = ANSWERS.get(command.name)
        has_name = "--name" in self.grammar.commands[command.path].flags
        if answer is None or (command["--ids"] and not has_name):
            what = f"az {command.name}{' --ids' if command['--ids'] else ''}"
            raise Refusal(f"{what} is not modelled by the simulated account", 70)
        self.subscription.purge()
        if not command["--ids"]:
            return _output(answer(self.subscription, command), command)
        found = [answer(self.subscription, self._by_id(command, id)) for id in command["--ids"]]
        found = [one for one in found if one is not None]
        return _output(found if len(found) > 1 else next(iter(found), None), command)

    def _by_id(self, command: ParsedCommand, id: str) -> ParsedCommand:
        """Split an id of --ids into the flags that it stands for, as az does."""
        _, *words = id.rstrip("/").split("/")
        is_id = [word.lower() for word in words[:6:2]] == ["subscriptions", "resourcegroups", "providers"]
        if not is_id or len(words) < 8 or len(words) % 2:
            raise Refusal(f"invalid resource ID: {id}", 1)
        known = self.subscription.by_id(id)
        group, *names = known.name.split("/") if known else [words[3], *words[7::2]]
        parents = {PARENT_FLAGS[kind]: name for kind, name in zip(words[6:-2:2], names, strict=False)}
        return replace(command, flags={**command.flags, **parents, "--resource-group": group, "--name": names[-1]})


def _output(found: Any, command: ParsedCommand) -> str:
    query, form = command["--query"], command.text("--output", "json").lower()
    if query:
        try:
            found = jmespath.search(query, found)
        except JMESPathError as error:
            raise Refusal(f"argument --query: invalid jmespath_type value: '{query}': {error}", 2) from error
    if found is None or form == "none":
        return ""
    if form == "tsv":
        return "".join(f"{_row(one)}\n" for one in (found if isinstance(found, list) else [found]))
    if form == "table":
        return _table(found if isinstance(found, list) else [found], None if query else TABLES.get(command.name))
    if form.startswith("yaml"):
        return str(yaml.safe_dump(found, sort_keys=False))
    return json.dumps(found, indent=2) + "\n"


def _table(rows: list[Any], columns: Sequence[str] | None) -> str:
    """Format rows as knack does: the fields that are neither lists nor objects, under their names."""
    shown = []
    for row in rows:
        fields = row if isinstance(row, dict) else {"Result": row}
        names = [name for name in columns or fields if name not in ("id", "type", "etag")]
        shown.append({name[:1].upper() + name[1:]: str(fields[name]) for name in names
                      if fields.get(name) is not None and not isinstance(fields[name], list | dict)})
    headings = list(dict.fromkeys(name for row in shown for name in row))
    widths = [max(len(name), *(len(row.get(name, "")) for row in shown)) for name in headings]
    lines = [dict(zip(headings, headings, strict=True)),
             {name: "-" * width for name, width in zip(headings, widths, strict=True)}, *shown]
    return "".join("  ".join(line.get(name, "").ljust(width) for name, width in zip(headings, widths, strict=True))
                   .rstrip() + "\n" for line in lines if headings)


def _row(value: Any) -> str:
    if isinstance(value, dict | list):
        values = [one for _, one in sorted(value.items())] if isinstance(value, dict) else value
        return "\t".join("" if isinstance(one, dict) else str(len(one)) if isinstance(one, list) else str(one)
                         for one in values)
    return str(value).lower() if isinstance(value, bool) else str(value)
