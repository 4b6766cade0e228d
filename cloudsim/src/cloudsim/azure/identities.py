"""`az identity` and `az role`: managed identities, federated credentials and role assignments."""

from typing import Any

from cloudsim.azure.arm import VM, RoleAssignment, Subscription, identifier, names_of
from cloudsim.azure.facts import FACTS
from cloudsim.grammar import ParsedCommand
from cloudsim.state import Refusal

ENDPOINT = "Microsoft.MachineLearningServices/workspaces/onlineEndpoints"
IDENTITY = "Microsoft.ManagedIdentity/userAssignedIdentities"
CREDENTIAL = f"{IDENTITY}/federatedIdentityCredentials"
AUDIENCE = "api://AzureADTokenExchange"


def create_identity(azure: Subscription, command: ParsedCommand) -> Any:
    group, name = names_of(command)
    azure.group(group)
    found = azure.find(IDENTITY, group, name) or azure.create(
        command, IDENTITY, group, name, location=azure.location(command, group),
        principalId=identifier("principal", group, name), clientId=identifier("client", group, name))
    return azure.view(found)


def delete_identity(azure: Subscription, command: ParsedCommand) -> Any:
    azure.delete(command, azure.need(IDENTITY, *names_of(command)))


def create_credential(azure: Subscription, command: ParsedCommand) -> Any:
    group, owner, name = (command.text(f"--{one}") for one in ("resource-group", "identity-name", "name"))
    identity = azure.need(IDENTITY, group, owner)
    issuer, subject = command.text("--issuer"), command.text("--subject")
    if not issuer.startswith("https://"):
        raise Refusal(f"(BadRequest) Issuer '{issuer}' of the federated identity credential is not an https URL. Does "
                      "the cluster have an OIDC issuer?")
    if not subject:
        raise Refusal("(BadRequest) The subject of a federated identity credential cannot be empty.")
    for other in azure.below(identity):
        body = other.attributes["body"]
        if other.name.rpartition("/")[2] != name and (body["issuer"], body["subject"]) == (issuer, subject):
            raise Refusal("(BadRequest) There is already a federated identity credential with this issuer and subject")
    return azure.view(azure.create(command, CREDENTIAL, group, owner, name, location=identity.location, issuer=issuer,
                                   subject=subject, audiences=command["--audiences"] or [AUDIENCE]))


def create_assignment(azure: Subscription, command: ParsedCommand) -> Any:
    role, scope = command.text("--role"), command.text("--scope")
    principal = command.text("--assignee-object-id") or command.text("--assignee")
    if role not in FACTS["roles"]["names"]:
        raise Refusal(f"Role '{role}' doesn't exist.")
    if not scope.startswith("/subscriptions/"):
        raise Refusal("(MissingSubscription) The request did not have a subscription or a valid tenant level resource "
                      f"provider: the scope is '{scope}'.\nCode: MissingSubscription")
    check_scope(azure, scope)
    if command["--assignee-object-id"] is None and command["--assignee"] is None:
        raise Refusal("the following arguments are required: --assignee-object-id (az role assignment create)", 2)
    if not principal:
        raise Refusal("(InvalidPrincipalId) A valid principal ID must be provided for role assignment.")
    own = "ServicePrincipal" if azure.is_service_principal else "User"
    known = {azure.user: own, **dict.fromkeys(principals(azure), "ServicePrincipal")}
    if principal not in known:
        raise Refusal(f"(PrincipalNotFound) Principal {principal} does not exist in the directory "
                      f"{identifier('tenant')}.")
    kind = command["--assignee-principal-type"]
    if kind and kind.lower() != known[principal].lower():
        raise Refusal(f"(UnmatchedPrincipalType) The PrincipalId '{principal}' has type '{known[principal]}', which is "
                      f"different from specified PrincipalType '{kind}'.")
    made = RoleAssignment(role, principal, scope)
    if made not in azure.assignments:
        azure.assignments.append(made)
    return _view(made)


def principals(azure: Subscription) -> list[str]:
    """List the identities that exist: user-assigned ones and those of machines and clusters."""
    found = [one.attributes["body"]["principalId"] for one in azure.resources.of_kind(IDENTITY)]
    found += [(one.attributes["body"].get("identity") or {}).get("principalId") for one in azure.resources.of_kind(VM)]
    found += [one.attributes["body"]["identity"]["principal_id"] for one in azure.resources.of_kind(ENDPOINT)]
    for one in azure.resources.of_kind("Microsoft.ContainerService/managedClusters"):
        body = one.attributes["body"]
        found += [body["identityProfile"]["kubeletidentity"]["objectId"], body["identity"]["principalId"]]
    return [one for one in found if one]


def check_scope(azure: Subscription, scope: str) -> None:
    """Refuse a scope whose group, resource or container does not exist."""
    parts = scope.rstrip("/").split("/")
    if len(parts) == 3 or azure.by_id(scope) is not None:
        return
    if len(parts) >= 5:
        azure.group(parts[4])
    owner, _, child = scope.partition("/blobServices/default/containers/")
    account = azure.by_id(owner)
    if account is None or not child or child not in account.attributes["body"]["containers"]:
        name = scope.partition("/providers/")[2] or scope
        raise Refusal(f"(ResourceNotFound) The Resource '{name}' under resource group '{parts[4]}' was not found. For "
                      "more details please go to https://aka.ms/ARMResourceNotFoundFix", 3)


def list_assignments(azure: Subscription, command: ParsedCommand) -> Any:
    principal, scope, role = command["--assignee"], command["--scope"], command["--role"]
    return [_view(one) for one in azure.assignments
            if (not principal or one.principal == principal) and (not role or one.role == role)
            and (not scope or one.scope.lower() == scope.lower())]


def delete_assignments(azure: Subscription, command: ParsedCommand) -> Any:
    doomed = [one["id"] for one in list_assignments(azure, command)]
    azure.assignments = [one for one in azure.assignments if _view(one)["id"] not in doomed]


def _view(one: RoleAssignment) -> dict[str, Any]:
    name = identifier("assignment", one.role, one.principal, one.scope)
    return {"id": f"{one.scope}/providers/Microsoft.Authorization/roleAssignments/{name}", "name": name,
            "roleDefinitionName": one.role, "principalId": one.principal, "scope": one.scope}
