"""What a launch will take is said before it is asked for."""

from __future__ import annotations

import pytest

from embark.catalog import load_catalog
from embark.errors import SpecError
from embark.launch.costs import estimate_launch
from embark.spec import load_spec

BASE = ["place.machine=p5.48xlarge", "place.nodes=2", "store.root=s3://bucket/runs"]


def test_the_price_is_that_of_all_machines_as_they_are_paid_where_they_are():
    estimate = estimate_launch(load_spec("quickstart", [*BASE, "place.region=us-west-2"]))
    price = load_catalog().prices["p5.48xlarge", "us-west-2"]
    assert estimate.fits
    assert estimate.usd_per_hour == 2 * price.on_demand_usd_per_hour
    assert "an hour on demand in us-west-2" in estimate.price
    assert estimate.total_usd is not None
    spot = estimate_launch(load_spec("quickstart", [*BASE, "place.region=us-west-2", "place.spot=true"]))
    assert spot.usd_per_hour == 2 * price.spot_usd_per_hour
    assert "on spot in us-west-2" in spot.price


def test_data_that_is_not_here_leaves_the_price_an_hour(tmp_path):
    (tmp_path / "run.toml").write_text('[data]\nkind = "prepared"\npath = "s3://bucket/criteo"\n')
    estimate = estimate_launch(load_spec(str(tmp_path / "run.toml"), BASE))
    assert "no plan could be made" in estimate.verdict
    assert estimate.usd_per_hour is not None
    assert "an hour" in estimate.price


def test_the_price_says_that_a_budget_ends_the_run_early():
    assert "stops itself" not in estimate_launch(load_spec("quickstart", BASE)).price
    tight = estimate_launch(load_spec("quickstart", [*BASE, "place.budget_usd=0.01"]))
    assert "; it stops itself at $0.01, before it is done: the plan says $" in tight.price
    roomy = estimate_launch(load_spec("quickstart", [*BASE, "place.budget_usd=100000"]))
    assert roomy.price.endswith("; it stops itself at $100,000")


def test_a_budget_without_a_price_to_keep_it_by_is_refused():
    sets = ["place.machine=p5.48xlarge", "place.region=af-south-1", "place.budget_usd=50"]
    with pytest.raises(SpecError, match=r"place\.budget_usd"):
        estimate_launch(load_spec("quickstart", sets))
