"""Every setting has its reason; none is one of those that hurt; graces are the clouds' own."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from render_jobs import MACHINES, job_of

import embark.render.settings as module
from embark.catalog import load_catalog
from embark.catalog.pricing import GRACES
from embark.render.settings import fabric_needs, grace_s, settings_of, topology_xml

TABLE = tomllib.loads(Path(module.__file__).with_name("settings.toml").read_text())


@pytest.mark.parametrize("machine", MACHINES)
def test_every_setting_says_why(machine):
    settings = settings_of(job_of(machine))
    assert len({setting.name for setting in settings}) == len(settings)
    assert all(setting.why and setting.value for setting in settings)


def test_every_table_has_a_source_and_a_date():
    tables = [*TABLE["every"], *TABLE["several"], *TABLE["fabric"].values(), *TABLE["grace"].values(),
              *TABLE["topology"].values()]
    assert all(table["source"] and table["date"] for table in tables)


def test_every_fabric_of_the_table_is_of_the_catalog():
    assert set(TABLE["fabric"]) <= set(load_catalog().fabrics)


@pytest.mark.parametrize("machine", ["p4d.24xlarge", "p5.48xlarge"])
def test_efa_is_left_to_its_plugin(machine):
    names = {setting.name for setting in settings_of(job_of(machine))}
    assert not names & {"FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "NCCL_PROTO", "NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL"}


@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_switches_the_fabric_off(machine):
    values = {setting.name: setting.value for setting in settings_of(job_of(machine))}
    assert "NCCL_IB_DISABLE" not in values
    assert values.get("NCCL_NET_GDR_LEVEL", "PIX") == "PIX"
    assert values.get("NCCL_P2P_DISABLE", "0") == "0"


@pytest.mark.parametrize("machine", MACHINES)
def test_one_machine_alone_asks_for_no_fabric(machine):
    job = job_of(machine, nodes=1)
    assert fabric_needs(job) == fabric_needs(job_of("g5.xlarge", nodes=1))
    assert not [s for s in settings_of(job) if s.name.startswith(("NCCL_SOCKET", "NCCL_GPUDIRECT", "NCCL_TOPO", "LD_"))]


@pytest.mark.parametrize(("machine", "spot", "known"), [
    ("p5.48xlarge", True, "aws"), ("Standard_ND96asr_v4", True, "azure"), ("a2-highgpu-8g", True, "gke-spot"),
])
def test_the_grace_is_the_one_the_trainer_knows_of(machine, spot, known):
    assert grace_s(job_of(machine, spot=spot)) == GRACES[known][0]


def test_a_grace_of_the_spec_counts_up_to_what_the_cloud_can_give():
    assert grace_s(job_of("p5.48xlarge", spot=True, grace_s=60.0)) == 60
    assert grace_s(job_of("Standard_ND96asr_v4", spot=True, grace_s=300.0)) == 30
    assert grace_s(job_of("a2-highgpu-8g", spot=True, grace_s=100.0)) == 100
    assert grace_s(job_of("a2-highgpu-8g", grace_s=600.0)) == 600


@pytest.mark.parametrize("machine", ["Standard_ND96asr_v4", "Standard_ND96isr_H100_v5"])
def test_the_topology_pairs_every_gpu_with_its_adapter(machine):
    job = job_of(machine)
    root = ElementTree.fromstring(topology_xml(job))
    leaves = [pci for pci in root.iter("pci") if not list(pci)]
    gpus = [pci.get("busid") for pci in leaves if pci.get("class") == "0x030200"]
    adapters = [pci.get("busid") for pci in leaves if pci.get("class") == "0x020700"]
    assert len(set(gpus)) == len(set(adapters)) == job.num_processes == job.machine.num_fabric_devices
    for switch in (pci for pci in root.iter("pci") if list(pci)):
        assert len({pci.get("class") for pci in switch}) == 2
    assert topology_xml(job_of(machine, nodes=1)) == ""


def test_a_run_is_reported_the_price_of_all_its_machines_where_it_is_known():
    job = job_of("p5.48xlarge")
    values = {setting.name: setting.value for setting in settings_of(job)}
    assert float(values["EMBARK_USD_PER_HOUR"]) == pytest.approx(job.usd_per_hour, rel=1e-5)
    unpriced = replace(job, spec=job.spec.model_copy(
        update={"place": job.spec.place.model_copy(update={"region": "af-south-1"})}))
    assert "EMBARK_USD_PER_HOUR" not in {setting.name for setting in settings_of(unpriced)}
