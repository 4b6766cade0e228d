"""`embark plan --serve`: the rate of a replica follows from what was measured, and everything else from that."""

from __future__ import annotations

import json
import math
import random

import pytest
from plan_setups import shipped_catalog

from embark.catalog.machine import CLOUDS
from embark.cli.console import Console
from embark.cli.plan import plan as plan_command
from embark.errors import ExitCode, UserError
from embark.plan import serving
from embark.plan.serving import (
    ServeRequest,
    max_utilization,
    num_cells,
    p99_ms,
    plan_serving,
    replica_bytes,
    request_cpu_s,
    table_bytes,
)
from embark.spec import load_spec, resolve

QUICKSTART = load_spec("quickstart", [])
LARGE = load_spec("criteo-1tb", [])


def cheapest(request, spec=QUICKSTART):
    found = plan_serving(spec, request)
    assert found.is_ok
    return found, found.offers[0]


@pytest.mark.parametrize("qps", [1, 40, 500, 20_000])
@pytest.mark.parametrize("target_ms", [30, 60, 200])
def test_no_fewer_replicas_would_do(qps, target_ms):
    found = plan_serving(QUICKSTART, ServeRequest(qps, target_ms, rows_per_request=32))
    cpu_s = request_cpu_s(QUICKSTART, 32)

    def holds(num):
        busy = qps * cpu_s / num
        return busy <= serving.MAX_UTILIZATION + 1e-9 and p99_ms(cpu_s, busy) <= target_ms + 1e-6

    needed = found.num_replicas - found.num_spare
    assert found.num_spare == 1
    assert holds(needed)
    assert needed == 1 or not holds(needed - 1)
    assert found.p99_ms == pytest.approx(p99_ms(cpu_s, qps * cpu_s / needed))


@pytest.mark.parametrize("utilization", [0.005, 0.05, 0.2, 0.5, 0.75])
def test_the_waiting_is_that_of_a_simulated_queue(utilization):
    draw, clock, free, times = random.Random(7), 0.0, 0.0, []
    for _ in range(60_000):
        clock += draw.expovariate(utilization)
        free = max(clock, free) + 1.0
        times.append(free - clock)
    simulated = sorted(times)[int(0.99 * len(times))]
    assert p99_ms(1e-3, utilization) == pytest.approx(simulated, rel=0.1)


def shared_core(load, speedup, num=30_000):
    """p99 of two processes on the two threads of a core, in units of a request's time alone, and the share of these two
    vCPUs that they take. While both are at work the core is `speedup` times as fast as with one."""
    draw, clock, busy, times = random.Random(7), 0.0, 0.0, []
    queues, left = ([], []), [0.0, 0.0]
    due, num_sent = draw.expovariate(load), 0
    while num_sent < num or any(queues):
        at_work = [process for process in (0, 1) if queues[process]]
        rate = 1.0 if len(at_work) == 1 else speedup / 2
        step = min([due - clock, *(left[process] / rate for process in at_work)])
        clock += step
        busy += step * len(at_work) / 2
        for process in at_work:
            left[process] -= step * rate
            if left[process] < 1e-9:
                times.append(clock - queues[process].pop(0))
                left[process] = 1.0
        if clock >= due:
            process = draw.randrange(2)
            left[process] = left[process] if queues[process] else 1.0
            queues[process].append(due)
            num_sent += 1
            due = due + draw.expovariate(load) if num_sent < num else math.inf
    return sorted(times)[int(0.99 * num)], busy / clock


@pytest.mark.parametrize("load", [0.2, 0.5, serving.MAX_UTILIZATION])
def test_two_processes_on_one_core_answer_within_the_plan(load):
    planned = p99_ms(1e-3, load)
    assert shared_core(load, 1.25)[0] <= planned
    assert planned < shared_core(load, 1.0)[0] <= 1.35 * planned


def test_the_autoscaler_starts_before_a_core_is_busier_than_planned():
    """Its target is of vCPUs."""
    busiest = shared_core(serving.MAX_UTILIZATION, 1.0)[1]
    assert busiest == pytest.approx(serving.VCPU_TARGET, abs=0.03)
    assert shared_core(serving.MAX_UTILIZATION, 1.25)[1] < busiest


def test_the_highest_utilization_is_the_one_whose_p99_is_the_target():
    for target_ms in (13, 18, 23):
        busy = max_utilization(0.01, target_ms / 1e3)
        assert busy == serving.MAX_UTILIZATION or p99_ms(0.01, busy) == pytest.approx(target_ms, rel=0.03)
    assert max_utilization(0.01, 1.0) == serving.MAX_UTILIZATION
    assert max_utilization(0.01, 0.009) == 0


def test_a_latency_below_one_request_names_the_least_possible():
    found = plan_serving(QUICKSTART, ServeRequest(10, 0.5))
    assert not found.is_ok
    assert f"allow more than {p99_ms(request_cpu_s(QUICKSTART, 128), 0):.3g} ms" in found.sentence


