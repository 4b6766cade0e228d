"""One price for a spec, wherever it is shown."""

import pytest

from embark.catalog import load_catalog, price_spec
from embark.catalog.pricing import DEFAULT_MACHINES, lowest_price
from embark.catalog.regions import is_sold_in
from embark.errors import UserError
from embark.spec import resolve

CATALOG = load_catalog()


def price(**place):
    return price_spec(resolve({"place": place}))


@pytest.mark.parametrize(("spot", "field"), [(True, "spot_usd_per_hour"), (False, "on_demand_usd_per_hour")])
def test_without_a_region_the_cheapest_regions_price_applies(spot, field):
    for machine in CATALOG.machines.values():
        known = [usd for p in CATALOG.prices_of(machine) if is_sold_in(CATALOG, machine, p.region)
                 and (usd := getattr(p, field)) is not None]
        found = price(machine=machine.name, spot=spot)
        assert found.usd_per_hour == min(known, default=None), machine.name
        if known:
            assert getattr(CATALOG.prices[machine.name, found.region], field) == found.usd_per_hour


@pytest.mark.parametrize("spot", [True, False])
def test_a_named_region_has_its_own_price(spot):
    for (name, region), row in CATALOG.prices.items():
        if name in CATALOG.cpu_machines:
            continue
        found = price(machine=name, region=region, spot=spot)
        assert found.region == region
        assert found.usd_per_machine_hour == (row.spot_usd_per_hour if spot else row.on_demand_usd_per_hour)


def test_all_machines_of_the_run_are_counted():
    one, four = price(machine="p4d.24xlarge"), price(machine="p4d.24xlarge", nodes=4)
    assert four.usd_per_hour == 4 * one.usd_per_hour
    assert four.title == f"4 x p4d.24xlarge on demand in {four.region}"


def test_a_cloud_alone_is_priced_by_its_default_machine():
    assert price(cloud="gcp").machine.name == DEFAULT_MACHINES["gcp"]


def test_without_a_machine_there_is_no_price():
    assert price() is None
    with pytest.raises(UserError, match="no such machine"):
        price(machine="p4d.25xlarge")


def test_a_machine_that_is_not_sold_so_is_shown_where_it_is_sold():
    for machine in CATALOG.machines.values():
        if CATALOG.prices_of(machine):
            assert lowest_price(CATALOG, machine, "block") is not None
