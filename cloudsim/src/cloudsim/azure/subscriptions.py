"""`az account`, `group`, `provider`, `feature`, `extension`, `deployment`, quotas and machine types of a region."""

from typing import Any

from cloudsim.azure.aks import CLUSTER, forget_cluster
from cloudsim.azure.arm import GROUP, SUBSCRIPTION, Subscription, identifier
from cloudsim.azure.facts import FACTS, families, machine_type
from cloudsim.grammar import ParsedCommand
from cloudsim.state import Refusal
from embark.catalog import load_catalog

FEATURE_S = 300.0
ACCOUNT = {"id": SUBSCRIPTION, "name": "Embark rehearsal", "isDefault": True, "state": "Enabled",
           "tenantId": identifier("tenant"), "environmentName": "AzureCloud",
           "user": {"name": "owner@example.com", "type": "user"}}


def show_account(azure: Subscription, command: ParsedCommand) -> Any:
    if azure.is_service_principal:
        return {**ACCOUNT, "user": {"name": identifier("app"), "type": "servicePrincipal"}}
    return ACCOUNT


def show_token(azure: Subscription, command: ParsedCommand) -> Any:
    return {"accessToken": "token", "expiresOn": "2026-11-18 12:00:00.000000", "tokenType": "Bearer"}


def list_accounts(azure: Subscription, command: ParsedCommand) -> Any:
    return [ACCOUNT]


def set_account(azure: Subscription, command: ParsedCommand) -> Any:
    if command.text("--subscription") not in (ACCOUNT["id"], ACCOUNT["name"]):
        raise Refusal(f"The subscription of '{command.text('--subscription')}' doesn't exist in cloud 'AzureCloud'.")


def show_user(azure: Subscription, command: ParsedCommand) -> Any:
    if azure.is_service_principal:
        raise Refusal("/me request is only valid with delegated authentication flow.")
    return {"id": azure.user, "userPrincipalName": "owner@example.com", "displayName": "Owner"}


def show_principal(azure: Subscription, command: ParsedCommand) -> Any:
    if command.text("--id") != identifier("app"):
        raise Refusal(f"Resource '{command.text('--id')}' does not exist or one of its queried reference-property "
                      "objects are not present.", 3)
    return {"id": azure.user, "appId": identifier("app")}


def create_group(azure: Subscription, command: ParsedCommand) -> Any:
    name, location = command.text("--name"), azure.location(command)
    found = azure.resources.find(GROUP, name)
    if found is not None and found.location != location:
        raise Refusal(f"(InvalidResourceGroupLocation) Invalid resource group location '{location}'. The Resource "
                      f"group already exists in location '{found.location}'.")
    return azure.view(found or azure.create(command, GROUP, name, location=location, takes_s=2.0, managedBy=None))


def show_group(azure: Subscription, command: ParsedCommand) -> Any:
    return azure.view(azure.group(command.text("--name")))


def has_group(azure: Subscription, command: ParsedCommand) -> Any:
    return azure.resources.find(GROUP, command.text("--name")) is not None


def list_groups(azure: Subscription, command: ParsedCommand) -> Any:
    return [azure.view(one) for one in azure.resources.of_kind(GROUP)]


def delete_group(azure: Subscription, command: ParsedCommand) -> Any:
    group = azure.group(command.text("--name"))
    if not command["--yes"]:
        raise Refusal("Unable to prompt for confirmation as no tty available. Use --yes.")
    if group.attributes["body"].get("managedBy"):
        raise Refusal(f"(DenyAssignmentAuthorizationFailed) {group.name} is managed by "
                      f"{group.attributes['body']['managedBy']}: delete that instead.")
    clusters = [one for one in azure.below(group) if one.kind == CLUSTER]
    # Resource Manager repeats a deletion until no resource of the group, and of the groups that its clusters
    # manage, is in use.
    for cluster in clusters:
        managed = azure.group(cluster.attributes["body"]["nodeResourceGroup"])
        for one in (*azure.below(group), *azure.below(managed)):
            one.uses = set()
        azure.delete(command, managed, takes_s=300.0)
        forget_cluster(azure, cluster)
    for one in azure.below(group):
        one.uses = {key for key in one.uses if not key[1].startswith(f"{group.name}/")}
    azure.delete(command, group, takes_s=120.0)


def register_provider(azure: Subscription, command: ParsedCommand) -> Any:
    space = command.text("--namespace")
    if not space.startswith("Microsoft."):
        raise Refusal(f"(InvalidResourceNamespace) The resource namespace '{space}' is invalid.", 3)
    azure.providers.add(space)
    if command["--wait"]:
        azure.clock.advance(60.0)


def show_provider(azure: Subscription, command: ParsedCommand) -> Any:
    space = command.text("--namespace")
    return {"namespace": space, "registrationState": "Registered" if space in azure.providers else "NotRegistered"}


def register_feature(azure: Subscription, command: ParsedCommand) -> Any:
    azure.features.setdefault(f"{command.text('--namespace')}/{command.text('--name')}", azure.clock.now + FEATURE_S)
    return show_feature(azure, command)


def show_feature(azure: Subscription, command: ParsedCommand) -> Any:
    name = f"{command.text('--namespace')}/{command.text('--name')}"
    at = azure.features.get(name)
    state = "NotRegistered" if at is None else "Registered" if at <= azure.clock.now else "Registering"
    return {"name": name, "properties": {"state": state}, "type": "Microsoft.Features/providers/features"}


def add_extension(azure: Subscription, command: ParsedCommand) -> Any:
    azure.extensions.add(command.text("--name"))


def list_usage(azure: Subscription, command: ParsedCommand) -> Any:
    used = azure.used(azure.location(command))
    titles = {"cores": "Total Regional vCPUs", "lowPriorityCores": "Total Regional Spot vCPUs", **families()}
    return [{"name": {"value": code, "localizedValue": title}, "localName": title, "currentValue": used.get(code, 0),
             "limit": azure.quotas.get(code, 0), "unit": "None"} for code, title in titles.items()]


def list_skus(azure: Subscription, command: ParsedCommand) -> Any:
    location, wanted = azure.location(command), command.text("--size").lower()
    names = [*(one.name for one in load_catalog().machines.values() if one.cloud == "azure"),
             *FACTS["sizes"]["machines"]]
    rows = []
    for kind in filter(None, map(machine_type, names)):
        if wanted in kind.name.lower() and (kind.regions is None or location in kind.regions):
            rows.append({"name": kind.name, "family": kind.family, "locations": [location], "restrictions": [],
                         "resourceType": "virtualMachines",
                         "locationInfo": [{"location": location, "zones": FACTS["regions"]["zones"][location]}]})
    return rows
