"""`az netappfiles` and `az amlfs`: file systems in a subnet."""

import ipaddress
import re
from typing import Any

from cloudsim.azure.arm import Subscription
from cloudsim.azure.facts import FACTS
from cloudsim.azure.networks import SUBNET
from cloudsim.grammar import ParsedCommand
from cloudsim.state import Refusal, Resource

ACCOUNT = "Microsoft.NetApp/netAppAccounts"
POOL = f"{ACCOUNT}/capacityPools"
VOLUME = f"{POOL}/volumes"
LUSTRE = "Microsoft.StorageCache/amlFilesystems"
NAMES = {ACCOUNT: ("--name",), POOL: ("--account-name", "--name"), VOLUME: ("--account-name", "--pool-name", "--name"),
         LUSTRE: ("--amlfs-name",)}


def _names(command: ParsedCommand, kind: str) -> list[str]:
    return [command.text(flag) for flag in NAMES[kind]]


def create_account(azure: Subscription, command: ParsedCommand) -> Any:
    group, names = command.text("--resource-group"), _names(command, ACCOUNT)
    azure.group(group)
    found = azure.find(ACCOUNT, group, *names) or azure.create(
        command, ACCOUNT, group, *names, location=azure.location(command, group))
    return azure.view(found)


def create_pool(azure: Subscription, command: ParsedCommand) -> Any:
    group, names = command.text("--resource-group"), _names(command, POOL)
    account = azure.need(ACCOUNT, group, names[0])
    size = int(command.text("--size", "4"))
    if size < FACTS["netapp"]["min_pool_tib"]:
        raise Refusal(f"(PoolSizeTooSmall) A capacity pool has at least {FACTS['netapp']['min_pool_tib']} TiB, not "
                      f"{size}.")
    location = _same_location(azure, command, group, account)
    found = azure.find(POOL, group, *names) or azure.create(
        command, POOL, group, *names, location=location, takes_s=30.0, is_paid=True, size=size << 40,
        serviceLevel=command.text("--service-level", "Premium").capitalize())
    return azure.view(found)


def create_volume(azure: Subscription, command: ParsedCommand) -> Any:
    group, names = command.text("--resource-group"), _names(command, VOLUME)
    azure.need(ACCOUNT, group, names[0])
    pool = azure.need(POOL, group, *names[:2])
    location = _same_location(azure, command, group, pool)
    found = azure.find(VOLUME, group, *names)
    if found is not None:
        return azure.view(found)
    level = command.text("--service-level", "Premium").capitalize()
    if level != pool.attributes["body"]["serviceLevel"]:
        raise Refusal(f"(BadRequest) The service level {level} of the volume is not that of its capacity pool, "
                      f"{pool.attributes['body']['serviceLevel']}.")
    size_gib = int(command.text("--usage-threshold", "100"))
    used_gib = sum(one.attributes["body"]["usageThreshold"] >> 30 for one in azure.below(pool))
    if size_gib < FACTS["netapp"]["min_volume_gib"] or used_gib + size_gib > pool.attributes["body"]["size"] >> 30:
        raise Refusal(f"(VolumeSizeInvalid) {size_gib} GiB do not fit: at least {FACTS['netapp']['min_volume_gib']}, "
                      f"and the pool has {(pool.attributes['body']['size'] >> 30) - used_gib} GiB left.")
    permissions = command.text("--unix-permissions", FACTS["netapp"]["default_permissions"])
    if not re.fullmatch(r"[0-7]{4}", permissions):
        raise Refusal(f"(BadRequest) unixPermissions '{permissions}' is invalid: four octal digits such as 0770.")
    protocols = command["--protocol-types"] or ["NFSv3"]
    for one in protocols:
        if one not in ("NFSv3", "NFSv4.1", "CIFS"):
            raise Refusal(f"(BadRequest) Protocol type '{one}' is invalid: NFSv3, NFSv4.1 or CIFS.")
    subnet = _subnet(azure, command.text("--subnet"), location)
    if FACTS["netapp"]["delegation"] not in [one["serviceName"] for one in subnet.attributes["body"]["delegations"]]:
        raise Refusal(f"(SubnetNotDelegated) The subnet {azure.id_of(subnet)} is not delegated to "
                      f"{FACTS['netapp']['delegation']}.")
    address = _address(azure, subnet)
    return azure.view(azure.create(
        command, VOLUME, group, *names, location=location, takes_s=240.0, uses=[subnet], usageThreshold=size_gib << 30,
        serviceLevel=level, creationToken=command.text("--file-path"), protocolTypes=protocols,
        unixPermissions=permissions, subnetId=azure.id_of(subnet), mountTargets=[{"ipAddress": address}]))


