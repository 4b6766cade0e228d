"""What storage must do, and which volume does it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from plan_setups import made, setup_of, shipped_catalog

from embark.plan.cost import COST, Failures, saves_of
from embark.plan.plan import plan, plan_volume
from embark.plan.storage import TIB, best_offer, fetches_per_file, storage_need, storage_offers
from embark.plan.workload import DataSize, workload_of
from embark.render.job import make_job
from embark.render.volumes import render_volumes
from embark.spec import load_spec

ROOT = Path(__file__).parents[3]
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
    assert wanted * 1000 / 125 <= lustre.tib <= wanted * 1000 / 125 + 2400 / 1024, "FSx is sold by 2400 GiB"
    assert lustre.tib * 1024 % 2400 == 0
    assert lustre.usd_per_month == pytest.approx(lustre.tib * 1024 * lustre.volume.usd_per_gib_month)
    assert found["fsx-lustre-1000"].tib < lustre.tib


def test_a_volume_is_never_smaller_than_it_can_be_bought_or_than_the_data():
    prediction, need = needed(samples=10**11, step_s=10.0)
    for offer in storage_offers(shipped_catalog(), prediction.setup, need):
        assert offer.tib >= max(offer.volume.min_tib, need.tib) - 1e-6


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


GUIDES = ROOT / "examples" / "cloud_deployment"


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_a_guide_s_plan_counts_the_volume_that_its_script_buys(cloud):
    spec = load_spec(str(GUIDES / cloud / "run.toml"))
    found = plan(spec)
    volume, bill = found.estimate.volume, found.estimate.bills["on_demand"]
    script = (GUIDES / cloud / "storage.sh").read_text()
    assert int(re.search(r"CAPACITY_GIB:-(\d+)", script)[1]) == round(volume.tib * 1024)
    assert volume.is_enough
    assert found.estimate.prediction.step.parts_s["storage"] <= found.estimate.prediction.step.total_s
    copy_s = found.estimate.need.data_bytes / 1e9 / min(0.4, volume.gbyte_per_s) if cloud != "aws" else 0.0
    hours = (copy_s + bill.time.total_s) / 3600
    assert bill.storage_usd == pytest.approx(volume.usd_per_month / COST["hours_per_month"] * hours)


def test_a_run_waits_for_a_volume_that_cannot_be_bought_fast_enough():
    spec = load_spec(str(GUIDES / "azure" / "run.toml"), ["place.volume=azure-netapp-standard"])
    found = plan(spec)
    volume, step = found.estimate.volume, found.estimate.prediction.step
    assert (volume.tib, volume.is_enough, volume.why) == (100, False, "at most 100 TiB")
    assert step.bound_by == "storage"
    assert step.total_s == pytest.approx(65_536 * found.estimate.need.sample_bytes / 1e9 / 1.678)
    assert "bound by storage" in found.sentence


def test_checkpoints_on_the_volume_make_it_larger():
    spec = load_spec(str(GUIDES / "azure" / "run.toml"))
    machine = shipped_catalog().machines["Standard_ND96asr_v4"]
    on_volume = spec.model_copy(update={"store": spec.store.model_copy(update={"root": "/mnt/data/runs"})})
    assert plan_volume(on_volume, machine).tib > plan_volume(spec, machine).tib


def test_a_spec_that_hides_its_size_buys_the_smallest_volume():
    spec = load_spec(str(GUIDES / "azure" / "run.toml"))
    data = spec.data.model_copy(update={"path": "/mnt/data/unknown"})
    hidden = spec.model_copy(update={"data": type(data)(kind="prepared", path=data.path)})
    job = make_job(hidden, shipped_catalog())
    assert job.bought_volume is None
    script = next(file.text for file in render_volumes(job) if file.path == "storage.sh")
    assert "CAPACITY_GIB:-1024" in script
    assert "data.num_train_samples" in script
