"""A Google Cloud project is asked through gcloud, whose answers have its real form."""

from __future__ import annotations

import pytest

from embark.doctor.account import check_account, need_of
from embark.doctor.host import Check
from embark.launch.shell import Shell
from embark.spec import load_spec

REGION = {"name": "us-central1", "status": "UP", "quotas": [
    {"limit": 24.0, "metric": "CPUS", "usage": 0.0}, {"limit": 16.0, "metric": "NVIDIA_H100_GPUS", "usage": 8.0},
    {"limit": 0.0, "metric": "PREEMPTIBLE_NVIDIA_H100_GPUS", "usage": 0.0}]}
PROJECT = {"name": "research", "quotas": [{"limit": 16.0, "metric": "GPUS_ALL_REGIONS", "usage": 8.0}]}
ZONES = [{"name": "a3-highgpu-8g", "zone": "https://www.googleapis.com/compute/v1/projects/p/zones/us-central1-c"},
         {"name": "a3-highgpu-8g", "zone": "us-central1-a"}]
BILLING = {"billingAccountName": "billingAccounts/01ABCD-234567-89EF01", "billingEnabled": True,
           "name": "projects/research/billingInfo", "projectId": "research"}
BUDGETS = [{"displayName": "embark", "name": "billingAccounts/x/budgets/1"}]


def answers(**other: object) -> dict[str, object]:
    return {"auth list": [{"account": "ann@example.com", "status": "ACTIVE"}],
            "config list core/project": {"core": {"project": "research"}}, "compute regions describe": REGION,
            "compute project-info describe": PROJECT, "compute machine-types list": ZONES,
            "billing projects describe": BILLING, "billing budgets list": BUDGETS, **other}


def checks_of(*sets: str, machine: str = "a3-highgpu-8g") -> dict[str, Check]:
    spec = load_spec("quickstart", [f"place.machine={machine}", "place.region=us-central1", *sets])
    return {check.name: check for check in check_account(need_of(spec), Shell())}


def test_a_project_that_may_start_the_machine(cli):
    cli("gcloud", answers())
    found = checks_of()
    assert {name: check.verdict for name, check in found.items()} == {
        "account": "ok", "quota NVIDIA_H100_GPUS": "ok", "quota GPUS_ALL_REGIONS": "ok", "machine offered": "ok",
        "budgets": "ok"}
    assert found["account"].found == "project research as ann@example.com"
    assert found["quota NVIDIA_H100_GPUS"].found == "16 GPUs, 8 in use; the run takes 8"
    assert found["machine offered"].found == "a3-highgpu-8g in us-central1-a, us-central1-c"


def test_the_project_of_the_spec_goes_before_the_configured_one(cli, tmp_path):
    cli("gcloud", answers())
    assert checks_of("place.account=other-project")["account"].found.startswith("project other-project")
    words = (tmp_path / "programs" / "gcloud.asked").read_text()
    assert "--project=other-project" in words
    assert "config list" not in words


def test_two_machines_pass_both_quotas(cli):
    cli("gcloud", answers())
    found = checks_of("place.nodes=2")
    for name in ("quota NVIDIA_H100_GPUS", "quota GPUS_ALL_REGIONS"):
        assert found[name].verdict == "wrong"
        assert "ask for 24" in found[name].fix


def test_spot_has_a_quota_of_its_own(cli):
    cli("gcloud", answers())
    assert checks_of("place.spot=true")["quota PREEMPTIBLE_NVIDIA_H100_GPUS"].verdict == "wrong"


def infos(*rows: tuple[str, dict[str, str], str]) -> list[dict[str, object]]:
    """As Cloud Quotas answers: place, dimensions and value; a value of 0 is left out."""
    return [{"dimensionsInfos": [{"applicableLocations": [place], "dimensions": dimensions,
                                  "details": {"value": value} if value else {}} for place, dimensions, value in rows]}]


def test_a_family_whose_quota_has_dimensions_is_asked_of_cloud_quotas(cli, tmp_path):
    cli("gcloud", answers(**{"beta quotas info list": infos(
        ("us-central1", {"region": "us-central1"}, "0"), ("us-central1", {"gpu_family": "NVIDIA_H200"}, "8"),
        ("us-east1", {"gpu_family": "NVIDIA_H200"}, "64"))}))
    name = "quota GPUS_PER_GPU_FAMILY, gpu_family=NVIDIA_H200"
    assert checks_of(machine="a3-ultragpu-8g")[name].verdict == "ok"
    check = checks_of("place.nodes=2", machine="a3-ultragpu-8g")[name]
    assert (check.verdict, check.found) == ("wrong", "8 GPUs; the run takes 16")
    assert "--filter=quotaId=GPUS-PER-GPU-FAMILY-per-project-region" in (
        tmp_path / "programs" / "gcloud.asked").read_text()