def create_lustre(azure: Subscription, command: ParsedCommand) -> Any:
    group, name, sku = (command.text(f"--{one}") for one in ("resource-group", "amlfs-name", "sku"))
    azure.group(group)
    location = azure.location(command, group)
    step = FACTS["amlfs"]["steps_tib"].get(sku)
    if step is None:
        raise Refusal(f"(InvalidSku) The sku '{sku}' is not one of {', '.join(FACTS['amlfs']['steps_tib'])}.")
    size = float(command.text("--storage-capacity", "0"))
    if size <= 0 or size % step:
        raise Refusal(f"(InvalidParameter) storageCapacityTiB {size:g} is not a multiple of {step} TiB, which {sku} "
                      "needs.")
    words = "".join(command["--zones"] or []).strip("[]")
    zones = azure.zones([one.strip(" '\"") for one in words.split(",") if one], location, name)
    if not zones:
        raise Refusal(f"(ZoneRequired) The file system needs one availability zone of {location}: --zones.")
    if command["--maintenance-window"] is None:
        raise Refusal("(InvalidParameter) maintenanceWindow is required: --maintenance-window.")
    subnet = _subnet(azure, command.text("--filesystem-subnet"), location)
    if subnet.attributes["body"]["delegations"]:
        raise Refusal(f"(SubnetDelegated) The subnet {azure.id_of(subnet)} is delegated to another service.")
    address = _address(azure, subnet)
    return azure.view(azure.create(
        command, LUSTRE, group, name, location=location, takes_s=900.0, uses=[subnet], is_paid=True, sku={"name": sku},
        storageCapacityTiB=size, zones=zones, clientInfo={"mgsAddress": address, "containerStorageInterface": {}}))


def _same_location(azure: Subscription, command: ParsedCommand, group: str, parent: Resource) -> str:
    location = azure.location(command, group)
    if location != parent.location:
        raise Refusal(f"(InvalidResourceLocation) {location} is not the location of "
                      f"{parent.name.rpartition('/')[2]}, {parent.location}.")
    return location


def _subnet(azure: Subscription, id: str, location: str) -> Resource:
    subnet = azure.need_id(id, SUBNET)
    if subnet.location != location:
        raise Refusal(f"(InvalidSubnetLocation) The subnet is in {subnet.location}, the file system in {location}.")
    return subnet


def _address(azure: Subscription, subnet: Resource) -> str:
    hosts = list(ipaddress.ip_network(subnet.attributes["body"]["addressPrefix"]).hosts())
    return str(hosts[3 + len(azure.resources.users_of(subnet.key))])  # Azure reserves the first addresses.


def _list(kind: str, *flags: str) -> Any:
    def answer(azure: Subscription, command: ParsedCommand) -> Any:
        group, names = command.text("--resource-group"), [command.text(flag) for flag in flags]
        if names:
            azure.need(kind.rpartition("/")[0], group, *names)
        start = "/".join(filter(None, (group, *names)))
        return [azure.view(one) for one in azure.resources.of_kind(kind) if one.name.startswith(f"{start}/")]

    return answer


def _delete(kind: str) -> Any:
    def answer(azure: Subscription, command: ParsedCommand) -> Any:
        group = command.text("--resource-group")
        azure.group(group)
        found = azure.find(kind, group, *_names(command, kind))
        if not command["--yes"]:
            raise Refusal("Unable to prompt for confirmation as no tty available. Use --yes.")
        if found is None:
            return
        nested = azure.below(found)
        if nested:
            raise Refusal("(CannotDeleteResource) Cannot delete resource while nested resources exist. Some existing "
                          f"nested resource IDs include: '{azure.id_of(nested[0])}'. Please delete all nested "
                          "resources before deleting this resource.")
        azure.delete(command, found, takes_s=120.0)

    return answer
