"""`az`: its argument list, the command that answers, and its output."""

import json
from collections.abc import Callable
from typing import Any

from embark.rehearse.account.account import AnsweredBy, Call
from embark.rehearse.account.azure import (
    aks,
    file_systems,
    identities,
    machines,
    monitoring,
    networks,
    storage,
    subscriptions,
)
from embark.rehearse.account.azure.arm import Subscription
from embark.rehearse.account.grammar import ParsedCommand, load_grammar
from embark.rehearse.account.state import Refused

Answer = Callable[[Subscription, ParsedCommand, Call], Any]
ANSWERS: dict[str, Answer] = {name: answer for module in (
    subscriptions, networks, identities, storage, file_systems, aks, machines, monitoring,
) for name, answer in module.ANSWERS.items()}


class Az:
    """The stand-in."""

    name = "az"
    answered_by: AnsweredBy = "stand-in"

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.grammar = load_grammar("az")

    def run(self, call: Call) -> str:
        if call.words in (("--version",), ("version",)):
            return f"azure-cli {self.grammar.version}\n"
        command = self.grammar.parse(call.words)
        if command.path[0] == "amlfs" and "amlfs" not in self.subscription.extensions:
            raise Refused("'amlfs' is misspelled or not recognized by the system. The command is in the extension "
                          "amlfs: az extension add --name amlfs", 2)
        answer = ANSWERS.get(command.name)
        if answer is None or command["--ids"]:
            what = f"az {command.name}{' --ids' if command['--ids'] else ''}"
            raise Refused(f"{what}: the stand-in of this account does not know this command", 70)
        self.subscription.purge()
        return _output(answer(self.subscription, command, call), command)


def _output(found: Any, command: ParsedCommand) -> str:
    import jmespath  # type: ignore[import-untyped]
    from jmespath.exceptions import JMESPathError  # type: ignore[import-untyped]

    query, form = command["--query"], command.text("--output", "json").lower()
    if query:
        try:
            found = jmespath.search(query, found)
        except JMESPathError as error:
            raise Refused(f"argument --query: invalid jmespath_type value: '{query}': {error}", 2) from error
    if found is None or form == "none":
        return ""
    if form == "tsv":
        return "".join(f"{_row(one)}\n" for one in (found if isinstance(found, list) else [found]))
    return json.dumps(found, indent=2) + "\n"


def _row(value: Any) -> str:
    if isinstance(value, dict | list):
        values = [one for _, one in sorted(value.items())] if isinstance(value, dict) else value
        return "\t".join("" if isinstance(one, dict) else str(len(one)) if isinstance(one, list) else str(one)
                         for one in values)
    return str(value).lower() if isinstance(value, bool) else str(value)
