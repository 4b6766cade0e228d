"""The quotas that a job's machines count towards, and how much of them the job takes."""

from collections.abc import Iterator
from dataclasses import dataclass

from embark.catalog import Quota, load_catalog
from embark.render.job import Job
from embark.render.shell_text import Words, variable


@dataclass(frozen=True, slots=True)
class CloudQuota:
    """A quota that `gcloud beta quotas info list` shows; of its values, those for the place and the dimension count."""

    name: str
    service: str
    filter: str
    is_zonal: bool
    dimension: str  # `gpu_family`, `tpu_family`, or empty.
    value: str

    @property
    def words(self) -> Words:
        """For the function of budget.sh that reads it."""
        place = variable("ZONE" if self.is_zonal else "REGION")
        return (self.service, self.filter, place, *((self.dimension, self.value) if self.value else ()))


def quota_of(job: Job) -> Quota | None:
    """Vertex AI and the Cloud TPU API count for themselves."""
    own = job.machine.quota
    if own is None:
        return None
    name = {"vertex": own.vertex, "tpu-vm": own.tpu_vm}.get(job.target, "")
    if job.target == "vertex" and not name:
        return None
    return load_catalog().quotas[name] if name else own


def quota_name(job: Job) -> tuple[str, str]:
    """The cloud's name for it, and its code; empty where the catalog does not know."""
    quota = quota_of(job)
    if quota is None:
        return "", ""
    return (quota.spot, quota.spot_code) if job.is_spot else (quota.on_demand, quota.on_demand_code)


def needed_units(job: Job) -> int:
    """How much of its quota the run needs."""
    quota = quota_of(job)
    unit = quota.unit if quota else "GPU"
    if unit == "vCPU":
        return int((job.machine.vcpus or 0) * job.num_nodes)
    return job.machine.num_gpus * job.num_nodes * (2 if unit == "core" else 1)


def cloud_quotas(job: Job) -> Iterator[CloudQuota]:
    """Google's quotas with a code, or a metric of another service than Compute Engine."""
    quota, (name, code) = quota_of(job), quota_name(job)
    if quota is None or not (code or "/" in name):
        return
    dimension, _, value = quota.dimension.partition("=")
    if not code:
        yield CloudQuota(name, name.partition("/")[0], f"metric={name}", False, dimension, value)
        return
    # The Cloud TPU API counts in the zone, and all zones of the region together.
    for one in dict.fromkeys((code, code.replace("PerZone", "PerRegion"))):
        label = f"{name}, {quota.dimension}" if value else one if one != code else name
        yield CloudQuota(label, quota.service, f"quotaId={one}", "PerZone" in one, dimension, value)
