"""Capacity that was bought ahead is priced as it is paid."""

from pathlib import Path

import pytest

from embark.catalog import price_spec
from embark.plan.plan import plan
from embark.spec import load_spec

GUIDE = Path(__file__).parents[3] / "examples" / "cloud_deployment" / "aws" / "run.toml"


@pytest.mark.parametrize(("capacity", "purchase", "words"), [
    ("", "on_demand", ""), ("on-demand", "on_demand", ""), ("reserved", "on_demand", "whether the run uses it or not"),
    ("block", "block", "in whole days"), ("flex-start", "on_demand", "before anything is paid")])
def test_a_plan_says_how_its_machines_are_paid(capacity, purchase, words):
    spec = load_spec(str(GUIDE), [f"place.capacity={capacity}"] if capacity else [])
    found = plan(spec)
    assert found.purchase == price_spec(spec).purchase == purchase
    assert any(words in note for note in found.estimate.prediction.notes) if words else True
    assert (len([note for note in found.estimate.prediction.notes if "paid" in note]) == 1) == bool(words)


def test_a_block_is_paid_by_the_day_however_short_the_run():
    spec = load_spec(str(GUIDE), ["place.machine=p5.48xlarge", "place.capacity=block", "place.region=us-east-1",
                                  "place.zone=us-east-1a"])
    bill = plan(spec).estimate.bills["block"]
    assert bill.time.total_s < 3600
    assert bill.machines_usd == pytest.approx(24 * bill.usd_per_hour)
