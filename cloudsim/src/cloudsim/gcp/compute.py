"""Compute Engine: networks, firewall rules, addresses, placement policies, machines, and ssh."""

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from cloudsim.gcp import machines
from cloudsim.gcp.project import Invocation, Project, facts, quota_key
from cloudsim.state import Key, Resource
from embark.catalog import load_catalog
from embark.values import JsonDict

NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def link(project: Project, collection: str, name: str, location: str = "") -> str:
    scope = "global" if not location else f"zones/{location}" if project.is_zone(location) else f"regions/{location}"
    return f"projects/{project.id}/{scope}/{collection}/{name}"


def check_name(command: Invocation, name: str, what: str = "name") -> None:
    if not NAME.fullmatch(name):
        command.fail(f"Could not fetch resource:\n - Invalid value for field 'resource.{what}': '{name}'. Must be a "
                     "match of regex '(?:[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)'")


def missing(project: Project, command: Invocation, collection: str, name: str, location: str = "") -> NoReturn:
    command.fail(f"Could not fetch resource:\n - The resource '{link(project, collection, name, location)}' was "
                 "not found")


def need(project: Project, command: Invocation, kind: str, collection: str, name: str, location: str = "") -> Resource:
    found = project.resources.find(kind, f"{location}/{name}" if location else name)
    if found is None:
        missing(project, command, collection, name, location)
    return found


def add(project: Project, command: Invocation, kind: str, collection: str, name: str, location: str = "",
        **more: Any) -> Resource:
    check_name(command, name)
    key = f"{location}/{name}" if location else name
    if project.resources.find(kind, key):
        command.fail(f"Could not fetch resource:\n - The resource '{link(project, collection, name, location)}' "
                     "already exists")
    return project.resources.add(kind, key, location=location, **more)


def remove(project: Project, command: Invocation, found: Resource, collection: str) -> None:
    users = project.resources.users_of(found.key)
    name = found.name.rpartition("/")[2]
    if users:
        user = link(project, f"{users[0].kind}s", users[0].name.rpartition("/")[2], users[0].location)
        command.fail(f"Could not fetch resource:\n - The {found.kind} resource "
                     f"'{link(project, collection, name, found.location)}' is already being used by '{user}'")
    project.resources.remove(*found.key)


def network_of(project: Project, command: Invocation, text: str) -> Resource:
    return need(project, command, "network", "networks", text.rpartition("/")[2] or "default")


def region_of(project: Project, command: Invocation) -> str:
    region = command.location("--region")
    if region not in facts()["zones"]:
        command.fail(f"Could not fetch resource:\n - The resource '{project.path}/regions/{region}' was not found")
    return region


def zone_of(project: Project, command: Invocation) -> str:
    zone = command.location("--zone")
    if not project.is_zone(zone):
        command.fail(f"Could not fetch resource:\n - Invalid value for field 'zone': '{zone}'. Unknown zone.")
    return zone


# networks


def _create_network(project: Project, command: Invocation) -> None:
    profile = command.text("--network-profile")
    if profile and not project.is_zone(profile.removesuffix("-vpc-roce")):
        command.fail(f"Could not fetch resource:\n - The resource '{project.path}/global/networkProfiles/{profile}' "
                     "was not found")
    mtu = command.text("--mtu", "1460")
    if not mtu.isdigit() or not 1300 <= int(mtu) <= 8896:
        command.fail(f"Could not fetch resource:\n - Invalid value for field 'resource.mtu': '{mtu}'. Must be between "
                     "1300 and 8896.")
    add(project, command, "network", "networks", command.name(), mode=command.text("--subnet-mode", "auto"))


def _create_subnet(project: Project, command: Invocation) -> None:
    region, network = region_of(project, command), network_of(project, command, command.text("--network"))
    span = command.text("--range")
    for other in project.resources.of_kind("subnetwork"):
        if network.key in other.uses and other.attributes["range"] == span:
            command.fail(f"Could not fetch resource:\n - Invalid IPCidrRange: {span} conflicts with existing "
                         f"subnetwork '{other.name.rpartition('/')[2]}' in region '{other.location}'.")
    add(project, command, "subnetwork", "subnetworks", command.name(), region, uses={network.key}, range=span)


def _create_rule(project: Project, command: Invocation) -> None:
    network = network_of(project, command, command.text("--network", "default"))
    rules = command.text("--allow") or command.text("--rules")
    if not rules:
        command.fail("Exactly one of (--action | --allow) must be specified.", 2)
    for rule in rules.split(","):
        if not re.fullmatch(r"(tcp|udp|icmp|esp|ah|sctp|all|\d+)(:\d+(-\d+)?)?", rule):
            command.fail(f"Firewall rules must be of the form PROTOCOL[:PORT[-PORT]]; received [{rule}].")
    add(project, command, "firewall", "firewalls", command.name(), uses={network.key}, allowed=rules,
        target_tags=command.words("--target-tags"), source_ranges=command.words("--source-ranges"))


