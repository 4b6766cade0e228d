"""`az storage` and `az acr`: storage accounts with their containers, and registries."""

import re
from typing import Any

from cloudsim.azure.arm import NOT_FOUND, Subscription, names_of
from cloudsim.azure.facts import FACTS
from cloudsim.grammar import ParsedCommand
from cloudsim.state import Refusal, Resource

ACCOUNT = "Microsoft.Storage/storageAccounts"
REGISTRY = "Microsoft.ContainerRegistry/registries"
HOST = ".azurecr.io"


def create_account(azure: Subscription, command: ParsedCommand) -> Any:
    group, name = names_of(command)
    azure.group(group)
    if not re.fullmatch(r"[a-z0-9]{3,24}", name):
        raise Refusal(f"(AccountNameInvalid) {name} is not a valid storage account name. Storage account name must be "
                      "between 3 and 24 characters in length and use numbers and lower-case letters only.")
    found = azure.global_name(ACCOUNT, name)
    if found is not None and not found.name.startswith(f"{group}/"):
        raise Refusal(f"(StorageAccountAlreadyTaken) The storage account named {name} is already taken.")
    made = found or azure.create(
        command, ACCOUNT, group, name, location=azure.location(command, group), takes_s=25.0, kind="StorageV2",
        allowSharedKeyAccess=command["--allow-shared-key-access"] is not False, containers=[],
        primaryEndpoints={"blob": f"https://{name}.blob.core.windows.net/"})
    (azure.account.folder / "blobs" / name).mkdir(parents=True, exist_ok=True)
    return azure.view(made)


def need_account(azure: Subscription, name: str) -> Resource:
    found = azure.global_name(ACCOUNT, name)
    if found is None:
        raise Refusal(f"(ResourceNotFound) The storage account '{name}' was not found in the subscription.\n"
                      f"The Resource 'Microsoft.Storage/storageAccounts/{name}' was not found.", NOT_FOUND)
    return azure.ready(found)


def show_account(azure: Subscription, command: ParsedCommand) -> Any:
    if command["--resource-group"]:
        return azure.view(azure.need(ACCOUNT, *names_of(command)))
    return azure.view(need_account(azure, command.text("--name")))


def delete_account(azure: Subscription, command: ParsedCommand) -> Any:
    azure.delete(command, need_account(azure, command.text("--name")))


def create_container(azure: Subscription, command: ParsedCommand) -> Any:
    account = need_account(azure, command.text("--storage-account"))
    group, name = command["--resource-group"], command.text("--name")
    if group:
        account = azure.need(ACCOUNT, group, command.text("--storage-account"))
    if not re.fullmatch(r"[a-z0-9](?!.*--)[a-z0-9-]{1,61}[a-z0-9]", name):
        raise Refusal(f"(ContainerOperationFailure) The specifed resource name {name} contains invalid characters.")
    containers = account.attributes["body"]["containers"]
    if name not in containers:
        containers.append(name)
        (azure.account.folder / "blobs" / account.name.rpartition("/")[2] / name).mkdir(parents=True, exist_ok=True)
    return {"id": f"{azure.id_of(account)}/blobServices/default/containers/{name}", "name": name}


def create_registry(azure: Subscription, command: ParsedCommand) -> Any:
    group, name = names_of(command)
    azure.group(group)
    if not re.fullmatch(r"[A-Za-z0-9]{5,50}", name):
        raise Refusal(f"The registry name '{name}' must be 5 to 50 letters and digits.")
    found = azure.global_name(REGISTRY, name)
    if found is not None and not found.name.startswith(f"{group}/"):
        raise Refusal(f"(AlreadyInUse) The registry DNS name {name}{HOST} is already in use.")
    made = found or azure.create(
        command, REGISTRY, group, name, location=azure.location(command, group), takes_s=20.0, is_paid=True,
        loginServer=f"{name.lower()}{HOST}", sku={"name": command.text("--sku")}, adminUserEnabled=False)
    return azure.view(made)


def need_registry(azure: Subscription, command: ParsedCommand) -> Resource:
    name = command.text("--name").removesuffix(HOST)
    found = azure.global_name(REGISTRY, name)
    if found is None or (command["--resource-group"] and not found.name.startswith(f"{command['--resource-group']}/")):
        raise Refusal(f"The resource with name '{name}' and type '{REGISTRY}' could not be found in subscription "
                      "'Embark rehearsal'.", NOT_FOUND)
    return azure.ready(found)


def show_registry(azure: Subscription, command: ParsedCommand) -> Any:
    return azure.view(need_registry(azure, command))


def delete_registry(azure: Subscription, command: ParsedCommand) -> Any:
    azure.delete(command, need_registry(azure, command))


def login(azure: Subscription, command: ParsedCommand) -> Any:
    registry = need_registry(azure, command)
    host = registry.attributes["body"]["loginServer"]
    if command["--expose-token"]:
        return {"loginServer": host, "accessToken": "token", "refreshToken": "token"}
    azure.account.images.logins.add(host)
    return None


class AzureRegistry:
    """The registries of a subscription as docker sees them."""

    def __init__(self, azure: Subscription) -> None:
        self.azure = azure

    def login_error(self, host: str, user: str, password: str) -> str:
        if not any(one.attributes["body"]["loginServer"] == host for one in self.azure.resources.of_kind(REGISTRY)):
            return f"Error response from daemon: Get \"https://{host}/v2/\": dial tcp: lookup {host}: no such host"
        return "" if password == "token" else (f"Error response from daemon: Get \"https://{host}/v2/\": unauthorized: "
                                               "authentication required")

    def push_error(self, image: str, logins: set[str]) -> str:
        host = image.partition("/")[0]
        if not any(one.attributes["body"]["loginServer"] == host for one in self.azure.resources.of_kind(REGISTRY)):
            return f"Get \"https://{host}/v2/\": dial tcp: lookup {host}: no such host"
        if host not in logins:
            return ("unauthorized: authentication required, visit https://aka.ms/acr/authorization for more "
                    "information.")
        return ""


def pull_error(azure: Subscription, image: str, principal: str) -> str:
    """Return why an identity cannot pull an image, or an empty text. Registries outside Azure are taken for public."""
    host = image.partition("/")[0]
    if not host.endswith(HOST):
        if "." in host and host.endswith((".example.com", ".example")):
            return f'failed to do request: Head "https://{host}/v2/": dial tcp: lookup {host}: no such host'
        return ""
    found = azure.global_name(REGISTRY, host.removesuffix(HOST))
    if found is None:
        return f'failed to do request: Head "https://{host}/v2/": dial tcp: lookup {host}: no such host'
    if not azure.may(principal, FACTS["roles"]["pull"], azure.id_of(found)):
        return (f"failed to authorize: failed to fetch anonymous token: unexpected status from GET request to "
                f"https://{host}/oauth2/token: 401 Unauthorized")
    if not azure.account.images.is_pushed(image):
        return f"{image}: not found"
    return ""
