"""Facts about Azure: facts.toml, and the machine types of the catalog."""


from fnmatch import fnmatchcase

from cloudsim.state import load_facts
from embark.catalog import load_catalog
from embark.values import frozen


@frozen
class MachineType:
    """A size of virtual machines."""

    name: str
    vcpus: float
    memory_gib: float
    family: str  # The `name.value` of its quota.
    num_gpus: int = 0
    num_adapters: int = 0  # InfiniBand adapters.
    regions: frozenset[str] | None = None  # Regions that offer it; None if all do.

    @property
    def os_disk_gib(self) -> int:
        return next(int(gib) for least, gib in FACTS["aks"]["disks_gib"] if self.vcpus >= least)

    def allocatable(self, disk_gib: float) -> dict[str, str]:
        """Return the resources that AKS leaves to pods on such a machine."""
        reserve = next(one.reserve for one in load_catalog().machines.values() if one.cloud == "azure")
        kept_gib = min(self.memory_gib - reserve.allocatable_gib(self.memory_gib),
                       self.memory_gib * FACTS["aks"]["max_memory_share"])
        found = {"cpu": f"{reserve.allocatable_vcpus(self.vcpus) * 1000:.0f}m",
                 "memory": f"{(self.memory_gib - kept_gib) * 1024:.0f}Mi", "pods": "250",
                 "ephemeral-storage": f"{int(disk_gib * FACTS['aks']['disk_share'] * 0.9 * 1024)}Mi"}
        if self.num_gpus:
            found["nvidia.com/gpu"] = str(self.num_gpus)
        return found


FACTS = load_facts("azure/facts.toml")


def families() -> dict[str, str]:
    """Map the `name.value` of each quota family to its `localName`."""
    return dict(row for row in FACTS["families"].values() if isinstance(row, list))


def machine_type(name: str) -> MachineType | None:
    catalog = load_catalog()
    machine = next((one for one in catalog.machines.values() if one.cloud == "azure" and one.name == name), None)
    family = next((row[0] for pattern, row in FACTS["families"].items()
                   if isinstance(row, list) and fnmatchcase(name, pattern)), "")
    if machine is None:
        size = FACTS["sizes"]["machines"].get(name)
        return None if size is None else MachineType(name, size[0], size[1], family)
    adapters = machine.num_fabric_devices or 0 if machine.fabric.name == "infiniband" else 0
    return MachineType(name, machine.vcpus or 0, machine.memory_gib or 0, family, machine.num_gpus, adapters,
                       frozenset(price.region for price in catalog.prices_of(machine)))