def _create_address(project: Project, command: Invocation) -> None:
    uses: set[Key] = set()
    if command.text("--network"):
        uses = {network_of(project, command, command.text("--network")).key}
    if command.text("--purpose") == "VPC_PEERING" and not (command.has("--global") and uses
                                                           and command.text("--prefix-length")):
        command.fail("Could not fetch resource:\n - Invalid value for field 'resource.prefixLength': a range for VPC "
                     "peering is global, and needs a network and a prefix length.")
    add(project, command, "address", "addresses", command.name(), uses=uses)


def _create_placement(project: Project, command: Invocation) -> None:
    region = region_of(project, command)
    add(project, command, "resource policy", "resourcePolicies", command.name(), region)


# machines


def gpu_need(project: Project, machine_type: str, accelerators: int, *, is_spot: bool) -> dict[str, float]:
    """Return the quota metrics of a machine type and how much of each one machine takes."""
    for machine in project.machines(machine_type):
        if machine.quota and (machine.machine_type == machine.name or machine.num_gpus == accelerators or
                              machine.num_hosts > 1 or not accelerators):
            metric = quota_key(machine.quota, machine.quota.spot if is_spot else machine.quota.on_demand)
            count = float(machine.gpus_per_host)
            return {metric: count, **dict.fromkeys(machine.quota.also, count)}
    return {}


def check_quota(project: Project, metrics: Mapping[str, float], region: str, count: int) -> str:
    """Return which quota is too small, in Compute Engine's words, or an empty text."""
    for metric, each in metrics.items():
        name, where = metric.partition(",")[0], "" if metric == "GPUS_ALL_REGIONS" else region
        if project.gpus_used(metric, where) + each * count > project.quota(metric):
            scope = "globally" if metric == "GPUS_ALL_REGIONS" else f"in region {region}"
            return f"Quota '{name}' exceeded.  Limit: {project.quota(metric)} {scope}."
    return ""


def _create_instance(project: Project, command: Invocation) -> None:
    zone = zone_of(project, command)
    machine_type = command.text("--machine-type", "n1-standard-1")
    if not project.is_sold(machine_type, zone):
        command.fail(f"Could not fetch resource:\n - Invalid value for field 'resource.machineType': "
                     f"'{link(project, 'machineTypes', machine_type, zone)}'. Machine type with name '{machine_type}' "
                     f"does not exist in zone '{zone}'.")
    family, owner = command.text("--image-family"), command.text("--image-project")
    if family and family not in facts()["images"].get(owner or project.id, ()):
        command.fail(f"Could not fetch resource:\n - The resource 'projects/{owner or project.id}/global/images/family/"
                     f"{family}' was not found")
    uses: set[Key] = set()
    for interface in command.pairs("--network-interface") or [{}]:
        uses.add(network_of(project, command, interface.get("network", command.text("--network", "default"))).key)
    policy = command.text("--resource-policies")
    if policy:
        uses.add(need(project, command, "resource policy", "resourcePolicies", policy, zone.rpartition("-")[0]).key)
    attached = command.pairs("--accelerator")
    count = int(attached[0].get("count", "1")) if attached else 0
    is_spot = command.text("--provisioning-model") == "SPOT"
    has_gpus = bool(project.machines(machine_type))
    if has_gpus and command.text("--maintenance-policy") != "TERMINATE":
        command.fail("Could not fetch resource:\n - Instances with guest accelerators do not support live migration.")
    metrics = gpu_need(project, machine_type, count, is_spot=is_spot)
    short = check_quota(project, metrics, zone.rpartition("-")[0], 1)
    if short:
        command.fail(f"Could not fetch resource:\n - {short}")
    metadata = {**{key: value for pair in command.pairs("--metadata") for key, value in pair.items()},
                **{key: command.call.read(path) for pair in command.pairs("--metadata-from-file")
                   for key, path in pair.items()}}
    for name in command.names("INSTANCE_NAMES"):
        add(project, command, "instance", "instances", name, zone, uses=uses, is_paid=True, quota=metrics,
            takes_s=facts()["takes_s"]["instance"], machine_type=machine_type, status="RUNNING", metadata=metadata,
            labels={key: value for pair in command.pairs("--labels") for key, value in pair.items()},
            tags=command.words("--tags"), is_spot=is_spot, scopes=command.words("--scopes"),
            service_account=command.text("--service-account") or project.compute_account)


