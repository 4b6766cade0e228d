"""The whole catalog, ranked; the front that nothing beats."""

from collections import Counter
from itertools import pairwise

import pytest
from plan_setups import hand_estimator, real_estimator, shipped_catalog

from embark.errors import UserError
from embark.plan.survey import (
    LEAST_GAIN,
    Bounds,
    node_counts,
    pareto_front,
    rank,
    survey_catalog,
)
from embark.plan.workload import DataSize

WORK = DataSize(65_536 * 100_000, 0)


def by_memory(setup):
    """As if time went with memory: more of anything is faster."""
    return 40.0 / (setup.num_nodes * setup.machine.gpu_memory_gib)


@pytest.fixture(scope="module")
def found():
    return survey_catalog(hand_estimator(by_memory, data_size=WORK), max_nodes=4)


def pairs(estimates, purchase="on_demand"):
    return [(e.total_usd(purchase), e.total_s(purchase)) for e in estimates]


def test_every_machine_of_three_clouds_is_tried(found):
    tried = {e.setup.machine.name for e in (*found.fitting, *found.unpriced)} | {
        s.machine.name for s in found.too_small}
    assert tried == {m.name for m in shipped_catalog().machines.values() if m.gpu.kind == "gpu" or m.num_hosts <= 4}
    assert {e.setup.machine.cloud for e in found.fitting} == {"aws", "azure", "gcp"}
    assert {e.setup.num_nodes for e in found.fitting} == {1, 2, 4}


def test_ranking_is_by_dollars_or_by_hours(found):
    by_usd, by_s = (pairs(rank(found.fitting, "on_demand", by)) for by in ("dollars", "hours"))
    assert by_usd == sorted(by_usd)
    assert [s for _, s in by_s] == sorted(s for _, s in by_s)


def test_the_front_is_what_nothing_beats(found):
    best = pareto_front(found.fitting, "on_demand")
    firm = [e for e in found.fitting if not e.is_rough]
    for estimate in firm:
        usd, total_s = estimate.total_usd("on_demand"), estimate.total_s("on_demand")
        beaten = any(u <= usd and s <= total_s and (u, s) != (usd, total_s) for u, s in pairs(firm))
        is_hardly_faster = any(u <= usd and s * (1 - LEAST_GAIN) <= total_s for u, s in pairs(best))
        assert beaten or is_hardly_faster or (usd, total_s) in pairs(best)
        if estimate in best:
            assert not beaten
    assert all(fast < slow * (1 - LEAST_GAIN) for (_, fast), (_, slow) in pairwise(pairs(best)))
    assert [u for u, _ in pairs(best)] == sorted((u for u, _ in pairs(best)), reverse=True)


def test_bounds_keep_what_is_inside_them(found):
    middle = rank(found.fitting, "on_demand", "hours")[len(found.fitting) // 2]
    bounds = Bounds(deadline_s=middle.total_s("on_demand"), budget_usd=middle.total_usd("on_demand"))
    retained = rank(found.fitting, "on_demand", "dollars", bounds)
    assert middle in retained
    assert all(u <= bounds.budget_usd and s <= bounds.deadline_s for u, s in pairs(retained))
    assert len(retained) < len(found.fitting)
    assert rank(found.fitting, "on_demand", "dollars", Bounds(deadline_s=1.0)) == []


def test_more_machines_are_tried_only_while_they_help():
    unsaved = ["store.checkpoint_every=0", "store.checkpoint_at_end=false"]  # saves do get faster
    never_faster = survey_catalog(hand_estimator(lambda _: 0.01, sets=unsaved, data_size=WORK), max_nodes=16)
    assert max(Counter(e.setup.machine.name for e in never_faster.fitting).values()) == 2
    always = survey_catalog(hand_estimator(by_memory, data_size=WORK), max_nodes=8, cloud="azure")
    assert max(e.setup.num_nodes for e in always.fitting) == 8


def test_more_machines_are_tried_until_it_fits():
    estimator = hand_estimator(lambda s: 0.01 if s.num_nodes >= 4 else None, data_size=WORK)
    needs_four = survey_catalog(estimator, max_nodes=8)
    assert {e.setup.num_nodes for e in needs_four.fitting} == {4, 8}
    assert all(s.machine.gpu.kind == "tpu" for s in needs_four.too_small)
    assert needs_four.why_not is None


def test_what_cannot_hold_the_tables_is_not_even_predicted():
    requests = []
    estimator = hand_estimator(lambda s: requests.append((s.machine.name, s.num_nodes)))
    nothing = survey_catalog(estimator, max_nodes=2)
    assert ("g4dn.xlarge", 1) not in requests  # 16 + 16 GiB, and the tables are 98
    assert ("p4d.24xlarge", 1) in requests
    assert nothing.why_not.why == "too small by hand"
    assert "g4dn.xlarge" in {s.machine.name for s in nothing.too_small}


def test_a_batch_is_dealt_out_equally():
    p4d = shipped_catalog().machines["p4d.24xlarge"]
    assert node_counts(p4d, 65_536, 16) == [1, 2, 4, 8, 16]
    assert node_counts(p4d, 24, 16) == [1]
    assert node_counts(p4d, 20, 16) == []
    assert node_counts(shipped_catalog().machines["v5litepod-8"], 65_536, 16) == [1]
    assert node_counts(shipped_catalog().machines["v5litepod-256"], 65_536, 16) == []


def test_cloud_and_region_narrow_the_catalog():
    only = survey_catalog(hand_estimator(by_memory, region="us-west-2"), max_nodes=1)
    assert {e.price.region for e in only.fitting} == {"us-west-2"}
    azure = survey_catalog(hand_estimator(by_memory), max_nodes=1, cloud="azure")
    assert {e.setup.machine.cloud for e in azure.fitting} == {"azure"}
    with pytest.raises(UserError, match="no such region"):
        survey_catalog(hand_estimator(by_memory, region="us-west-22"), max_nodes=1)


def test_the_region_is_where_the_chosen_way_is_cheapest():
    catalog = shipped_catalog()
    p4d = catalog.machines["p4d.24xlarge"]
    for purchase, field in (("on_demand", "on_demand_usd_per_hour"), ("spot", "spot_usd_per_hour")):
        known = [getattr(p, field) for p in catalog.prices_of(p4d) if getattr(p, field) is not None]
        price = hand_estimator(by_memory, purchase=purchase).price_of(p4d)
        assert getattr(price, field) == min(known)


def test_what_has_no_price_is_separate(found):
    assert all(e.total_usd("on_demand") is None for e in found.unpriced)
    assert all(e.total_usd("on_demand") > 0 for e in found.fitting)


def test_a_rough_estimate_pushes_nothing_off_the_front():
    estimator = hand_estimator(lambda s: 1e-9 if s.machine.gpu.kind == "tpu" else by_memory(s), data_size=WORK)
    with_tpus = survey_catalog(estimator, max_nodes=1)
    assert any(e.is_rough for e in with_tpus.fitting)
    assert not any(e.is_rough for e in pareto_front(with_tpus.fitting, "on_demand"))


def test_criteo_is_surveyed_over_all_of_the_catalog(tmp_path):
    complete = survey_catalog(real_estimator(tmp_path, data_size=DataSize(4_195_197_692)))
    assert complete.num_tried > 200
    assert len(pareto_front(complete.fitting, "on_demand")) >= 3
