"""`az network` and `az ppg`: networks, subnets, security groups and proximity placement groups."""

import ipaddress
from typing import Any

from cloudsim.azure.arm import Subscription, names_of
from cloudsim.grammar import ParsedCommand
from cloudsim.state import Refusal, Resource

VNET = "Microsoft.Network/virtualNetworks"
SUBNET = f"{VNET}/subnets"
NSG = "Microsoft.Network/networkSecurityGroups"
PPG = "Microsoft.Compute/proximityPlacementGroups"
DEFAULT_PREFIX = "10.0.0.0/16"


def create_vnet(azure: Subscription, command: ParsedCommand) -> Any:
    group, name = names_of(command)
    location = azure.location(command, group)
    prefixes = command["--address-prefixes"] or [DEFAULT_PREFIX]
    vnet = azure.find(VNET, group, name) or azure.create(
        command, VNET, group, name, location=location, addressSpace={"addressPrefixes": list(prefixes)})
    if command["--subnet-name"] and azure.find(SUBNET, group, name, command.text("--subnet-name")) is None:
        own = (command["--subnet-prefixes"] or [str(next(ipaddress.ip_network(prefixes[0]).subnets(new_prefix=24)))])[0]
        add_subnet(azure, command, vnet, command.text("--subnet-name"), own, [])
    return {"newVNet": azure.view(vnet)}


def add_subnet(azure: Subscription, command: ParsedCommand, vnet: Resource, name: str, prefix: str,
               delegations: list[str]) -> Resource:
    """Create a subnet inside its network that overlaps no other subnet."""
    try:
        wanted = ipaddress.ip_network(prefix)
    except ValueError as error:
        raise Refusal(f"(InvalidAddressPrefixFormat) Address prefix {prefix} of the subnet {name} is not formatted "
                      f"correctly: {error}") from error
    spaces = [ipaddress.ip_network(one) for one in vnet.attributes["body"]["addressSpace"]["addressPrefixes"]]
    if not any(wanted.subnet_of(one) for one in spaces):  # type: ignore[arg-type]
        raise Refusal(f"(NetcfgInvalidSubnet) Subnet '{name}' is not valid in virtual network "
                      f"'{vnet.name.rpartition('/')[2]}': {prefix} is not in {', '.join(map(str, spaces))}.")
    for other in azure.below(vnet):
        if wanted.overlaps(ipaddress.ip_network(other.attributes["body"]["addressPrefix"])):
            raise Refusal(f"(NetcfgSubnetRangesOverlap) Subnet '{name}' is not valid because its IP address range "
                          f"overlaps with that of an existing subnet '{other.name.rpartition('/')[2]}' in virtual "
                          f"network '{vnet.name.rpartition('/')[2]}'.")
    group, network = vnet.name.split("/")
    rows = [{"name": str(index), "serviceName": one} for index, one in enumerate(delegations)]
    return azure.create(command, SUBNET, group, network, name, location=vnet.location, addressPrefix=prefix,
                        delegations=rows)


def create_subnet(azure: Subscription, command: ParsedCommand) -> Any:
    group, network, name = (command.text(f"--{one}") for one in ("resource-group", "vnet-name", "name"))
    vnet = azure.need(VNET, group, network)
    found = azure.find(SUBNET, group, network, name)
    prefixes = command["--address-prefixes"]
    if not prefixes:
        raise Refusal("the following arguments are required: --address-prefixes (az network vnet subnet create)", 2)
    if found is not None:
        if found.attributes["body"]["addressPrefix"] != prefixes[0] and azure.resources.users_of(found.key):
            raise Refusal(f"(InUsePrefixCannotBeDeleted) IpPrefix {prefixes[0]} on Subnet {name} has active "
                          "allocations and cannot be deleted.")
        return azure.view(found)
    delegations = [word for one in command["--delegations"] or [] for word in one.strip("[]").split(",")]
    for one in delegations:
        if not one.startswith("Microsoft."):
            raise Refusal(f"(SubnetWithUnknownDelegation) {one} is no service that subnets are delegated to.")
    return azure.view(add_subnet(azure, command, vnet, name, prefixes[0], delegations))


def create_nsg(azure: Subscription, command: ParsedCommand) -> Any:
    group, name = names_of(command)
    found = azure.find(NSG, group, name) or azure.create(
        command, NSG, group, name, location=azure.location(command, group), securityRules=[])
    return {"NewNSG": azure.view(found)}


def create_rule(azure: Subscription, command: ParsedCommand) -> Any:
    nsg = azure.need(NSG, command.text("--resource-group"), command.text("--nsg-name"))
    rule = {"name": command.text("--name"), "priority": int(command.text("--priority", "100")),
            "access": command.text("--access", "Allow"), "direction": command.text("--direction", "Inbound"),
            "destinationPortRanges": command["--destination-port-ranges"] or ["80"]}
    rules = nsg.attributes["body"]["securityRules"]
    for other in rules:
        if other["name"] != rule["name"] and other["priority"] == rule["priority"]:
            raise Refusal(f"(SecurityRuleConflict) Security rule {rule['name']} conflicts with rule {other['name']}. "
                          "Rules cannot have the same Priority and Direction.")
    rules[:] = [*(one for one in rules if one["name"] != rule["name"]), rule]
    return rule


def create_ppg(azure: Subscription, command: ParsedCommand) -> Any:
    group, name = names_of(command)
    azure.group(group)
    location = azure.location(command, group)
    zones = azure.zones(command["--zone"] or [], location, name)
    sizes = command["--intent-vm-sizes"] or []
    if zones and not sizes:
        raise Refusal("The --intent-vm-sizes is required when --zone is specified")
    for size in sizes:
        azure.machine_type(size, location)
    found = azure.find(PPG, group, name) or azure.create(
        command, PPG, group, name, location=location, zones=zones, proximityPlacementGroupType="Standard",
        intent={"vmSizes": list(sizes)})
    return azure.view(found)


def _list(kind: str) -> Any:
    def answer(azure: Subscription, command: ParsedCommand) -> Any:
        group = command.text("--resource-group")
        if group:
            azure.group(group)
        return [azure.view(one) for one in azure.resources.of_kind(kind) if one.name.startswith(f"{group}/" if group
                                                                                             else "")]

    return answer


def _delete(kind: str, *flags: str) -> Any:
    def answer(azure: Subscription, command: ParsedCommand) -> Any:
        group = command.text("--resource-group")
        azure.group(group)
        found = azure.find(kind, group, *(command.text(flag) for flag in flags))
        if found is not None:  # Deleting a resource that does not exist succeeds.
            azure.delete(command, found)

    return answer
