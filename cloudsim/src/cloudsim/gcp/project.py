"""A Google Cloud project: its services, its roles, and the zones that offer a machine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

from cloudsim.account import Account, Call
from cloudsim.grammar import ParsedCommand
from cloudsim.state import Refusal, Resource, Resources, load_facts
from embark.catalog import Machine, Quota, load_catalog
from embark.catalog.regions import is_sold_in
from embark.values import JsonDict, frozen

QUOTA = 1024.0  # The limit of every quota that a test does not set.


def facts() -> JsonDict:
    return load_facts("gcp/facts.toml")


def quota_key(quota: Quota, name: str) -> str:
    """Return the name that a quota is counted under; each of several families is counted separately."""
    return f"{name}, {quota.dimension}" if quota.dimension and name == quota.on_demand else name


@dataclass(slots=True)
class Project:
    """A project whose owner runs gcloud."""

    account: Account
    id: str
    number: str = "123456789012"
    services: set[str] = field(default_factory=lambda: set(facts()["services"]["enabled"]))
    policies: dict[str, set[tuple[str, str]]] = field(default_factory=dict)  # Pairs of role and member by resource.
    quotas: dict[str, float] = field(default_factory=dict)  # Maps a metric to its limit; others have QUOTA.
    config: dict[str, str] = field(default_factory=dict)
    components: set[str] = field(default_factory=lambda: {"gcloud", "gsutil", "core", "bq"})

    @property
    def compute_account(self) -> str:
        """The service account of machines that name none. It has no role in organizations created since May 2024."""
        return f"{self.number}-compute@developer.gserviceaccount.com"

    @property
    def resources(self) -> Resources:
        return self.account.resources

    @property
    def path(self) -> str:
        return f"projects/{self.id}"

    def enable(self, name: str) -> None:
        if name in self.services:
            return
        self.services.add(name)
        for needed in facts()["services"]["needs"].get(name, ()):
            self.enable(needed)
        if name == "compute":
            self.resources.add("network", "default", mode="AUTO")

    def allows(self, member: str, what: str, resource: str) -> bool:
        """Return whether a member has a role on the resource, or on the project, that allows an action."""
        held = self.policies.get(resource, set()) | self.policies.get(self.path, set())
        return any(what in facts()["roles"][role] for role, holder in held if holder == member)

    def bind(self, command: Invocation, resource: str) -> None:
        role, member = command.text("--role"), command.text("--member")
        if role not in facts()["roles"]:
            command.fail(f"INVALID_ARGUMENT: Role {role} is not supported for this resource.")
        self._check_member(command, member)
        self.policies.setdefault(resource, set()).add((role, member))

    def _check_member(self, command: Invocation, member: str) -> None:
        kind, _, name = member.partition(":")
        if kind == "serviceAccount":
            name, _, subject = name.partition("[")
            if subject and self.resources.find("identity pool", name) is None:
                command.fail(f"INVALID_ARGUMENT: Identity Pool does not exist ({name}). Please check that you "
                             "specified a valid resource name as returned in the `name` attribute in the "
                             "configuration API.")
            if not subject and name != self.compute_account and not name.endswith(".iam.gserviceaccount.com"):
                command.fail(f"INVALID_ARGUMENT: Service account {name} does not exist.")
            own = name.endswith(f"@{self.id}.iam.gserviceaccount.com")
            if own and self.resources.find("service account", name) is None:
                command.fail(f"INVALID_ARGUMENT: Service account {name} does not exist.")
        elif kind in ("principal", "principalSet"):
            match = re.fullmatch(r"//iam.googleapis.com/projects/(\d+)/locations/global/workloadIdentityPools/([^/]+)/"
                                 r"subject/ns/[\w-]+/sa/[\w-]+", name)
            if match is None or match[1] != self.number:
                command.fail(f"INVALID_ARGUMENT: The member {member} is of an unknown type. Please set a valid type "
                             "prefix for the member.")
            elif self.resources.find("identity pool", match[2]) is None:
                command.fail(f"INVALID_ARGUMENT: Identity Pool does not exist ({match[2]}). Please check that you "
                             "specified a valid resource name as returned in the `name` attribute in the "
                             "configuration API.")
        elif kind not in ("user", "group", "domain"):
            command.fail(f"INVALID_ARGUMENT: The member {member} is of an unknown type. Please set a valid type "
                         "prefix for the member.")

    # zones and machines

    def quota(self, metric: str) -> float:
        return self.quotas.get(metric, QUOTA)

    def is_zone(self, zone: str) -> bool:
        region, _, letter = zone.rpartition("-")
        return bool(letter) and letter in facts()["zones"].get(region, "")

    def machines(self, machine_type: str) -> list[Machine]:
        return [one for one in load_catalog().machines.values()
                if one.cloud == "gcp" and machine_type in (one.machine_type, one.name)]

    def size(self, machine_type: str) -> tuple[float, float] | None:
        """Return the vCPUs and the GiB of a host."""
        found = facts()["machines"].get(machine_type)
        if found is None:
            machine = next(iter(self.machines(machine_type)), None)
            return (float(machine.vcpus or 0), float(machine.memory_gib or 0)) if machine else None
        return float(found[0]), float(found[1])

    def is_sold(self, machine_type: str, zone: str) -> bool:
        if machine_type in facts()["machines"]:
            return self.is_zone(zone)
        for family, zones in facts()["gpu_zones"].items():
            if machine_type.startswith(f"{family}-"):
                return zone in zones
        region, catalog = zone.rpartition("-")[0], load_catalog()
        for machine in self.machines(machine_type):
            sold = catalog.zones_of(machine)
            if sold is not None:
                return zone in (*sold.zones, *sold.others)
            priced = {price.region for price in catalog.prices_of(machine)}
            return is_sold_in(catalog, machine, region) and (not priced or region in priced)
        return False

    def gpus_used(self, metric: str, region: str) -> float:
        used: list[float] = [one.attributes.get("quota", {}).get(metric, 0.0) for one in self.resources
                             if one.location.startswith(region)]
        return sum(used)


@frozen
class Invocation:
    """A command with its flags, and gcloud's way to fail."""

    parsed: ParsedCommand
    call: Call
    project: str  # The value of --project or of the configuration.

    def text(self, flag: str, default: str = "") -> str:
        return self.parsed.text(flag, default)

    def name(self, key: str = "NAME") -> str:
        found = self.parsed.positionals.get(key)
        return str(found[0] if isinstance(found, list) and found else found or "")

    def names(self, key: str = "NAME") -> list[str]:
        found = self.parsed.positionals.get(key) or []
        return [str(one) for one in (found if isinstance(found, list) else [found])]

    def pairs(self, flag: str) -> list[dict[str, str]]:
        """Return `{a: b, c: d}` for each `--flag=a=b,c=d`."""
        given = self.parsed[flag]
        texts = given if isinstance(given, list) else [given] if given else []
        return [dict(part.partition("=")[::2] for part in str(text).split(",") if part) for text in texts]

    def words(self, flag: str) -> list[str]:
        return [word for word in self.text(flag).split(",") if word]

    def has(self, flag: str) -> bool:
        return bool(self.parsed[flag])

    def fail(self, text: str, code: int = 1) -> NoReturn:
        raise Refusal(f"ERROR: (gcloud.{'.'.join(self.parsed.path)}) {text}", code)

    def location(self, *flags: str) -> str:
        """Return the value of the first of `--location`, `--zone` and `--region` that was given."""
        location = next((self.text(flag) for flag in flags if self.text(flag)), "")
        if not location:
            self.fail(f"argument {flags[0]}: Must be specified.", 2)
        return location


def described(find: Any, show: Any) -> Any:
    """Make the answer that shows the resource that a command names."""
    return lambda project, command: show(project, find(project, command))


def listed(kind: str, show: Any) -> Any:
    """Make the answer that lists the resources of a kind, of one location if the command names one."""
    def answer(project: Project, command: Invocation) -> list[JsonDict]:
        location = command.text("--location") or command.text("--zone") or command.text("--region")
        return [show(project, one) for one in project.resources.of_kind(kind) if location in ("", "-", one.location)]

    return answer


def name_of(project: Project, one: Resource) -> JsonDict:
    return {"name": one.name}