def test_a_tpu_vm_counts_in_its_zone_and_its_region(cli):
    cli("gcloud", answers(**{"beta quotas info list": infos(
        ("us-east5-b", {"zone": "us-east5-b"}, "16"), ("us-east5", {"region": "us-east5"}, ""))}))
    found = checks_of("place.target=tpu-vm", "place.region=us-east5", machine="v6e-16")
    assert found["quota TPUV6EPerProjectPerZoneForTPUAPI"].verdict == "ok"
    assert found["quota TPUV6EPerProjectPerRegionForTPUAPI"].found == "0 chips; the run takes 16"
    assert "quota GPUS_ALL_REGIONS" not in found


def test_vertex_ai_has_a_quota_of_its_own(cli):
    cli("gcloud", answers(**{"beta quotas info list": infos(("us-central1", {}, "4"))}))
    check = checks_of("place.target=vertex")["quota aiplatform.googleapis.com/custom_model_training_nvidia_h100_gpus"]
    assert (check.verdict, check.found) == ("wrong", "4 GPUs; the run takes 8")


def test_a_quota_that_google_does_not_list_is_reported_not_to_be_known(cli):
    cli("gcloud", answers(**{"beta quotas info list": []}))
    check = checks_of(machine="a3-ultragpu-8g")["quota GPUS_PER_GPU_FAMILY, gpu_family=NVIDIA_H200"]
    assert check.verdict == "warning"
    assert "iam-admin/quotas" in check.fix


def test_a_zone_without_the_machine_is_wrong_with_those_that_have_it(cli):
    cli("gcloud", answers())
    assert checks_of("place.zone=us-central1-f")["machine offered"].fix == (
        "set place.zone to one of us-central1-a, us-central1-c")
    cli("gcloud", answers(**{"compute machine-types list": []}))
    assert checks_of()["machine offered"].verdict == "wrong"


def test_a_tpu_without_a_machine_type_is_looked_up_as_an_accelerator(cli):
    listed = "compute tpus accelerator-types list"
    cli("gcloud", answers(**{listed: [{"type": "v2-8"}], "compute machine-types list": []}))
    offered = checks_of("place.target=tpu-vm", machine="v2-8")["machine offered"]
    assert (offered.verdict, offered.found) == ("ok", "v2-8 in us-central1-b")
    cli("gcloud", answers(**{listed: []}))
    assert checks_of("place.target=tpu-vm", machine="v2-8")["machine offered"].verdict == "wrong"


def test_a_project_that_nobody_pays_for_is_wrong(cli):
    cli("gcloud", answers(**{"billing projects describe": {"billingEnabled": False, "billingAccountName": ""}}))
    assert checks_of()["billing"].verdict == "wrong"


def test_no_budget_is_a_warning(cli):
    cli("gcloud", answers(**{"billing budgets list": []}))
    assert checks_of()["budgets"].verdict == "warning"


def test_no_project_is_wrong_and_nothing_more_is_asked(cli):
    cli("gcloud", answers(**{"config list core/project": {}}))
    found = checks_of()
    assert list(found) == ["account"]
    assert "gcloud config set project" in found["account"].fix


def test_nobody_logged_in_is_one_sentence(cli):
    cli("gcloud", answers(**{"auth list": []}))
    found = checks_of()
    assert [(check.verdict, check.fix) for check in found.values()] == [("wrong", "gcloud auth login")]


@pytest.mark.parametrize(("text", "verdict", "words"), [
    ("ERROR: (gcloud.compute.regions.describe) There was a problem refreshing your current auth tokens: "
     "Reauthentication failed. cannot prompt during non-interactive execution.\n", "wrong", "gcloud auth login"),
    ("ERROR: (gcloud.compute.regions.describe) Could not fetch resource:\n - Required 'compute.regions.get' permission "
     "for 'projects/research/regions/us-central1'\n", "warning", "roles/compute.viewer"),
    ("ERROR: (gcloud.compute.regions.describe) PERMISSION_DENIED: Compute Engine API has not been used in project 1 "
     "before or it is disabled. reason: SERVICE_DISABLED\n", "wrong", "gcloud services enable"),
    ("ERROR: (gcloud.compute.regions.describe) Could not fetch resource:\n - The resource 'projects/research' was not "
     "found\n", "wrong", "place.account"),
    ("ERROR: something new\n", "warning", "ask again"),
])
def test_what_gcloud_refuses_is_one_sentence_with_its_fix(cli, text: str, verdict: str, words: str):
    cli("gcloud", answers(), {"compute regions describe": text})
    found = checks_of()
    assert found["quota"].verdict == verdict
    assert words in found["quota"].fix
    assert found["machine offered"].verdict == "ok"


def test_a_missing_gcloud_is_reported_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (check,) = checks_of().values()
    assert (check.name, check.verdict) == ("account", "wrong")
    assert "gcloud, Google Cloud's command line, is not installed" in check.found
    assert check.fix
