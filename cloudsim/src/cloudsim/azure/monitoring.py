"""`az monitor` and `az deployment`: metrics workspaces, mails, alerts and templates."""

import json
import re
from typing import Any

from cloudsim.azure.arm import Subscription, names_of
from cloudsim.grammar import ParsedCommand
from cloudsim.state import Refusal

WORKSPACE = "Microsoft.Monitor/accounts"
ACTIONS = "Microsoft.Insights/actionGroups"
ALERT = "Microsoft.Insights/metricAlerts"


def create_workspace(azure: Subscription, command: ParsedCommand) -> Any:
    group, name = names_of(command)
    azure.group(group)
    return azure.view(azure.find(WORKSPACE, group, name) or azure.create(
        command, WORKSPACE, group, name, location=azure.location(command, group)))


def create_actions(azure: Subscription, command: ParsedCommand) -> Any:
    group, name = names_of(command)
    azure.group(group)
    if len(command.text("--short-name", name[:12])) > 12:
        raise Refusal("(GroupShortNameTooLong) The short name of an action group has at most 12 characters.")
    words = command["--action"] or []
    if words and (words[0] not in ("email", "webhook", "sms", "azureapppush") or len(words) < 3):
        raise Refusal(f"usage error: --action TYPE NAME VALUE, such as email owner you@example.com: {' '.join(words)}",
                      2)
    if words and words[0] == "email" and "@" not in words[2]:
        raise Refusal(f"(InvalidEmailAddress) {words[2]!r} is no e-mail address.")
    found = azure.find(ACTIONS, group, name)
    return azure.view(found or azure.create(command, ACTIONS, group, name, location="global"))


def create_alert(azure: Subscription, command: ParsedCommand) -> Any:
    group, name = names_of(command)
    azure.group(group)
    for scope in command["--scopes"] or []:
        if azure.by_id(scope) is None:
            raise Refusal(f"(ResourceNotFound) The scope {scope!r} of the alert does not exist.", 3)
    words = command["--action"] or []
    if words:
        azure.need_id(words[0], ACTIONS)
    for condition in command["--condition"] or []:
        if not re.search(r"(avg|min|max|total|count)\s+.+\s+(<|>|<=|>=|=|!=)\s+[\d.]+", condition):
            raise Refusal(f"usage error: --condition {{avg,min,max,total,count}} METRIC {{=,!=,>,>=,<,<=}} THRESHOLD: "
                          f"{condition}", 2)
    return azure.view(azure.find(ALERT, group, name) or azure.create(command, ALERT, group, name, location="global"))


def deploy(azure: Subscription, command: ParsedCommand) -> Any:
    """Deploy a template; all of its parameters must be given, and ids among them must exist."""
    group, name = command.text("--resource-group"), command.text("--name", "deployment")
    azure.group(group)
    try:
        template = json.loads(command.call.read(command.text("--template-file")))
    except ValueError as error:
        raise Refusal(f"Failed to parse '{command.text('--template-file')}': {error}") from error
    given = dict(word.partition("=")[::2] for word in command["--parameters"] or [])
    declared = template.get("parameters", {})
    missing = [one for one, row in declared.items() if one not in given and "defaultValue" not in row]
    if missing:
        raise Refusal(f"Missing input parameters: {', '.join(missing)}")
    unknown = [one for one in given if one not in declared]
    if unknown:
        raise Refusal(f"unrecognized template parameter '{unknown[0]}'. Allowed parameters: {', '.join(declared)}")
    for one, value in given.items():
        if declared[one]["type"] == "int" and not value.lstrip("-").isdigit():
            raise Refusal(f"(InvalidTemplate) Deployment template validation failed: the parameter '{one}' expects an "
                          f"integer, and is '{value}'.")
        if not value or (value.startswith("/subscriptions/") and azure.by_id(value) is None):
            raise Refusal(f"(InvalidTemplateDeployment) The parameter '{one}' is {value!r}, which does not exist.")
    for row in template.get("resources", []):
        kind = str(row["type"])
        own = re.sub(r"\[parameters\('(\w+)'\)\]", lambda match: given.get(match[1], ""), str(row["name"]))
        if azure.find(kind, group, own) is None:
            azure.create(command, kind, group, own, location=given.get("location", "global"))
    return {"name": name, "properties": {"provisioningState": "Succeeded"}, "resourceGroup": group}


def list_activity(azure: Subscription, command: ParsedCommand) -> Any:
    if command["--resource-group"]:
        azure.group(command.text("--resource-group"))
    return []