def test_memory_is_the_tables_of_each_type_and_less_of_it_is_cheaper():
    rows = sum(table.rows for table in LARGE.model.table_list())
    dim = LARGE.model.embedding_dim
    found = plan_serving(LARGE, ServeRequest(500, 200, tables="int8"))
    by_tables = {one.tables: one for one in found.by_tables}
    assert {name: one.table_bytes for name, one in by_tables.items()} == {
        "fp32": 4 * dim * rows, "fp16": 2 * dim * rows, "int8": (dim + 8) * rows, "int4": (dim // 2 + 4) * rows}
    costs = [one.offer.usd_per_month for one in found.by_tables]
    assert costs == sorted(costs, reverse=True)
    assert found.replica_bytes == replica_bytes(LARGE, "int8") == by_tables["int8"].replica_bytes


def test_rows_that_features_share_are_counted_once():
    tables = [{"name": "item", "rows": 1_000}, {"name": "history", "shares": "item", "multi_hot": 5}]
    spec = resolve({"model": {"tables": tables, "num_dense": 2, "embedding_dim": 16}})
    assert table_bytes(spec, "fp16") == 1_000 * 16 * 2
    assert num_cells(spec) == 2 + 1 + 5


def test_replicas_fit_their_machines_and_the_cheapest_comes_first():
    found, best = cheapest(ServeRequest(500, 200, tables="int8"), LARGE)
    machine = shipped_catalog().cpu_machines[best.machine]
    assert best.replicas_per_machine * found.replica_bytes <= machine.allocatable_gib * 2**30
    assert best.replicas_per_machine * found.replica_vcpus <= machine.vcpus
    assert best.num_machines == math.ceil(found.num_replicas / best.replicas_per_machine)
    priced = [one.usd_per_month for one in found.offers if one.usd_per_month is not None]
    assert priced == sorted(priced)
    assert any("a replica needs" in one.why_not for one in found.offers)


@pytest.mark.parametrize(("spot", "field"), [(False, "on_demand_usd_per_hour"), (True, "spot_usd_per_hour")])
def test_dollars_are_those_of_the_catalog(spot, field):
    request = ServeRequest(300, 50, cloud="aws", region="us-east-2", spot=spot)
    _, best = cheapest(request)
    hourly = getattr(shipped_catalog().prices[best.machine, "us-east-2"], field)
    assert best.usd_per_month == pytest.approx(hourly * best.num_machines * 730)
    assert best.usd_per_million == pytest.approx(best.usd_per_month / (300 * 3600 * 730 / 1e6))


def test_machines_are_those_of_the_cloud_whose_region_it_is():
    spec = load_spec("quickstart", ["place.region=eastus"])
    assert {one.cloud for one in plan_serving(spec, ServeRequest(10, 100)).offers} == {"azure"}
    found = plan_serving(spec, ServeRequest(10, 100, cloud="gcp"))
    assert found.is_ok
    assert {one.cloud for one in found.offers} == {"gcp"}
    assert {one.cloud for one in plan_serving(QUICKSTART, ServeRequest(10, 100, region="us-east-2")).offers} == {"aws"}


def test_every_cloud_has_machines_with_prices():
    for cloud in CLOUDS:
        _, best = cheapest(ServeRequest(10, 100, cloud=cloud))
        assert best.cloud == cloud


def test_why_not_fewer_and_why_not_smaller_is_said():
    found, _ = cheapest(ServeRequest(500, 200, tables="int8"), LARGE)
    needed = found.num_replicas - 1
    assert found.why[0].startswith(f"{needed} replicas at ")
    assert found.why[1].startswith(f"not {needed - 1}: ")
    assert found.why[2].startswith("not the smaller ")


def test_the_measured_figures_are_of_bench_results():
    cost = serving.measured_cost()
    assert cost.date in cost_section()
    for seconds in (cost.request_s, cost.column_s, cost.cell_s):
        assert f"{seconds * 1e6:.3g} µs" in cost_section()


def cost_section():
    from pathlib import Path

    text = (Path(__file__).parents[3] / "bench" / "RESULTS.md").read_text()
    return text.partition("### Serve: CPU time of a request")[2].partition("\n## ")[0]


def test_the_command_prints_it_and_dumps_it(capsys):
    flags = {"serve": True, "qps": 200, "p99_ms": 40, "tables": "int8", "console": Console()}
    assert plan_command("quickstart", **flags) == ExitCode.DONE
    out = capsys.readouterr().out
    for expected in ("quickstart: 200 requests/s of 128 rows in 40 ms (p99): ", "a million requests", "int4",
                     "fitted to"):
        assert expected in out
    assert plan_command("quickstart", **{**flags, "console": Console(json=True)}) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["num_replicas"] >= 2


@pytest.mark.parametrize(("flags", "says"), [
    ({"serve": True, "qps": 1.0}, "--serve needs --p99-ms"), ({"qps": 1.0}, "--qps is about serving"),
    ({"serve": True, "qps": 0.0, "p99_ms": 1.0}, "--qps 0 must be greater"),
    ({"serve": True, "qps": 1.0, "p99_ms": 1.0, "exact": True}, "--exact a training run"),
    ({"serve": True, "qps": 1.0, "p99_ms": 99.0, "rows": 0}, "--rows 0"),
    ({"serve": True, "qps": 1.0, "p99_ms": 99.0, "cloud": "awz"}, "'awz': no such cloud"),
    ({"serve": True, "qps": 1.0, "p99_ms": 99.0, "cloud": "gcp", "cpu_machine": "m7i.xlarge"}, "not a machine of gcp"),
    ({"serve": True, "qps": 1.0, "p99_ms": 99.0, "cpu_machine": "m7i.2xlarg"}, "no machine without accelerators"),
], ids=str)
def test_a_wrong_question_is_refused(flags, says):
    with pytest.raises(UserError, match=says.replace("(", r"\(")):
        plan_command("quickstart", console=Console(), **flags)
