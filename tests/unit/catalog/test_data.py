"""The shipped data: every row has its source, and what it says adds up."""

import csv
import math
import re
import tomllib
from dataclasses import fields

import pytest

from embark.catalog.load import HERE, KINDS, ORIGIN_COLUMNS, read_csv
from embark.catalog.machine import CLOUDS, CpuMachine, Machine
from embark.catalog.search import find_machine

GUIDES_NAME = [
    "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "ND96asr_v4", "ND96amsr_A100_v4", "ND96isr_H100_v5",
    *(f"a2-highgpu-{n}g" for n in (1, 2, 4, 8)), *(f"a2-ultragpu-{n}g" for n in (1, 2, 4, 8)),
    *(f"a3-highgpu-{n}g" for n in (1, 2, 4, 8)),
    "n1-standard-8+1xT4", "g2-standard-8", "n1-standard-8+1xV100",
    "v2-8", "v3-8", "v4-8", "v4-32", "v4-4096", "v4-8192", "v5e-4", "v5p-8",
]
SUCCESSORS = [
    "p5e.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge", "p6-b300.48xlarge", "a3-megagpu-8g", "a3-ultragpu-8g",
    "a4-highgpu-8g", "a4x-highgpu-4g", "a4x-maxgpu-4g-metal", "ND96isr_H200_v5", "ND128isr_NDR_GB200_v6",
    "ND128isr_GB300_v6", "v6e-8", "v6e-256",
]


@pytest.mark.parametrize("name", GUIDES_NAME + SUCCESSORS)
def test_every_machine_that_guides_name_and_its_successor_is_there(catalog, name):
    assert find_machine(catalog, name).num_gpus >= 1


def test_every_row_has_a_source_a_date_and_a_confidence(catalog):
    expected_values = [catalog.machines, catalog.gpus, catalog.fabrics, catalog.quotas, catalog.volumes, catalog.prices,
            catalog.spot_interruptions, catalog.zones]
    origins = [row.origin for rows in expected_values for row in rows.values()]
    origins += [volume.price_origin for volume in catalog.volumes.values()]
    assert len(origins) > 1_300
    for origin in origins:
        assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", origin.date)
        assert origin.confidence in ("read", "documented", "unconfirmed")
        assert all(url.startswith("https://") for url in catalog.urls(origin.source)), origin.source


@pytest.mark.parametrize("name", KINDS)
def test_a_toml_file_has_only_fields_that_are_read(name):
    known = {field.name for field in fields(KINDS[name])} | {*ORIGIN_COLUMNS} | {f"price_{o}" for o in ORIGIN_COLUMNS}
    for row in tomllib.loads((HERE / f"{name}.toml").read_text()).values():
        assert set(row) <= known


@pytest.mark.parametrize(("name", "kind"), [("machines", Machine), ("cpu_machines", CpuMachine)])
def test_a_csv_file_has_the_fields_that_are_read(name, kind):
    known = [field.name for field in fields(kind) if field.name not in ("reserve", "origin")]
    assert sorted(read_csv(HERE / f"{name}.csv")[0]) == sorted([*known, *ORIGIN_COLUMNS])


def test_a_name_is_of_one_machine(catalog):
    names = [name.lower() for m in catalog.machines.values() for name in (m.name, *m.also)]
    names += [name.lower() for name in catalog.cpu_machines]
    assert len(names) == len(set(names))
    for file, machines in (("machines.csv", catalog.machines), ("cpu_machines.csv", catalog.cpu_machines)):
        assert len(read_csv(HERE / file)[1]) == len(machines)


def test_what_a_machine_names_is_of_its_cloud(catalog):
    for _, row in read_csv(HERE / "machines.csv")[1]:
        machine = catalog.machines[row["name"]]
        assert (machine.quota.name if machine.quota else "") == row.get("quota", "")
        assert machine.fabric.cloud == machine.cloud
        assert machine.quota is None or machine.quota.cloud == machine.cloud
        assert machine.num_gpus % machine.num_hosts == 0
        assert (machine.num_gpus == 1) == (machine.link == "")


def test_quotas_accelerators_and_interruptions_name_what_there_is(catalog):
    for quota in catalog.quotas.values():
        assert {quota.vertex, quota.tpu_vm} <= {"", *catalog.quotas}
    assert all((gpu.seen_mib or 0) <= gpu.memory_mib for gpu in catalog.gpus.values())
    rates = catalog.spot_interruptions
    assert len(read_csv(HERE / "interruptions.csv")[1]) == len(rates)
    assert {machine for _, machine, _ in rates} <= {"", *catalog.machines}
    assert all((cloud, "", "") in rates for cloud in CLOUDS)


