"""Regions and zones: which region a zone is in, which zone is a region's default, and where a machine is sold."""

import re

from embark.errors import Mistake, Mistakes
from embark.spec import PlaceSpec
from .machine import Catalog, CpuMachine, Machine

_ZONES = {
    "aws": re.compile(r"(?P<region>[a-z]{2}(-[a-z]+)+-\d+)(-[a-z]+-\d+)?[a-z]"),  # us-east-1b, us-west-2-lax-1a
    "azure": re.compile(r"(?P<region>)[1-9]"),  # Every region has these numbers.
    "gcp": re.compile(r"(?P<region>[a-z]+-[a-z]+\d+)-[a-z][a-z0-9]*")  # us-central1-b, us-south1-ai1b
}
_EXAMPLES = {"aws": "us-east-1a", "azure": "1", "gcp": "us-central1-a"}
DEFAULT_REGIONS = {"aws": "us-west-2", "azure": "eastus", "gcp": "us-central1"}  # If no price is known.
FIRST_ZONES = {"us-east1": "b", "europe-west1": "b"}  # Google's regions without a zone a.


def region_of(cloud: str, place: PlaceSpec) -> str:
    """Return the region that a spec names, by itself or by its zone; empty if it names neither."""
    zone = _ZONES[cloud].fullmatch(place.zone) if cloud else None
    return place.region or (zone["region"] if zone else "")


def is_sold_in(catalog: Catalog, machine: Machine | CpuMachine, region: str) -> bool:
    """Return whether the region sells the machine, as far as the catalog knows."""
    sold = catalog.zones_of(machine)
    return sold is None or any(_region(zone) == region for zone in sold.zones)


def default_region(catalog: Catalog, machine: Machine) -> str:
    """Return the region of a machine without a known price."""
    sold = catalog.zones_of(machine)
    return DEFAULT_REGIONS.get(machine.cloud, "") if sold is None else _region(sold.zones[0])


def default_zone(catalog: Catalog, machine: Machine, region: str) -> str:
    """Return the first zone of the region that sells the machine; if that is not known, the region's first."""
    if (sold := catalog.zones_of(machine)) is not None:
        return next((zone for zone in (*sold.zones, *sold.others) if _region(zone) == region), "")
    if machine.cloud == "azure":
        return "1"
    return f"{region}{'-' if machine.cloud == 'gcp' else ''}{FIRST_ZONES.get(region, 'a')}"


def place_mistakes(catalog: Catalog, machine: Machine, place: PlaceSpec) -> Mistakes:
    """Yield a mistake if the zone does not exist, is in another region or does not sell the machine, or if the region
    does not sell it."""
    if not machine.cloud:  # nothing is known of its regions
        return
    zone = _ZONES[machine.cloud].fullmatch(place.zone)
    sold = catalog.zones_of(machine)
    if place.zone and zone is None:
        yield Mistake("", "place.zone", place.zone, f"is no zone of {machine.cloud}",
                      f"such as {_EXAMPLES[machine.cloud]}")
    elif zone and zone["region"] and place.region not in ("", zone["region"]):
        yield Mistake("", "place.zone", place.zone, f"is in {zone['region']}, and place.region is {place.region}",
                      "leave place.region out, or name a zone of it")
    elif sold is not None:
        known = (*sold.zones, *sold.others)
        fix = f"zones that sell it: {', '.join(sold.zones)}"
        if place.zone and place.zone not in known:
            yield Mistake("", "place.zone", place.zone, f"does not sell {machine.name}", fix)
        elif place.region and place.region not in map(_region, known):
            yield Mistake("", "place.region", place.region, f"does not sell {machine.name}", fix)


def _region(zone: str) -> str:
    return zone.rpartition("-")[0]
