"""`embark rehearse --account` goes from an empty account to a trained model and back to nothing."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from integration.account.guide import WarmSession

from embark.__main__ import run
from embark.rehearse import account_scripts

PLACES = {
    "aws": ("place.machine=p4d.24xlarge", "place.region=us-west-2", "place.zone=us-west-2b", "store.root=s3://own-7/runs"),
    "azure": ("place.machine=Standard_ND96asr_v4", "place.region=eastus", "place.zone=1", "store.root=az://own-7/runs",
              "place.storage_account=own7"),
    "gcp": ("place.machine=a2-highgpu-8g", "place.region=us-central1", "place.zone=us-central1-a",
            "store.root=gs://own-7/runs"),
}
POD_STEPS = ["train", "train again: what exists stays", "clean", "destroy"]
MACHINE_STEPS = ["up", "status", "down"]
# Pods of one cloud train; plain machines of the others start and run nothing. The guides cover all of them.
WALKS = {
    "aws": (("place.target=vm", "data.path=s3://own-7/rows"), MACHINE_STEPS),
    "azure": (("place.target=vm", "data.path=az://own-7/rows"), MACHINE_STEPS),
    "gcp": (("place.target=job", "place.volume=filestore-zonal", "data.path=/mnt/data/rows"), POD_STEPS),
}


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, warm_python: str) -> None:
    """Fork `embark` and the programs of pods; plain machines are walked with programs that import all by themselves."""
    monkeypatch.setattr(account_scripts, "AccountSession", partial(WarmSession, python=warm_python))


def rehearse(cloud: str, *more: str) -> int:
    settings = (*PLACES[cloud], "data.kind=prepared", "place.nodes=2", *more)
    words = [word for one in settings for word in ("--set", one)]
    return run(["rehearse", "--account", "quickstart", *words, "--json"])


@pytest.mark.slow
@pytest.mark.parametrize("cloud", WALKS)
def test_a_spec_is_walked_there_and_back(cloud: str, capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    settings, own = WALKS[cloud]
    code = rehearse(cloud, *settings)
    report = json.loads(capsys.readouterr().out)
    failed = [step for step in report["steps"] if not step["is_ok"]]
    assert not failed, failed[0]["output"][-3000:] + failed[0]["error"]
    assert [step["title"] for step in report["steps"] if step["title"] != "tools and project"] == [
        "image", "data", *own, "delete bucket and registry"]
    assert report["paid"] == []
    assert report["not_modelled"]
    assert code == 0
    assert not list(tmp_path.iterdir()), "it writes nothing where it is called"


SERVE = ("place.target=serve", "data.kind=synthetic")
SERVING_STEPS = ["cluster", "artifact", "machines", "launch", "request", "cancel", "destroy"]
CLICKS = """
name = "clicks"

[model]
num_dense = 4
embedding_dim = 16
num_tables = 6
rows_per_table = 20000

[stream]
source = "nats"
topics = ["events.shown"]

[publish]
to = "s3://own-7/clicks"

[store]
root = "s3://own-7/runs"

[place]
target = "follow"
machine = "g5.xlarge"
region = "us-west-2"

