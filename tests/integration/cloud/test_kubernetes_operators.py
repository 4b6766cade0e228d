"""Runs on Kubernetes that another program stands between: KubeRay's RayJob."""

from __future__ import annotations

import pytest
from integration.cloud.kubernetes_api import KubernetesApi, kubernetes_api
from integration.cloud.kubernetes_launch import launched, place, settle, spec_of
from launch_shells import CtrlC, use_shell

from embark.cli.console import Console
from embark.cli.launch import launch_run
from embark.cli.status import status as status_command
from embark.errors import ExitCode, Interrupted, UserError
from embark.launch.backends.kubernetes.kubectl import NoSuchKind
from embark.launch.run_registry import find_run, list_runs

RAY_POD = {"app.kubernetes.io/component": "worker"}


@pytest.fixture
def api(tmp_path, monkeypatch):
    with kubernetes_api() as server:
        settle(server, tmp_path, monkeypatch)
        for variable in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        yield server


def test_without_an_address_a_ray_run_is_a_rayjob_from_its_pods_to_its_end(api: KubernetesApi, capsys):
    handle, kubernetes = launched("place.target=ray"), place()
    assert handle.backend == "kubernetes"
    made = api.objects[("rayjobs", "embark", "dlrm")]
    assert made["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 2
    assert "ray_train.py" in api.objects[("configmaps", "embark", "dlrm-spec")]["data"]
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                     "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}
    api.pod("dlrm-head", "dlrm", index=0, container="ray-head", phase="Running",
            labels={"app.kubernetes.io/component": "head"})
    api.pod("dlrm-machines-0", "dlrm", index=0, container="ray-worker", phase="Running")
    api.pod("dlrm-machines-1", "dlrm", index=1, container="ray-worker", conditions=(unschedulable,))
    status = kubernetes.status(handle)
    assert status.state == "pending"
    assert "1 of 2 pods run; dlrm-machines-1 waits: no node has enough GPUs free" in status.reason
    api.pod("dlrm-machines-1", "dlrm", index=1, container="ray-worker", phase="Running")
    assert kubernetes.status(handle).state == "running"

    api.pod("dlrm-abcde", "dlrm-submitter", index=0, container="ray-job-submitter", phase="Running",
            labels={"batch.kubernetes.io/job-name": "dlrm"})
    api.log("dlrm-abcde", "(RayTrainWorker pid=7) 2026-11-15T11:00:00.000001Z [rank 0]:step 1")
    (line,) = kubernetes.logs(handle)
    assert (line.source, line.text) == ("rank 0", "step 1")

    made["status"] = {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "reason": "AppFailed",
                      "message": "Job entrypoint command failed with exit code 64", "failed": 2}
    assert status_command("dlrm", console=Console()) == ExitCode.OTHER
    assert "AppFailed: Job entrypoint command failed with exit code 64" in capsys.readouterr().out
    assert kubernetes.status(handle).num_restarts == 2
    made["status"] = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}
    assert kubernetes.status(handle).state == "succeeded"
    kubernetes.cancel(handle)
    assert not api.names("rayjobs") | api.names("configmaps")


def test_a_cluster_without_the_operator_gets_the_install_command(tmp_path, monkeypatch):
    with kubernetes_api(without=("ray.io/v1",)) as server:
        settle(server, tmp_path, monkeypatch)
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        with pytest.raises(NoSuchKind) as caught:
            launch_run(Console(quiet=True), spec_of("place.target=ray"), yes=True, dry_run=False)
        assert "helm install kuberay-operator" in caught.value.fix
        assert not server.objects
        assert not list_runs().runs


@pytest.mark.parametrize(("step", "is_after"), [
    (6, True), *(pytest.param(step, False, marks=pytest.mark.slow) for step in (4, 5, 6))])
def test_ctrl_c_as_a_rayjob_is_made_says_what_is_there(api: KubernetesApi, monkeypatch, step, is_after):
    """As for a Job: the namespace, the server's dry run, the object."""
    use_shell(monkeypatch, lambda: CtrlC(step, is_after=is_after))
    with pytest.raises(Interrupted) as caught:
        launch_run(Console(quiet=True), spec_of("place.target=ray"), yes=True, dry_run=False)
    assert bool(api.names("rayjobs")) == (step == 6 and is_after)
    assert "namespace embark" in caught.value.what
    assert ("rayjob.ray.io/dlrm" in caught.value.what) == (step == 6)


def test_a_context_of_kubectl_can_be_named_and_runs_are_found_by_it(api: KubernetesApi, capsys):
    with pytest.raises(UserError, match="elsewhere"):
        launch_run(Console(quiet=True), spec_of(), yes=True, dry_run=False, context="elsewhere")
    assert not api.objects
    assert launch_run(Console(quiet=True), spec_of(), yes=True, dry_run=False, context="training") == 0
    assert find_run("dlrm").handle.where["context"] == "training"
    assert status_command("dlrm", context="training", console=Console(quiet=True)) == 0
    with pytest.raises(UserError, match="nothing was launched under that name"):
        status_command("dlrm", context="elsewhere", console=Console(quiet=True))
    with pytest.raises(UserError, match="--context applies to kubectl"):
        launch_run(Console(quiet=True), spec_of("place.machine=", "place.nodes=1"), yes=True, dry_run=False,
                   context="training")


def test_status_shows_what_the_cluster_reported_last(api: KubernetesApi, capsys):
    launched()
    for number in range(7):
        api.event("dlrm", "FailedCreate", f"quota is used up, try {number}")
    capsys.readouterr()
    assert status_command("dlrm", console=Console()) == 0
    output = capsys.readouterr().out
    assert "last events from" in output
    assert "try 6" in output
    assert "try 1" not in output
