"""What storage must do, and which volume does it."""

from dataclasses import replace

import pytest
from plan_setups import made, setup_of, shipped_catalog

from embark.plan.cost import Failures, saves_of
from embark.plan.storage import TIB, best_offer, fetches_per_file, storage_need, storage_offers
from embark.plan.workload import DataSize, workload_of

SPOT = Failures(0.01, 120.0, True, "spot")
STORED = ("data.kind=prepared", "data.path=s3://bucket/rows")
MOUNTED = ("data.kind=prepared", "data.path=/data/rows")


def needed(machine="p4d.24xlarge", nodes=1, sets=STORED, samples=10**9, step_s=0.01, failures=SPOT):
    prediction = made(setup_of(machine, nodes, sets=list(sets)), step_s)
    work = workload_of(prediction.setup.spec, DataSize(samples, 0))
    return prediction, storage_need(prediction, work, saves_of(prediction, work.num_steps, failures), failures)


def test_reads_are_samples_a_second_times_their_bytes():
    _, need = needed()
    assert need.samples_gbyte_per_s == pytest.approx(65_536 / 0.01 * need.sample_bytes / 1e9)
    assert need.file_gbyte_per_s == need.object_gbyte_per_s == need.samples_gbyte_per_s
    assert need.data_bytes == pytest.approx(1e9 * need.sample_bytes)


def test_every_host_fetches_the_files_whose_rows_it_needs():
    _, need = needed(nodes=4)
    assert need.object_gbyte_per_s == pytest.approx(4 * need.file_gbyte_per_s)
    assert need.object_gbyte_per_s_per_host == pytest.approx(need.file_gbyte_per_s)
    spec = setup_of(sets=[*STORED, "train.batch_size=67108864"]).spec
    large = workload_of(spec, DataSize(10**9, 0))
    assert fetches_per_file(large, 4) == pytest.approx(64 * 2**20 / large.sample_bytes / (67_108_864 / 4) + 1)
    assert fetches_per_file(large, 1) == 1


def test_synthetic_samples_are_drawn_not_read():
    _, need = needed(sets=())
    assert (need.again, need.file_gbyte_per_s, need.data_bytes) == ("drawn", 0.0, 0.0)
    assert need.samples_gbyte_per_s > 0


@pytest.mark.parametrize(
    ("sets", "samples", "again"),
    [
        (MOUNTED, 10**9, "memory"),
        (MOUNTED, 10**11, "storage"),
        (STORED, 10**8, "disk"),
        (STORED, 10**9, "storage"),
        ((*STORED, "data.cache_gb=200"), 10**9, "disk"),
        (("data.kind=columns", "data.path=a.csv", "data.dense_columns=[]", "model.num_dense=0"), 10**9, "memory"),
    ],
)
def test_where_an_epoch_after_the_first_comes_from(sets, samples, again):
    _, need = needed(sets=sets, samples=samples)
    assert need.again == again
    assert "bytes" in need.reads_why


def test_writes_must_end_before_the_next_save_and_after_a_notice_in_time():
    prediction, need = needed(samples=10**12)
    saves = saves_of(prediction, 10**12 // 65_536, SPOT)
    assert need.write_gbyte_per_s == pytest.approx(saves.checkpoint_bytes / saves.every_s / 1e9)
    assert need.grace_gbyte_per_s == pytest.approx(saves.checkpoint_bytes / 120 / 1e9)
    assert need.kept_bytes == pytest.approx(2 * saves.checkpoint_bytes)
    assert needed(failures=replace(SPOT, has_notice=False))[1].grace_gbyte_per_s is None


def test_a_file_system_is_bought_as_large_as_it_must_be_fast():
    prediction, need = needed(step_s=0.001, nodes=2)
    found = {o.volume.name: o for o in storage_offers(shipped_catalog(), prediction.setup, need)}
    lustre = found["fsx-lustre-125"]
    wanted = need.file_gbyte_per_s + need.write_gbyte_per_s
    assert lustre.is_enough
    assert wanted * 1000 / 125 <= lustre.tib <= wanted * 1000 / 125 + 0.1
    assert lustre.usd_per_month == pytest.approx(lustre.tib * 1024 * lustre.volume.usd_per_gib_month)
    assert found["fsx-lustre-1000"].tib < lustre.tib


def test_a_volume_is_never_smaller_than_it_can_be_bought_or_than_the_data():
    prediction, need = needed(samples=10**11, step_s=10.0)
    for offer in storage_offers(shipped_catalog(), prediction.setup, need):
        assert offer.tib >= max(offer.volume.min_tib or 0, need.tib) - 1e-6


def test_only_volumes_of_the_machine_s_cloud_are_offered():
    for name in ("p4d.24xlarge", "Standard_ND96asr_v4", "a2-highgpu-8g"):
        prediction, need = needed(name)
        found = storage_offers(shipped_catalog(), prediction.setup, need)
        assert {o.volume.cloud for o in found} == {prediction.setup.machine.cloud}
        enough = [o.usd_per_month for o in found if o.is_enough and o.usd_per_month is not None]
        assert enough == sorted(enough)
        assert best_offer(found) is found[0]


def test_more_than_the_network_carries_is_enough_nowhere():
    setup = setup_of("p4d.24xlarge", sets=list(STORED))
    slow = replace(setup, machine=replace(setup.machine, network_gbit_per_s=1.0))
    prediction = made(slow)
    work = workload_of(slow.spec, DataSize(10**9, 0))
    need = storage_need(prediction, work, saves_of(prediction, work.num_steps, SPOT), SPOT)
    found = storage_offers(shipped_catalog(), slow, need)
    assert best_offer(found) is None
    assert "the machines' network is too slow" in {o.why for o in found}


def test_more_than_a_volume_can_hold_or_give_is_reported():
    prediction, need = needed("a2-highgpu-8g", sets=MOUNTED, samples=2 * 10**12)
    offers = storage_offers(shipped_catalog(), prediction.setup, need)
    filestore = next(o for o in offers if o.volume.name == "filestore-zonal")
    assert need.data_bytes > 100 * TIB
    assert not filestore.is_enough
    assert "at most 100 TiB" in filestore.why
