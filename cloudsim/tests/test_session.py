"""Rehearsals take folders as they are, and a wait for ever ends with a verdict: what waited, and why."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from cloudsim.session import AccountSession
from embark.errors import UserError
from embark.lint.rendered import render_folder
from embark.rehearse import account_scripts
from embark.rehearse.account_scripts import Step, run_step

CLUSTER = """
gcloud components install gke-gcloud-auth-plugin
gcloud config set project your-project
gcloud services enable container.googleapis.com compute.googleapis.com
gcloud container clusters create one --location=us-central1 --num-nodes=1
kubectl apply -f job.yaml
kubectl get pods
"""
JOB = """
apiVersion: batch/v1
kind: Job
metadata:
  name: one
spec:
  template:
    spec:
      restartPolicy: Never
      nodeSelector: {disk: fast}
      containers:
      - {name: main, image: busybox}
"""


def is_running(group: int) -> bool:
    try:
        os.killpg(group, signal.SIG_DFL)
    except ProcessLookupError:
        return False
    return True


def test_a_program_that_waits_for_ever_is_the_verdict_with_its_cause(tmp_path: Path, monkeypatch):
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "account").mkdir()
    with AccountSession("gcp", tmp_path / "account") as session:
        made = session.bash(CLUSTER, tmp_path)
        assert made.returncode == 0, made.stdout
        monkeypatch.setattr(account_scripts, "STEP_LIMIT_S", 10.0)
        ended = run_step(session, Step("follow", "echo $$ >shell\ntail -f /dev/null"), tmp_path)
    assert not ended.is_ok
    assert ended.error.startswith("Job one: one-xxxx0 cannot be scheduled: 0/3 nodes are available"), ended.error
    assert "tail -f /dev/null waits for ever" in ended.error
    group, until = int((tmp_path / "shell").read_text()), time.monotonic() + 60
    while is_running(group):  # It takes its commands with it; the system collects them.
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_folder_is_rehearsed_as_it_is(tmp_path: Path):
    folder = tmp_path / "deploy"
    render_folder("quickstart", ["place.cloud=gcp", "place.target=vm", "store.root=gs://own-7/runs",
                                 "place.image=ghcr.io/me/embark:1"], out=folder)
    script = folder / "vm.sh"
    script.write_text(script.read_text().replace("set -euo pipefail\n", "echo 'edited by hand' >&2\nexit 3\n"))
    result = account_scripts.rehearse_scripts(str(folder), (), lambda step: None)
    assert [(step.title, step.error) for step in result.steps if not step.is_ok] == [("up", "edited by hand")]
    assert "edited by hand" in script.read_text()


@pytest.mark.parametrize(("settings", "what"), [((), "is no folder from embark"), (("name=a",), "--set changes")])
def test_a_folder_is_refused_that_nobody_rendered_or_with_settings(tmp_path: Path, settings, what: str):
    if settings:
        render_folder("quickstart", ["place.cloud=gcp", "store.root=gs://own-7/runs"], out=tmp_path)
    with pytest.raises(UserError, match=what):
        account_scripts.rehearse_scripts(str(tmp_path), settings, lambda step: None)


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_an_example_s_names_become_names_that_the_account_may_have(cloud: str):
    example = Path(__file__).parents[2] / "examples" / "cloud_deployment" / cloud / "run.toml"
    job, settings, assumed = account_scripts.account_job(str(example), ())
    field, name, mine = account_scripts._facts()[cloud]["taken"][0]
    assert name in example.read_text()
    assert any(one.startswith(f"{field}=") and mine in one for one in settings)
    assert assumed[1].startswith(f"{field} is ")
    assert mine in (job.spec.place.storage_account, job.spec.store.root.split("/")[2])
    renamed = [f"{field}={settings[1].partition('=')[2].replace(mine, 'own7')}"]
    assert len(account_scripts.account_job(str(example), renamed)[2]) == 1, "one's own name stays"


@pytest.mark.parametrize(("cloud", "image", "mine"), [
    ("aws", "999988887777.dkr.ecr.eu-west-1.amazonaws.com/team/embark:1",
     "123456789012.dkr.ecr.eu-west-1.amazonaws.com/team/embark:1"),
    ("gcp", "us-central1-docker.pkg.dev/my-project/embark/embark:1",
     "us-central1-docker.pkg.dev/your-project/embark/embark:1")])
def test_an_image_of_another_account_is_renamed_or_refused(cloud: str, image: str, mine: str, tmp_path: Path):
    example = Path(__file__).parents[2] / "examples" / "cloud_deployment" / cloud / "run.toml"
    job, settings, assumed = account_scripts.account_job(str(example), [f"place.image={image}"])
    assert job.image == mine
    assert settings[1] == f"place.image={mine}"
    assert "another project or account" in assumed[0]
    render_folder(str(example), [f"place.image={image}"], out=tmp_path / "run")
    with pytest.raises(UserError, match="another project or account") as refused:
        account_scripts.rehearse_scripts(str(tmp_path / "run"), (), lambda step: None)
    assert f"place.image={mine}" in refused.value.fix


def test_the_registry_may_be_in_another_region_than_the_machines():
    settings = ["place.cloud=aws", "place.target=serve", "place.region=us-east-2", "store.root=s3://own-7/runs",
                "serve.machine=c7i.xlarge", "place.image=123456789012.dkr.ecr.eu-west-1.amazonaws.com/embark:1"]
    job = account_scripts.account_job("quickstart", settings)[0]
    steps = {step.title: step.commands for step in account_scripts.make_steps(job)}
    for title in ("image", "machines", "destroy", "delete bucket and registry"):
        is_of_images = title in ("image", "delete bucket and registry")
        assert re.findall(r"--region (\S+)", steps[title])[0] == ("eu-west-1" if is_of_images else "us-east-2"), title
