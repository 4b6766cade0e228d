"""Hours and dollars: every part counted, a missing price never nothing."""

from dataclasses import replace

import pytest
from plan_setups import hand_estimator, made, setup_of, shipped_catalog

from embark.catalog import Origin, Price
from embark.catalog.pricing import hourly_usd
from embark.plan.cost import COST, Failures, add_storage, bill, failures_of, run_time, saves_of
from embark.plan.workload import DataSize, workload_of

NO_FAILURE = Failures(0.0, 120.0, False, "none")
PRICE = Price(machine="p4d.24xlarge", region="us-west-2", on_demand_usd_per_hour=22.0, spot_usd_per_hour=8.0,
              commit_1y_discount=0.4, origin=Origin("test", "2026-11", "read"))


def parts(sets=(), nodes=1, step_s=0.01, samples=65_536_000, machine="p4d.24xlarge"):
    prediction = made(setup_of(machine, nodes, sets=sets), step_s)
    return prediction, workload_of(prediction.setup.spec, DataSize(samples, 0))


def test_the_run_is_the_sum_of_its_parts():
    prediction, work = parts(["train.num_epochs=5"])
    saves = saves_of(prediction, work.num_steps, NO_FAILURE)
    time = run_time(prediction, work, saves, NO_FAILURE)
    assert time.train_s == pytest.approx(50.0)
    assert time.epoch_s == pytest.approx(10.0)
    assert time.num_interruptions == 0
    start_s = COST["boot_s"] + COST["image_s"] + COST["first_step_s"] + 8 * 0.03
    assert time.total_s == pytest.approx(start_s + 50 + saves.total_s)


def test_evaluations_take_time():
    prediction, _ = parts(["train.eval_every=100"])
    work = workload_of(prediction.setup.spec, DataSize(65_536_000, 655_360))
    time = run_time(prediction, work, saves_of(prediction, work.num_steps, NO_FAILURE), NO_FAILURE)
    assert work.num_evals == 10
    assert time.eval_s == pytest.approx(10 * 10 * 0.01 * COST["eval_share"])


def test_interruptions_cost_what_is_lost_and_what_starts_again():
    prediction, work = parts(samples=65_536 * 10**7)
    failures = Failures(0.1, 5.0, True, "spot")
    saves = saves_of(prediction, work.num_steps, failures)
    time = run_time(prediction, work, saves, failures)
    assert time.num_interruptions == pytest.approx(0.1 * time.total_s / 3600)
    assert time.lost_s == pytest.approx(time.num_interruptions * saves.lost_each_s)
    restart_s = COST["boot_s"] + COST["image_s"] + 8 * 0.03 + COST["resumed_step_s"] + saves.load_s
    assert time.restart_s == pytest.approx(time.num_interruptions * restart_s)
    assert time.waiting_s == pytest.approx(time.num_interruptions * COST["replacement_s"])


def test_a_run_that_is_undone_faster_than_it_trains_never_ends():
    prediction, work = parts(["store.checkpoint_every=0"], samples=65_536 * 10**7)
    made_bill = bill(prediction, work, "spot", PRICE, Failures(20.0, 5.0, True, ""))
    assert made_bill.time is None
    assert made_bill.total_usd is None
    assert "never end" in made_bill.missing


def test_dollars_are_machine_hours_times_price():
    prediction, work = parts(nodes=4, samples=65_536 * 360_000)
    paid = add_storage(bill(prediction, work, "on_demand", PRICE, NO_FAILURE), 73.0)
    hours = paid.time.total_s / 3600
    assert paid.usd_per_hour == 88.0
    assert paid.machines_usd == pytest.approx(88.0 * hours)
    assert paid.storage_usd == pytest.approx(73.0 * hours / 730)
    assert paid.total_usd == pytest.approx(paid.machines_usd + paid.storage_usd)
    assert paid.epoch_usd == pytest.approx(88.0 * (3600 + paid.saves.num_saves * paid.saves.pause_s) / 3600, rel=1e-3)


def test_a_machine_that_went_is_not_paid_while_the_others_wait():
    prediction, work = parts(nodes=2, samples=65_536 * 10**7)
    paid = bill(prediction, work, "spot", PRICE, Failures(0.1, 120.0, True, ""))
    assert paid.machines_usd == pytest.approx(8.0 * (2 * paid.time.total_s - paid.time.waiting_s) / 3600)


def test_a_block_is_paid_by_complete_days():
    price = replace(PRICE, block_usd_per_hour=10.0)
    prediction, work = parts(samples=65_536 * 360_000)
    assert bill(prediction, work, "block", price, NO_FAILURE).machines_usd == 240.0
    long = workload_of(prediction.setup.spec, DataSize(65_536 * 360_000 * 30, 0))
    assert bill(prediction, long, "block", price, NO_FAILURE).machines_usd == 480.0


@pytest.mark.parametrize(
    ("purchase", "rate"),
    [("on_demand", 22.0), ("spot", 8.0), ("commit_1y", 13.2), ("commit_3y", None), ("block", None)],
)
def test_every_way_to_pay_has_its_own_rate(purchase, rate):
    assert hourly_usd(PRICE, purchase) == (pytest.approx(rate) if rate else None)


def test_a_missing_price_is_reported_and_is_not_nothing():
    prediction, work = parts()
    for price, where in ((replace(PRICE, spot_usd_per_hour=None), " in us-west-2"), (None, "")):
        paid = add_storage(bill(prediction, work, "spot", price, NO_FAILURE), 10.0)
        assert paid.total_usd is None
        assert paid.machines_usd is None
        assert paid.epoch_usd is None
        assert paid.missing == f"no price on spot known{where}"
        assert paid.time is not None


def test_machines_fail_more_often_the_more_there_are():
    catalog = shipped_catalog()
    p4d = catalog.machines["p4d.24xlarge"]
    one, eight = (failures_of(catalog, p4d, n, "us-west-2", "on_demand") for n in (1, 8))
    assert eight.per_hour == pytest.approx(8 * one.per_hour)
    assert one.per_hour == pytest.approx(8 / 50_700)
    assert not one.has_notice
    spot = failures_of(catalog, p4d, 2, "us-west-2", "spot")
    assert spot.per_hour == pytest.approx(2 * catalog.interruptions(p4d, "us-west-2").per_hour)
    assert (spot.has_notice, spot.grace_s) == (True, 120.0)
    assert "an assumption" in spot.why


def test_what_the_spec_says_of_failures_and_notices_wins():
    sets = ["store.hours_between_failures=3", "place.grace_s=7"]
    estimate = hand_estimator(lambda _: 0.01, sets=sets, purchase="spot")(shipped_catalog().machines["p4d.24xlarge"], 4)
    failures = estimate.bills["spot"].failures
    assert failures.per_hour == pytest.approx(1 / 3)
    assert failures.grace_s == 7
    assert "store.hours_between_failures = 3" in failures.why


def test_spot_with_interruptions_takes_longer_and_mostly_costs_less():
    estimator = hand_estimator(lambda _: 0.05, data_size=DataSize(65_536 * 10**6, 0), region="us-west-2")
    estimate = estimator(shipped_catalog().machines["p4d.24xlarge"], 4)
    assert estimate.total_s("spot") > estimate.total_s("on_demand")
    assert estimate.total_usd("spot") < estimate.total_usd("on_demand")
