"""A subscription as Azure Resource Manager keeps it: groups, resources with ids, quotas and roles."""

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from cloudsim.account import Account
from cloudsim.azure.facts import FACTS, MachineType, families, machine_type
from cloudsim.grammar import ParsedCommand
from cloudsim.state import Refusal, Resource
from embark.values import JsonDict, frozen

SUBSCRIPTION = "11111111-2222-4333-8444-555555555555"
GROUP = "Microsoft.Resources/resourceGroups"
POOL = "Microsoft.ContainerService/managedClusters/agentPools"
VM = "Microsoft.Compute/virtualMachines"
NOT_FOUND = 3  # az's exit code for HTTP 404.


@frozen
class RoleAssignment:
    """A role of a principal on a scope and everything below it."""

    role: str
    principal: str
    scope: str


def names_of(command: ParsedCommand) -> tuple[str, str]:
    """Return the resource group and the name that a command is about."""
    return command.text("--resource-group"), command.text("--name")


def shown(kind: str, *flags: str) -> Any:
    """Make the answer that shows a resource; `flags` give its names, by default `--name`."""
    return lambda azure, command: azure.view(azure.need(
        kind, command.text("--resource-group"), *(command.text(flag) for flag in flags or ["--name"])))


class Subscription:
    """The state that every command of az answers from."""

    def __init__(self, account: Account) -> None:
        self.account, self.resources, self.clock = account, account.resources, account.clock
        self.quotas = dict.fromkeys((*families(), "cores", "lowPriorityCores"), 1000000)  # vCPUs in each region.
        self.features: dict[str, float] = {}  # Maps `namespace/name` to the time of its registration.
        self.providers = {"Microsoft.Resources", "Microsoft.Authorization"}
        self.extensions: set[str] = set()
        self.assignments: list[RoleAssignment] = []
        self.user = identifier("user")
        self.is_service_principal = False  # True: a pipeline's login, not a person's.

    # names and ids

    def id_of(self, resource: Resource) -> str:
        if resource.kind == GROUP:
            return f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{resource.name}"
        space, *kinds = resource.kind.split("/")
        group, *names = resource.name.split("/")
        below = "/".join(f"{kind}/{name}" for kind, name in zip(kinds, names, strict=True))
        return f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{group}/providers/{space}/{below}"

    def by_id(self, id: str) -> Resource | None:
        return next((one for one in self.resources if self.id_of(one).lower() == id.lower().rstrip("/")), None)

    def need_id(self, id: str, kind: str) -> Resource:
        """Return the resource that an argument names by its id, or refuse one of another kind."""
        found = self.by_id(id)
        if found is None or found.kind != kind:
            if not id.startswith("/subscriptions/"):
                raise Refusal(f"(LinkedInvalidPropertyId) Property id '{id}' at path is invalid. Expect fully "
                              "qualified resource Id that start with '/subscriptions/{subscriptionId}' or "
                              "'/providers/{resourceProviderNamespace}/'.")
            raise Refusal(f"(NotFound) {kind} with the id '{id}' was not found: the resource does not exist or is of "
                          "another type.", NOT_FOUND)
        return self.ready(found)

    # lookup

    def group(self, name: str) -> Resource:
        found = self.resources.find(GROUP, name)
        if found is None:
            raise Refusal(f"(ResourceGroupNotFound) Resource group '{name}' could not be found.\n"
                          "Code: ResourceGroupNotFound", NOT_FOUND)
        return found

    def find(self, kind: str, group: str, *names: str) -> Resource | None:
        return self.resources.find(kind, "/".join((group, *names)))

    def need(self, kind: str, group: str, *names: str) -> Resource:
        """Return a resource that exists and is ready, or refuse."""
        self.group(group)
        for length in range(1, len(names) + 1):
            part = "/".join(kind.split("/")[:length + 1])
            found = self.find(part, group, *names[:length])
            if found is None:
                space, *kinds = part.split("/")
                path = "/".join(f"{one}/{name}" for one, name in zip(kinds, names, strict=False))
                raise Refusal(f"(ResourceNotFound) The Resource '{space}/{path}' under resource group '{group}' was "
                              "not found. For more details please go to https://aka.ms/ARMResourceNotFoundFix\n"
                              "Code: ResourceNotFound", NOT_FOUND)
        assert found is not None, "a resource has a name"
        return self.ready(found)

    def global_name(self, kind: str, name: str) -> Resource | None:
        """Find a resource of a kind whose names are unique in the world."""
        return next((one for one in self.resources.of_kind(kind) if one.name.rpartition("/")[2] == name), None)

    def ready(self, resource: Resource) -> Resource:
        if not self.resources.is_ready(resource):
            raise Refusal("(OperationNotAllowed) Operation is not allowed because there's an in progress operation "
                          f"(Creating) on {self.id_of(resource)}.")
        return resource

    # changes

    def create(self, command: ParsedCommand, kind: str, /, *names: str, location: str, takes_s: float = 5.0,
               uses: Iterable[Resource] = (), is_paid: bool = False, **body: Any) -> Resource:
        """Create a resource. The caller has checked what it needs; `names` begins with the resource group."""
        if kind != GROUP:
            self.group(names[0])
            self.register(kind.partition("/")[0])
        made = self.resources.add(kind, "/".join(names), location=location, takes_s=takes_s, is_paid=is_paid,
                                  uses=[one.key for one in uses], body=body)
        if not command["--no-wait"]:
            self.clock.advance(takes_s)
        return made

    def register(self, space: str) -> None:
        """Register a resource provider, as az does by itself when one is used for the first time."""
        if space not in self.providers:
            self.providers.add(space)
            self.clock.advance(60.0)

    def below(self, resource: Resource) -> list[Resource]:
        if resource.kind == GROUP:
            return [one for one in self.resources if one.name.startswith(f"{resource.name}/")]
        return [one for one in self.resources
                if one.kind.startswith(f"{resource.kind}/") and one.name.startswith(f"{resource.name}/")]

    def delete(self, command: ParsedCommand, resource: Resource, *, takes_s: float = 30.0) -> None:
        """Delete a resource and everything below it, or refuse while something outside uses any of it."""
        doomed = [*self.below(resource), resource]
        keys = {one.key for one in doomed}
        for one in doomed:
            for user in self.resources.users_of(one.key):
                if user.key not in keys:
                    raise self.in_use(one, user)
        if command["--no-wait"]:
            for one in doomed:
                one.attributes["gone_at"] = self.clock.now + takes_s
                one.ready_at = float("inf")
            return
        self.clock.advance(takes_s)
        for one in doomed:
            self.forget(one)

    def forget(self, resource: Resource) -> None:
        id = self.id_of(resource).lower()
        self.assignments = [one for one in self.assignments if not one.scope.lower().startswith(id)]
        self.resources.remove(*resource.key)

    def purge(self) -> None:
        """Remove what a command with --no-wait has deleted by now."""
        for one in self.resources:
            if one.attributes.get("gone_at", float("inf")) <= self.clock.now:
                self.forget(one)

    def in_use(self, resource: Resource, user: Resource) -> Refusal:
        kind, name = resource.kind.rpartition("/")[2], resource.name.rpartition("/")[2]
        if kind == "subnets":
            return Refusal(f"(InUseSubnetCannotBeDeleted) Subnet {name} is in use by {self.id_of(user)} and cannot be "
                           "deleted. In order to delete the subnet, delete all the resources within the subnet. See "
                           "aka.ms/deletesubnet.")
        return Refusal(f"(ResourceInUse) {kind} {name} is in use by {self.id_of(user)} and cannot be deleted.")

    def view(self, resource: Resource) -> JsonDict:
        """Return a resource as `show` prints it."""
        is_ready = self.resources.is_ready(resource)
        state = "Succeeded" if is_ready else "Deleting" if "gone_at" in resource.attributes else "Creating"
        group = resource.name.partition("/")[0]
        return {"id": self.id_of(resource), "name": resource.name.rpartition("/")[2], "type": resource.kind,
                "location": resource.location, "resourceGroup": group, "provisioningState": state,
                **resource.attributes["body"]}

    # locations, machines and quotas

    def location(self, command: ParsedCommand, group: str = "") -> str:
        """Return the location of --location, or else the group's."""
        name = command.text("--location").lower().replace(" ", "")
        if not name and group:
            return self.group(group).location
        if name not in FACTS["regions"]["zones"]:
            raise Refusal(f"(LocationNotAvailableForResourceType) The provided location '{name}' is not available. "
                          f"List of available regions is '{','.join(FACTS['regions']['zones'])}'.")
        return name

    def zones(self, wanted: Sequence[str], location: str, what: str) -> list[str]:
        known = FACTS["regions"]["zones"][location]
        for zone in wanted:
            if zone not in known:
                raise Refusal(f"(AvailabilityZoneNotSupported) The zone(s) '{zone}' for resource '{what}' is not "
                              f"supported. The supported zones for location '{location}' are "
                              f"'{','.join(known) or 'none'}'")
        return list(wanted)

    def machine_type(self, name: str, location: str) -> MachineType:
        found = machine_type(name)
        if found is None:
            raise Refusal(f"(InvalidParameter) The value {name} provided for the VM size is not valid. "
                          f"az vm list-skus --location {location} lists those of the region.\nCode: InvalidParameter")
        if found.regions is not None and location not in found.regions:
            raise Refusal(f"(SkuNotAvailable) The requested VM size {name} is not available in location '{location}'. "
                          "Please try another size or deploy to a different location.\nCode: SkuNotAvailable")
        return found

    def used(self, location: str) -> dict[str, int]:
        """Count the vCPUs in use for each quota."""
        used: dict[str, int] = {}
        for one in self.resources:
            body = one.attributes.get("body", {})
            if one.location != location or one.kind not in (VM, POOL):
                continue
            kind = machine_type(body["vmSize"] if one.kind == POOL else body["hardwareProfile"]["vmSize"])
            assert kind is not None, "checked when it was created"
            vcpus = int(kind.vcpus * (body["count"] if one.kind == POOL else 1))
            is_spot = body.get("scaleSetPriority", body.get("priority")) == "Spot"
            for code in ("lowPriorityCores",) if is_spot else (kind.family, "cores"):
                used[code] = used.get(code, 0) + vcpus
        return used

    def quota_error(self, kind: MachineType, location: str, num: int, *, is_spot: bool) -> str:
        used = self.used(location)
        for code in ("lowPriorityCores",) if is_spot else (kind.family, "cores"):
            limit, wanted = self.quotas.get(code, 0), int(kind.vcpus * num)
            if used.get(code, 0) + wanted > limit:
                return (f"(ErrCode_InsufficientVCPUQuota) Insufficient vcpu quota requested {wanted}, remaining "
                        f"{limit - used.get(code, 0)} for family {code} for region {location}.")
        return ""

    # roles

    def may(self, principal: str, roles: Iterable[str], scope: str) -> bool:
        scope = scope.lower()
        return any(one.principal == principal and one.role in roles
                   and (scope == one.scope.lower() or scope.startswith(one.scope.lower().rstrip("/") + "/"))
                   for one in self.assignments)


def identifier(*words: str) -> str:
    """Return a UUID that is the same for the same words."""
    return str(uuid.uuid5(uuid.UUID(SUBSCRIPTION), "/".join(words)))
