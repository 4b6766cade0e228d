"""What a run asks of an account."""

from __future__ import annotations

from dataclasses import dataclass

from embark.catalog import Catalog, find, load_catalog
from embark.doctor.check import Check, judged
from embark.errors import UserError
from embark.render.budgets import needed_units
from embark.render.job import DEFAULT_MACHINES, Job, dns_label
from embark.render.location import Site, price_of, site_of
from embark.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Need:
    """The machines, where, and how much of which quota they take."""

    job: Job
    site: Site
    catalog: Catalog

    @property
    def region(self) -> str:
        return self.site.region

    @property
    def num_units(self) -> int:
        """Of the quota's unit."""
        return needed_units(self.job)

    @property
    def unit(self) -> str:
        quota = self.job.machine.quota
        return f"{quota.unit}s" if quota else "units"

    @property
    def quota(self) -> tuple[str, str]:
        """What the cloud calls it, and its code; empty where the catalog does not know."""
        quota = self.job.machine.quota
        if quota is None:
            return "", ""
        return (quota.spot, quota.spot_code) if self.job.is_spot else (quota.on_demand, quota.on_demand_code)

    @property
    def way(self) -> str:
        return "on spot" if self.job.is_spot else "on demand"

    @property
    def usd_per_hour(self) -> float | None:
        """Of one machine, as the catalog has it."""
        price = price_of(self.job)
        if price is None:
            return None
        return price.spot_usd_per_hour if self.job.is_spot else price.on_demand_usd_per_hour

    def other_regions(self) -> str:
        """Where else the catalog has the machine."""
        regions = [price.region for price in self.catalog.prices_of(self.job.machine) if price.region != self.region]
        return ", ".join(regions[:8]) or "none that the catalog knows"


def need_of(spec: RunSpec) -> Need:
    place = spec.place
    if not place.machine and not place.cloud:
        raise UserError("which account? neither place.machine nor place.cloud is set",
                        fix="embark doctor --cloud --machine p5.48xlarge, or a spec that names one")
    catalog = load_catalog()
    machine = find(catalog, place.machine or DEFAULT_MACHINES[place.cloud])
    # Not by make_job: the account is looked at even where the run could not be rendered yet.
    job = Job(spec, machine, dns_label(spec.name), place.nodes, machine.gpus_per_host, "")
    return Need(job, site_of(job), catalog)


def quota_check(need: Need, name: str, limit: float, used: float, units: float, fix: str) -> Check:
    """Whether what is left of a quota is enough. -1 is no limit."""
    found = f"{limit:g} {need.unit}, {used:g} in use; the run takes {units:g}"
    is_enough = limit < 0 or limit - used >= units
    return judged(f"quota {name}", is_enough, found, f"{units:g} {need.unit} free", fix)
