"""budget.sh quota: which quotas it asks for, how much of them, and when it fails."""

from __future__ import annotations

import pytest
from recorded_commands import run_script
from render_jobs import job_of

from embark.catalog import load_catalog
from embark.render.monitoring import cloud_quotas, needed_units, quota_name, render_budget

AZURE = """#!/bin/bash
printf 'cores\\tTotal Regional vCPUs\\t1000\\n'
printf 'Standard NDASv4_A100 Family\\tStandard NDASv4_A100 Family vCPUs\\t%s\\n' "$LIMIT"
"""
GOOGLE = """#!/bin/bash
case " $* " in
  *" project-info "*) printf 'GPUS_ALL_REGIONS\\t%s\\n' "$LIMIT" ;;
  *" regions describe "*) printf 'CPUS\\t24.0\\nNVIDIA_A100_GPUS\\t%s.0\\n' "$LIMIT" ;;
  *PerRegion*) printf 'us-east1,us-east5\\t\\t%s\\n' "${REGION_LIMIT-512}" ;;
  *quotaId=*|*metric=*) printf 'us-west1,%s\\t\\t%s\\nus-central1\\tNVIDIA_H200\\t64\\n' "$PLACE" "$LIMIT" ;;
esac
"""


def quota(tmp_path, machine: str, stub: str, env: dict[str, str], **place):
    return run_script(render_budget(job_of(machine, **place)), "budget.sh", ["quota"], tmp_path,
                      {"PROJECT": "p", "RECORD": "", **env}, stub=stub)


@pytest.mark.parametrize(("limit", "code", "words"), [
    ("192", 0, "192, the run needs 192"), ("96", 1, "96 of the 192 that the run needs"), ("", 1, "no such quota"),
])
def test_azure_finds_the_family_by_the_name_that_az_prints(tmp_path, limit, code, words):
    ran = quota(tmp_path, "Standard_ND96asr_v4", AZURE, {"LIMIT": limit})
    assert ran.code == code
    assert f"Standard NDASv4_A100 Family vCPUs: {words}" in ran.output


def test_a_quota_that_is_not_listed_fails_unless_it_is_skipped(tmp_path):
    assert quota(tmp_path, "Standard_NC24ads_A100_v4", AZURE, {"LIMIT": "9999"}).code == 1
    assert quota(tmp_path, "Standard_NC24ads_A100_v4", AZURE, {"LIMIT": "9999", "SKIP_QUOTA": "1"}).code == 0
    ran = quota(tmp_path, "p6-b200.48xlarge", AZURE, {}, spot=True)
    assert ran.code == 1
    assert "has no name in the catalog" in ran.output


@pytest.mark.parametrize(("limit", "code"), [("16", 0), ("8", 1)])
def test_google_gpus_count_in_the_region_and_over_all(tmp_path, limit, code):
    assert quota(tmp_path, "a2-highgpu-8g", GOOGLE, {"LIMIT": limit}).code == code


@pytest.mark.parametrize(("machine", "place", "where", "limit", "code"), [
    ("v6e-16", {"target": "tpu-vm", "zone": "us-east5-b", "nodes": 1}, "us-east5-b", "16", 0),
    ("v6e-16", {"target": "tpu-vm", "zone": "us-east5-b", "nodes": 1}, "us-east5-b", "8", 1),
    ("v6e-16", {"target": "tpu-vm", "zone": "us-east5-b", "nodes": 1}, "us-east5-a", "16", 1),
    ("v6e-16", {"target": "tpu-vm", "zone": "us-east5-b", "nodes": 1}, "us-east5-b", "", 1),
    ("a2-highgpu-8g", {"target": "vertex", "account": "p"}, "us-central1", "16", 0),
    ("a3-ultragpu-8g", {"region": "us-central1", "target": "job"}, "us-central1", "0", 1),
])
def test_cloud_quotas_are_read_for_the_place_of_the_run(tmp_path, machine, place, where, limit, code):
    env = {"LIMIT": limit, "PLACE": where, "REGION": place.get("region", "us-east5"), "ZONE": "us-east5-b"}
    if place["target"] != "tpu-vm":
        env["REGION"] = "us-central1"
    assert quota(tmp_path, machine, GOOGLE, env, **place).code == code


def test_the_region_of_a_tpu_vm_counts_too(tmp_path):
    env = {"LIMIT": "16", "PLACE": "us-east5-b", "REGION_LIMIT": ""}
    ran = quota(tmp_path, "v6e-16", GOOGLE, env, target="tpu-vm", zone="us-east5-b", nodes=1)
    assert ran.code == 1
    assert "TPUV6EPerProjectPerRegionForTPUAPI: 0 of the 16" in ran.output


@pytest.mark.parametrize(("machine", "place", "name", "units"), [
    ("v5litepod-16", {"target": "tpu-vm"}, "TPUV5sLitepodPerProjectPerZoneForTPUAPI", 32),
    ("v5litepod-8", {"target": "tpu-vm", "spot": True},
     "TPUV5sPreemptibleLitepodServingPerProjectPerZoneForTPUAPI", 16),
    ("v5p-8", {"target": "tpu-vm"}, "TPUV5PPerProjectPerZoneForTPUAPI", 16),
    ("v5p-8", {"target": "jobset"}, "TPU_V5P", 8),
    ("v5litepod-16", {"target": "jobset", "spot": True}, "PREEMPTIBLE_TPU_LITE_PODSLICE_V5", 32),
    ("v2-8", {"target": "vertex", "account": "p"}, "aiplatform.googleapis.com/custom_model_training_tpu_v2", 16),
    ("a3-highgpu-8g", {"target": "vertex", "account": "p", "spot": True},
     "aiplatform.googleapis.com/custom_model_training_preemptible_nvidia_h100_gpus", 16),
])
def test_each_api_of_google_counts_for_itself(machine, place, name, units):
    job = job_of(machine, **place)
    assert (quota_name(job)[0], needed_units(job)) == (name, units)


def test_every_tpu_has_a_quota_for_each_target_it_renders_for():
    for machine in load_catalog().machines.values():
        if machine.gpu.kind == "tpu":
            quotas = list(cloud_quotas(job_of(machine.name, nodes=1, target="tpu-vm")))
            assert [quota.is_zonal for quota in quotas] == [True, False], machine.name
