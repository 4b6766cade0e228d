"""Where machines are sold, and which zone a region's machines are in."""

import pytest

from embark.catalog import find_machine, lowest_price
from embark.catalog.regions import default_zone, is_sold_in


def tpus(catalog):
    return [machine for machine in catalog.machines.values() if machine.gpu.kind == "tpu"]


def test_every_tpu_has_zones_and_a_price_where_it_is_sold(catalog):
    for machine in tpus(catalog):
        assert catalog.zones_of(machine) is not None, machine.name
        price = lowest_price(catalog, machine, "on_demand")
        assert price is not None, machine.name
        assert is_sold_in(catalog, machine, price.region), machine.name
        assert default_zone(catalog, machine, price.region) in catalog.zones_of(machine).zones, machine.name


@pytest.mark.parametrize(("name", "region", "zone"), [
    ("v4-8", "us-central2", "us-central2-b"), ("v4-8192", "us-central2", "us-central2-b"),
    ("v2-8", "us-central1", "us-central1-b"), ("v2-32", "us-central1", "us-central1-a"),
    ("v2-8", "asia-east1", "asia-east1-c"), ("v3-32", "europe-west4", "europe-west4-a"),
    ("v6e-8", "us-central1", "us-central1-b"), ("v6e-8", "us-east5", "us-east5-b"),
    ("v6e-8", "us-east4", "us-east4-a"), ("a3-highgpu-8g", "us-east1", "us-east1-b"),
    ("p4d.24xlarge", "us-west-2", "us-west-2a"), ("ND96asr_v4", "eastus", "1"),
])
def test_the_default_zone_of_a_region_sells_the_machine(catalog, name, region, zone):
    assert default_zone(catalog, find_machine(catalog, name), region) == zone


def test_a_zone_for_single_tenants_is_never_the_default(catalog):
    machine = find_machine(catalog, "v6e-8")
    assert ("v6e-8", "us-east4") in catalog.prices
    assert not is_sold_in(catalog, machine, "us-east4")
    assert lowest_price(catalog, machine, "spot").region != "us-east4"
