"""What KubeRay makes of a RayJob, and what follows from the driver's end."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from render_jobs import job_of

from cloudsim.account import Account
from embark.errors import UserError
from embark.kubernetes.failure_policies import PodEnd
from embark.rehearse.controller import Observer
from embark.rehearse.manifest import read_texts
from embark.rehearse.processes import Start
from embark.rehearse.rehearsal import rehearse
from embark.rehearse.training import PreparedTraining, prepare_training
from embark.render.render import render


@pytest.fixture(scope="module")
def manifest() -> str:
    files = render(job_of("p4d.24xlarge", target="ray", image="app:1", zone="us-west-2b"))
    return next(file.text for file in files if file.path == "rayjob.yaml")


def prepared_job(manifest: str) -> PreparedTraining:
    texts = {"rayjob.yaml": manifest}
    return prepare_training(texts, read_texts(texts), num_processes=1, num_steps=4)


def test_ray_s_sockets_have_short_paths_wherever_temporary_files_go(manifest, tmp_path, monkeypatch):
    folders = []

    def refuse(self, processes, observer, limit_s):
        folders.append(processes.find("/tmp/ray", Start(self.workload.pods[0], 0, 0)))
        raise UserError("refused", fix="none")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(PreparedTraining, "run_pods", refuse)
    with pytest.raises(UserError, match="refused"):
        rehearse(prepared_job(manifest), Observer(lambda *_: None, lambda _: None))
    session = "session_2026-11-16_19-50-00_123456_4194304"
    assert len(f"{folders[0]}/{session}/sockets/plasma_store.1") <= 107
    assert not folders[0].exists()


def test_a_head_workers_and_a_submitter_run_what_kuberay_writes(manifest):
    prepared = prepared_job(manifest)
    head, first, second, submitter = prepared.workload.pods
    assert [pod.name for pod in prepared.workload.trainers] == [first.name, second.name]
    assert head.args[0].startswith("exec ray start --head --num-cpus=0 ")
    assert "; exec ray start --num-cpus=92 --num-gpus=8 " in first.args[0]
    assert "--address=dlrm-head-svc:6379" in first.args[0]
    assert "until [ -e /tmp/ray/session_latest/sockets/raylet ]" in first.args[0]
    assert "until [ -e /tmp/ray/session_latest/sockets/raylet.1 ]" in second.args[0], "one after the other"
    assert submitter.args[0].endswith("ray job submit --address http://dlrm-head-svc:8265 -- python "
                                      "/etc/embark/ray_train.py")
    assert prepared.workload.names["dlrm-head-svc"] == [head.name]
    driver = next(mount.files["ray_train.py"] for mount in head.mounts if "ray_train.py" in mount.files)
    assert 'f"--nproc-per-node=1"' in driver
    assert "NUM_CPUS = 92" in driver, "what the driver asks of Ray is what it asks of the cluster's"


def test_the_driver_s_end_decides_and_another_attempt_gets_a_new_cluster(manifest):
    prepared = prepared_job(manifest)
    head, _, _, submitter = prepared.workload.pods
    policy = prepared.policy
    assert policy.decide(PodEnd(head, 1)).action == "replace"
    assert policy.decide(PodEnd(submitter, 1)).action == "restart all"
    assert policy.decide(PodEnd(submitter, 1)).action == "fail", "backoffLimit is 1"
    assert policy.decide(PodEnd(submitter, 0)).action == "succeed"


def test_without_ray_nothing_is_run_and_that_is_said(manifest, monkeypatch, tmp_path: Path):
    for module in ("embark.rehearse.training", "cloudsim.account"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    prepared = prepared_job(manifest)
    with pytest.raises(UserError, match="Ray is not installed here") as error:
        rehearse(prepared, Observer(lambda *_: None, lambda _: None))
    assert "ray[default,train]" in error.value.fix
    assert any("the drivers of RayJobs: Ray is not installed here" in line
               for line in Account("aws", tmp_path).report().not_modelled)