[serve]
machine = "m7i.2xlarge"
"""


def assert_scored(report: dict) -> None:
    answer = next(step["output"] for step in report["steps"] if step["title"] == "request")
    assert re.search(r'"(scores|predictions)\\*": ?\[0\.\d+', answer), answer


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("target", ["serve", "follow"])
def test_servers_are_walked_there_and_back(target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    if target == "serve":
        code = rehearse("gcp", *SERVE, "serve.machine=n2-highmem-8")
    else:
        (tmp_path / "clicks.toml").write_text(CLICKS)
        code = run(["rehearse", "--account", str(tmp_path / "clicks.toml"), "--json"])
    report = json.loads(capsys.readouterr().out)
    failed = [step for step in report["steps"] if not step["is_ok"]]
    assert not failed, failed[0]["output"][-3000:] + failed[0]["error"]
    assert [step["title"] for step in report["steps"] if step["title"] != "tools and project"] == [
        "image", *SERVING_STEPS, "delete bucket and registry"]
    assert_scored(report)
    assert report["paid"] == [], "the broker's disk is gone too"
    assert code == 0


ENDPOINTS = {
    "sagemaker": ("aws", "identity", "place.identity=arn:aws:iam::123456789012:role/serve"),
    "cloud-run": ("gcp", "identity", "place.account=your-project"),
    "vertex-endpoint": ("gcp", "identity", "place.account=your-project",
                        "place.identity=server@your-project.iam.gserviceaccount.com"),
    "azureml": ("azure", "workspace"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("target", ENDPOINTS)
def test_endpoints_are_walked_there_and_back(target: str, capsys: pytest.CaptureFixture[str]):
    cloud, before, *settings = ENDPOINTS[target]
    places = [f"--set={one}" for one in PLACES[cloud] if not one.startswith(("place.machine", "place.zone"))]
    code = run(["rehearse", "--account", "quickstart", *places, f"--set=place.target={target}",
                *(f"--set={one}" for one in settings), "--json"])
    report = json.loads(capsys.readouterr().out)
    failed = [step for step in report["steps"] if not step["is_ok"]]
    assert not failed, failed[0]["output"][-3000:] + failed[0]["error"]
    assert [step["title"] for step in report["steps"] if step["title"] != "tools and project"] == [
        "image", "artifact", before, "deploy", "deploy again: what exists stays", "request", "delete",
        "delete bucket and registry"]
    assert_scored(report)
    assert report["paid"] == []
    assert code == 0


READY = "path: /v2/health/ready\n            port: "
SPEC_VOLUME = "configMap:\n          name: clicks"
# File, text, what a person wrote in its place, the step that fails, and its cause.
EDITS = {
    "probe-port": ("serve.yaml", f"{READY}http", f"{READY}8080", "launch",
                   "startupProbe failed: dial tcp :8080: connect: connection refused"),
    "probe-path": ("serve.yaml", "path: /v2/health/live", "path: /v2/healthz/live", "launch",
                   "livenessProbe failed: GET /v2/healthz/live was answered with status 404"),
    "memory": ("serve.yaml", "memory: ", "memory: 10", "launch", "Insufficient memory"),
    "rollout": ("serve.yaml", "maxUnavailable: 1\n  #", "maxUnavailable: 0\n  #", "launch",
                "may not be 0 when `maxSurge` is 0"),
    "target-port": ("serve.yaml", "targetPort: http", "targetPort: 8080", "request", "clicks-serve leads to port 8080"),
    "policy-port": ("serve.yaml", "port: 8000\n    from:", "port: 80\n    from:", "request",
                    "NetworkPolicy clicks-serve lets nobody in to port 8000, only to 80"),
    "broker-class": ("nats.yaml", "storageClassName: embark-gp3", "storageClassName: fast-ssd", "launch",
                     'storageclass.storage.k8s.io "fast-ssd" not found'),
    "spec-name": ("follow.yaml", f"{SPEC_VOLUME}-spec", SPEC_VOLUME, "launch", 'configmap "clicks" not found'),
}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("edit", EDITS)
def test_the_edits_of_servers_manifests_are_rehearsed(edit: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    name, old, new, title, cause = EDITS[edit]
    (tmp_path / "clicks.toml").write_text(CLICKS)
    image = "place.image=123456789012.dkr.ecr.us-west-2.amazonaws.com/embark:1"
    assert run(["render", str(tmp_path / "clicks.toml"), "--out", str(tmp_path / "clicks"), "--set", image]) == 0
    manifest = tmp_path / "clicks" / name
    assert old in manifest.read_text()
    manifest.write_text(manifest.read_text().replace(old, new))
    capsys.readouterr()
    assert run(["rehearse", "--account", str(tmp_path / "clicks"), "--json"]) == 1
    (failed,) = [step for step in json.loads(capsys.readouterr().out)["steps"] if not step["is_ok"]]
    assert (failed["title"], cause in failed["error"]) == (title, True), failed["error"]


def test_a_target_without_machines_of_its_own_is_refused(capsys: pytest.CaptureFixture[str]):
    code = rehearse("gcp", "place.target=kserve", "data.path=gs://own-7/rows", "serve.artifact=gs://bucket/model",
                    "serve.memory_gib=4")
    assert code == 64
    assert "place.target" in capsys.readouterr().err