def test_accelerators_times_memory_is_what_the_cloud_publishes(catalog):
    with (HERE / "machines.csv").open(newline="") as file:
        published = {row["name"]: float(row["total_gpu_memory_gib"]) for row in csv.DictReader(file)
                     if row["total_gpu_memory_gib"]}
    assert len(published) > 130
    for name, gib in published.items():
        # Some clouds write GB for GiB: 24 GB are 22.35 GiB.
        assert 0.97 <= gib / catalog.machines[name].gpu_memory_gib <= 1.08, name


def test_prices_are_positive_and_spot_is_below_on_demand(catalog):
    num_both = 0
    for price in catalog.prices.values():
        figures = price.on_demand_usd_per_hour, price.spot_usd_per_hour
        assert any(figure is not None for figure in (*figures, price.block_usd_per_hour)), price
        assert all(figure > 0 for figure in figures if figure is not None), price
        if None not in figures:
            num_both += 1
            assert price.spot_usd_per_hour < price.on_demand_usd_per_hour, price
    assert num_both > 1_000


def test_the_price_of_an_accelerator_is_similar_in_every_region(catalog):
    """One slipped digit, or a price without its cards, stands out."""
    for machine in catalog.machines.values():
        known = [p.on_demand_usd_per_hour for p in catalog.prices_of(machine) if p.on_demand_usd_per_hour is not None]
        if known:
            assert max(known) / min(known) < 2, machine.name


def test_larger_sizes_of_one_family_cost_in_proportion(catalog):
    for family in ("a2-highgpu", "a2-ultragpu", "a3-highgpu"):
        one = catalog.prices[f"{family}-1g", "us-central1"].on_demand_usd_per_hour
        assert catalog.prices[f"{family}-8g", "us-central1"].on_demand_usd_per_hour == pytest.approx(8 * one, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "region", "on_demand", "spot"),
    [
        ("p4d.24xlarge", "us-west-2", 21.96, 10.71), ("p5.48xlarge", "us-west-2", 55.04, 20.39),
        ("p5en.48xlarge", "us-west-2", 63.30, 26.83), ("Standard_ND96asr_v4", "eastus", 27.20, 2.99),
        ("Standard_ND96isr_H100_v5", "eastus", 98.32, None), ("a2-highgpu-8g", "us-central1", 29.39, 16.97),
        ("a3-highgpu-8g", "us-central1", 87.83, 52.70), ("v4-8", "us-central2", 12.88, 3.69),
        ("a3-ultragpu-8g", "europe-west4", None, 55.27), ("g2-standard-4", "us-central1", 0.71, None),
        ("a2-megagpu-16g", "us-central1", 55.74, None), ("Standard_ND96isr_H200_v5", "eastus2", 84.80, None),
        ("a4-highgpu-8g", "us-central1", None, 39.63),
    ],
)
def test_prices_that_were_read(catalog, name, region, on_demand, spot):
    price = catalog.prices[name, region]
    for have, expected in ((price.on_demand_usd_per_hour, on_demand), (price.spot_usd_per_hour, spot)):
        assert have is None if expected is None else have == pytest.approx(expected, abs=0.005)


def test_most_rows_and_all_prices_but_two_are_confirmed(catalog):
    doubted = [price.machine for price in catalog.prices.values() if not price.origin.is_confirmed]
    assert doubted == ["Standard_ND128isr_NDR_GB200_v6", "v4-8192"]
    confirmed = [machine.name for machine in catalog.machines.values() if machine.is_confirmed]
    assert {"p4d.24xlarge", "p5.48xlarge", "Standard_ND96isr_H100_v5", "a3-highgpu-8g", "v5p-8"} <= set(confirmed)
    # Its accelerator's datasheet was not at hand, though the machine's listing was.
    assert catalog.machines["p6-b300.48xlarge"].origin.is_confirmed
    assert "p6-b300.48xlarge" not in confirmed


@pytest.mark.parametrize(
    ("name", "region", "one_year", "three_years"),
    [("p5.48xlarge", "us-east-1", 34.68, 23.78), ("p6-b300.48xlarge", "us-east-1", 112.15, 61.52),
     ("Standard_ND96isr_H100_v5", "eastus", 62.92, 43.16), ("Standard_ND96isr_H200_v5", "eastus2", 46.52, 42.22),
     ("a2-highgpu-8g", "us-central1", 18.51, 10.29), ("a3-highgpu-1g", "us-central1", 7.62, 4.82)],
)
def test_commitments_cost_what_was_published(catalog, name, region, one_year, three_years):
    price = catalog.prices[name, region]
    assert price.committed_usd_per_hour(1) == pytest.approx(one_year, rel=0.005)
    assert price.committed_usd_per_hour(3) == pytest.approx(three_years, rel=0.005)


