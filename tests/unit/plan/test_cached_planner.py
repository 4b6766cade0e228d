"""The closed form is asked once for clusters that it cannot tell apart, and for no others."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_setups import shipped_catalog

from embark.model.placement import Cluster, TooLarge
from embark.plan import closed_form as remembered
from embark.plan.closed_form import CachedPlanner, closed_form
from embark.plan.predict import cluster_of
from embark.plan.prediction import Setup
from embark.spec import load_spec

GIB = 1024.0**3
LARGE = load_spec("criteo-1tb", ["model.num_tables=3", "model.rows_per_table=40000000"])
"""57 GiB of tables."""
SMALL = load_spec("quickstart", ["model.num_tables=4", "model.rows_per_table=3000000"])
PLANNER = CachedPlanner()


def answer_of(planner, spec, cluster):
    try:
        return planner(spec, cluster)
    except TooLarge as error:
        return str(error)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4, 16]))
def test_a_remembered_plan_is_the_plan(number, nodes):
    machines = [m for m in shipped_catalog().machines.values() if m.num_gpus <= 16]
    cluster = cluster_of(Setup(SMALL, machines[number % len(machines)], nodes))
    assert answer_of(PLANNER, SMALL, cluster) == answer_of(closed_form, SMALL, cluster)


def test_tables_in_the_host_s_memory_are_planned_for_each_host():
    planner = CachedPlanner()
    roomy = Cluster(1, 1, 39 * GIB, 200 * GIB)
    assert planner(LARGE, roomy).is_on_host
    with pytest.raises(TooLarge):
        planner(LARGE, replace(roomy, host_bytes=20 * GIB))
    assert planner(LARGE, replace(roomy, device_bytes=140 * GIB)).is_on_host is False


def test_links_and_hosts_do_not_ask_again_where_the_devices_hold_all(monkeypatch):
    requests = []
    monkeypatch.setattr(remembered, "closed_form", lambda *given: requests.append(1) or closed_form(*given))
    planner = CachedPlanner()
    cluster = Cluster(8, 8, 39 * GIB, 1000 * GIB, intra_gbyte_per_s=300.0)
    first = planner(LARGE, cluster)
    assert planner(LARGE, replace(cluster, host_bytes=500 * GIB, inter_gbyte_per_s=12.5)) is first
    assert len(requests) == 1
    planner(LARGE, replace(cluster, num_ranks=16))
    assert len(requests) == 2
