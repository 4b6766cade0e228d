import pytest

from embark.catalog.search import (
    MachineFilter,
    compare_machines,
    find_machine,
    find_volume,
    lowest_price,
    price_in,
    search_machines,
)
from embark.errors import UserError


def search(*arguments):
    return [(one.machine, one.price) for one in search_machines(*arguments)]


def compare(*arguments):
    return [(one.machine, one.price) for one in compare_machines(*arguments)]


@pytest.mark.parametrize(
    ("result", "name"),
    [("p4d.24xlarge", "p4d.24xlarge"), ("P4D.24XLARGE ", "p4d.24xlarge"), ("ND96asr_v4", "Standard_ND96asr_v4"),
     ("standard_nd96asr_v4", "Standard_ND96asr_v4"), ("v5e-4", "v5litepod-4"), ("tpu-v5litepod-4", "v5litepod-4"),
     ("tpu-v4-8", "v4-8")],
)
def test_a_machine_is_found_by_any_of_its_names(catalog, result, name):
    assert find_machine(catalog, result).name == name


@pytest.mark.parametrize(
    ("result", "near"),
    [("p4.24xlarge", "'p4d.24xlarge' or 'p4de.24xlarge'"), ("a2-highgpu-16g", "a2-highgpu-1g"),
     ("ND96asr", "Standard_ND96asr_v4"), ("zzzzzzzzzzzz", "embark catalog list"), ("", "embark catalog list")],
)
def test_an_unknown_machine_brings_the_nearest_names(catalog, result, near):
    with pytest.raises(UserError, match="no such machine") as caught:
        find_machine(catalog, result)
    assert near in caught.value.fix


def names(pairs):
    return [machine.name for machine, _ in pairs]


def test_wanted_narrows_by_all_it_says(catalog):
    assert set(names(search(catalog, MachineFilter(cloud="azure", gpu="h100")))) == {
        "Standard_NC40ads_H100_v5", "Standard_NC80adis_H100_v5", "Standard_ND96isr_H100_v5"}
    assert names(search(catalog, MachineFilter(words=("INFINIBAND", "a100-80")))) == [
        "Standard_ND96amsr_A100_v4"
    ]
    assert {m.gpu.name for m, _ in search(catalog, MachineFilter(gpu="A100", cloud="gcp"))} == {
        "A100",
        "A100-80GB",
    }
    assert all(m.gpu_memory_gib >= 1000 for m, _ in search(catalog, MachineFilter(min_memory_gib=1000)))
    assert "a2-ultragpu-8g" in names(search(catalog, MachineFilter(min_memory_gib=640, cloud="gcp")))
    assert names(search(catalog, MachineFilter(words=("nothing-like-it",)))) == []


def test_with_a_region_only_what_it_has_is_found_at_its_price(catalog):
    found = search(catalog, MachineFilter(region="us-central2"))
    assert found
    assert {price.region for _, price in found} == {"us-central2"}
    assert all(name.startswith("v4-") for name in names(found))


def test_without_a_region_the_price_is_the_lowest(catalog):
    (machine, price), = search(catalog, MachineFilter(words=("a3-highgpu-8g",)))
    assert price.on_demand_usd_per_hour == min(p.on_demand_usd_per_hour for p in catalog.prices_of(machine))


@pytest.mark.parametrize(
    ("wanted", "what", "fix"),
    [
        (MachineFilter(cloud="aw"), "no such cloud", "'aws'"),
        (MachineFilter(gpu="H1000"), "no such accelerator", "'H100'"),
        (MachineFilter(region="us-est-1"), "no such region", "us-east-1"),
        (MachineFilter(region="%%%%"), "no such region", "embark catalog show"),
    ],
)
def test_what_is_misspelt_is_named_with_what_is_near(catalog, wanted, what, fix):
    with pytest.raises(UserError, match=what) as caught:
        search(catalog, wanted)
    assert fix in caught.value.fix


def test_lists_are_sorted_and_what_has_no_price_comes_last(catalog):
    by_price = search(catalog, MachineFilter(words=("nd", "infiniband")), "price")
    assert names(by_price)[-1] == "Standard_ND128isr_GB300_v6"
    assert by_price[-1][1] is None
    known = [p.on_demand_usd_per_hour for _, p in search(catalog, MachineFilter(cloud="aws"), "price")
             if p and p.on_demand_usd_per_hour]
    assert known == sorted(known)
    memories = [m.gpu_memory_gib for m, _ in search(catalog, MachineFilter(), "memory")]
    assert memories == sorted(memories)


def test_a_region_without_the_machine_brings_those_that_have_it(catalog):
    with pytest.raises(UserError, match="not offered in eu-west-1") as caught:
        price_in(catalog, find_machine(catalog, "p4de.24xlarge"), "eu-west-1")
    assert "us-east-1, us-west-2" in caught.value.fix


def test_a_machine_without_any_price_says_so(catalog):
    with pytest.raises(UserError, match="no price of it in any region") as caught:
        price_in(catalog, find_machine(catalog, "ND128isr_GB300_v6"), "eastus")
    assert "refresh" in caught.value.fix
    assert lowest_price(catalog, find_machine(catalog, "ND128isr_GB300_v6"), "on_demand") is None


def test_a_price_that_is_missing_is_none_and_what_hangs_on_it_too(catalog):
    price = price_in(catalog, find_machine(catalog, "p5e.48xlarge"), "us-west-2")
    assert price.on_demand_usd_per_hour is None
    assert price.spot_saving is None
    assert price.committed_usd_per_hour(1) is None
    assert price.spot_usd_per_hour == pytest.approx(24.51, abs=0.01)


def test_a_commitment_takes_off_its_share(catalog):
    price = price_in(catalog, find_machine(catalog, "a2-highgpu-8g"), "us-central1")
    assert price.committed_usd_per_hour(1) == pytest.approx(29.3871 * 0.63)
    assert price.committed_usd_per_hour(3) == pytest.approx(29.3871 * 0.35)


def test_comparing_keeps_the_order_and_tells_every_wrong_name(catalog):
    assert names(compare(catalog, ["p5.48xlarge", "a3-highgpu-8g"])) == ["p5.48xlarge", "a3-highgpu-8g"]
    with pytest.raises(UserError) as caught:
        compare(catalog, ["p5.48xlarg", "p4d.24xlarge", "a3-highgpu-9g"])
    assert "p5.48xlarg'" in caught.value.what
    assert "a3-highgpu-9g" in caught.value.what
    with pytest.raises(UserError, match="not offered in us-central1"):
        compare(catalog, ["a3-highgpu-8g", "p5.48xlarge"], "us-central1")


def test_a_volume_is_found_by_its_name(catalog):
    assert find_volume(catalog, "gcs-standard").kind == "object"
    with pytest.raises(UserError) as caught:
        find_volume(catalog, "gcs-standart")
    assert "gcs-standard" in caught.value.fix