def test_what_is_not_sold_on_demand_says_how_it_is(catalog):
    assert not find_machine(catalog, "p5e.48xlarge").is_on_demand
    assert "flex-start" in find_machine(catalog, "a3-highgpu-4g").sold
    assert find_machine(catalog, "a3-highgpu-8g").is_on_demand
    assert catalog.prices["a4-highgpu-8g", "us-central1"].block_usd_per_hour == pytest.approx(90.216)
    assert catalog.prices["p5.48xlarge", "us-east-1"].block_usd_per_hour < 55.04


def test_spot_is_lost_at_the_rate_nearest_to_the_machine(catalog):
    p5, p4d = find_machine(catalog, "p5.48xlarge"), find_machine(catalog, "p4d.24xlarge")
    of_aws = catalog.interruptions(p4d, "us-east-1")
    assert catalog.interruptions(p5, "us-east-1").per_hour < of_aws.per_hour
    assert catalog.interruptions(p5, "eu-west-2") == catalog.interruptions(p5, "") == of_aws
    assert not of_aws.origin.is_confirmed
    # Ten of a hundred a day: ninety are left after 24 hours.
    gcp = catalog.interruptions(find_machine(catalog, "a2-highgpu-8g"), "us-central1")
    assert math.exp(-24 * gcp.per_hour) == pytest.approx(0.9, abs=1e-3)
    assert all(0 < catalog.interruptions(machine, "").per_hour < 0.1 for machine in catalog.machines.values())


def test_a_price_of_700_dollars_is_the_source_s_placeholder_and_not_taken(catalog):
    assert ("v6e-1", "us-central1") in catalog.prices
    assert not [p for p in catalog.prices.values() if p.on_demand_usd_per_hour == 700]


@pytest.mark.parametrize(
    ("name", "num", "resource"),
    [("p4d.24xlarge", 4, "vpc.amazonaws.com/efa"), ("p5.48xlarge", 32, "vpc.amazonaws.com/efa"),
     ("p5en.48xlarge", 16, "vpc.amazonaws.com/efa"), ("p6-b200.48xlarge", 8, "vpc.amazonaws.com/efa"),
     ("p4de.24xlarge", 4, "vpc.amazonaws.com/efa"), ("p5e.48xlarge", 32, "vpc.amazonaws.com/efa"),
     ("p6-b300.48xlarge", 16, "vpc.amazonaws.com/efa"), ("ND96isr_H100_v5", 8, "rdma/ib"),
     ("ND128isr_GB300_v6", 4, "rdma/ib"), ("a3-highgpu-8g", 4, ""), ("a3-megagpu-8g", 8, ""),
     ("a3-ultragpu-8g", 8, ""), ("a4-highgpu-8g", 8, ""), ("a4x-highgpu-4g", 4, "")],
)
def test_a_machine_s_fabric_devices_and_what_pods_ask_for(catalog, name, num, resource):
    machine = find_machine(catalog, name)
    assert machine.num_fabric_devices == num
    assert machine.fabric.kubernetes_resource == resource


def test_pods_get_less_than_the_machine_has_and_most_of_it(catalog):
    for machine in catalog.machines.values():
        assert 0.6 < machine.allocatable_gib / machine.memory_gib < 1, machine.name
        assert 0.9 < machine.allocatable_vcpus / machine.vcpus < 1, machine.name


def test_what_a_gke_node_keeps_is_by_its_published_steps(catalog):
    reserve = find_machine(catalog, "a2-highgpu-8g").reserve
    kept_gib = 4 * 0.25 + 4 * 0.20 + 8 * 0.10 + 112 * 0.06 + (680 - 128) * 0.02 + 100 / 1024
    assert reserve.allocatable_gib(680) == pytest.approx(680 - kept_gib)
    assert reserve.allocatable_vcpus(96) == pytest.approx(96 - 0.06 - 0.01 - 0.01 - 92 * 0.0025)


def test_the_slices_of_a_tpu_are_complete_hosts(catalog):
    slices = [m for m in catalog.machines.values() if m.gpu.kind == "tpu"]
    assert len(slices) > 40
    for machine in slices:
        assert machine.gpus_per_host * machine.num_hosts == machine.num_gpus
        assert machine.gpus_per_host in (1, 4, 8)
    assert find_machine(catalog, "v4-8").num_gpus == 4
    assert find_machine(catalog, "v5e-16").num_hosts == 4


def test_storage_reads_as_fast_as_the_tib_that_are_paid_for(catalog):
    assert catalog.volumes["fsx-lustre-1000"].gbyte_per_s(1.2) == pytest.approx(1.2)
    assert catalog.volumes["filestore-zonal"].gbyte_per_s(10) == pytest.approx(2.726)
    assert catalog.volumes["s3-standard"].gbyte_per_s(1) == catalog.volumes["s3-standard"].gbyte_per_s(100) == 12.5
    assert catalog.volumes["fsx-lustre-125"].usd_per_month(1.2) == pytest.approx(178.2, abs=0.1)
    assert {volume.cloud for volume in catalog.volumes.values()} == {"aws", "azure", "gcp"}