def _show_instance(project: Project, one: Resource) -> JsonDict:
    name = one.name.rpartition("/")[2]
    return {"name": name, "id": str(abs(hash(one.name)) % 10**18), "status": one.attributes["status"],
            "zone": f"https://www.googleapis.com/compute/v1/{project.path}/zones/{one.location}",
            "machineType": link(project, "machineTypes", one.attributes["machine_type"], one.location),
            "labels": one.attributes["labels"], "tags": {"items": one.attributes["tags"]},
            "scheduling": {"provisioningModel": "SPOT" if one.attributes["is_spot"] else "STANDARD"}}


def _instance(project: Project, command: Invocation, name: str = "") -> Resource:
    return need(project, command, "instance", "instances", name or command.name("INSTANCE_NAME"),
                zone_of(project, command))


def _set_status(status: str) -> Any:
    def change(project: Project, command: Invocation) -> str:
        for name in command.names("INSTANCE_NAMES"):
            _instance(project, command, name).attributes["status"] = status
        return ""

    return change


def _delete_instances(project: Project, command: Invocation) -> None:
    for name in command.names("INSTANCE_NAMES"):
        remove(project, command, _instance(project, command, name), "instances")


def _ssh(project: Project, command: Invocation) -> str:
    """Return what a command prints on the machine; waiting for it lets the machine's service do its work."""
    found = _instance(project, command, command.name("USER@INSTANCE").rpartition("@")[2])
    if found.attributes["status"] != "RUNNING":
        command.fail(f"[/usr/bin/ssh] exited with return code [255]. {found.name.rpartition('/')[2]} is "
                     f"{found.attributes['status']}.")
    _check_port(project, command, found)
    project.account.clock.now = max(project.account.clock.now, found.ready_at)
    return machines.answer(project, command, found)


def _check_port(project: Project, command: Invocation, found: Resource) -> None:
    """Refuse ssh to a network without a firewall rule for it; the default network allows it from everywhere."""
    networks = {name for kind, name in found.uses if kind == "network"}
    rules = project.resources.of_kind("firewall")
    allows = any("tcp" in one.attributes["allowed"] and any(key[1] in networks for key in one.uses) and
                 not set(one.attributes["target_tags"]) - set(found.attributes["tags"]) for one in rules)
    if "default" not in networks and not allows:
        command.fail("[/usr/bin/ssh] exited with return code [255]. ssh: connect to port 22: Connection timed out")


def _scp(project: Project, command: Invocation) -> str:
    paths = command.names("USER@INSTANCE:SRC")
    found = _instance(project, command, paths[-1].partition(":")[0].rpartition("@")[2])
    for path in paths[:-1]:
        if not (command.call.folder / path).exists():
            command.fail(f"[/usr/bin/scp] exited with return code [1]. {path}: No such file or directory")
    found.attributes.setdefault("files", []).extend(paths[:-1])
    return ""


def _region(project: Project, command: Invocation) -> JsonDict:
    if command.name() not in facts()["zones"]:
        missing(project, command, "regions", command.name())
    return {"name": command.name(), "quotas": _quotas(project, is_global=False)}


def _quotas(project: Project, *, is_global: bool) -> list[JsonDict]:
    names = {name for quota in load_catalog().quotas.values() if quota.cloud == "gcp"
             for name in (quota.also if is_global else (quota.on_demand, quota.spot)) if name and "," not in name}
    return [{"metric": name, "limit": project.quota(name), "usage": 0.0} for name in sorted(names)]


def _delete(kind: str, collection: str, location: str = "") -> Any:
    def delete(project: Project, command: Invocation) -> str:
        where = region_of(project, command) if location else ""
        for name in command.names():
            remove(project, command, need(project, command, kind, collection, name, where), collection)
        return ""

    return delete


def _describe(kind: str, collection: str, location: str = "") -> Any:
    def describe(project: Project, command: Invocation) -> JsonDict:
        where = region_of(project, command) if location else ""
        found = need(project, command, kind, collection, command.name(), where)
        return {"name": command.name(), "selfLink": link(project, collection, command.name(), where),
                **{key: value for key, value in found.attributes.items() if isinstance(value, (str, int, list))}}

    return describe


def _machine_types(project: Project, _: Invocation) -> list[JsonDict]:
    names = {one.machine_type for one in load_catalog().machines.values() if one.cloud == "gcp" and one.machine_type}
    zones = [f"{region}-{letter}" for region, letters in facts()["zones"].items() for letter in letters]
    return [{"name": name, "zone": zone} for name in sorted(names) for zone in zones if project.is_sold(name, zone)]


def _global_quotas(project: Project, command: Invocation) -> JsonDict:
    return {"name": project.id, "quotas": _quotas(project, is_global=True)}
