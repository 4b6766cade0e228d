"""A run's whole life on Kubernetes: kubectl itself, against an API over HTTP."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
import time

import pytest
from integration.cloud.kubernetes_api import kubernetes_api
from integration.cloud.kubernetes_launch import LAUNCH, ROOT, SETTINGS, launched, place, settle, spec_of, until
from limits import HANG_S

from embark.cli.console import Console
from embark.cli.launch import launch_run
from embark.cli.status import cancel as cancel_command
from embark.cli.status import logs as logs_command
from embark.cli.status import status as status_command
from embark.errors import ExitCode, UserError
from embark.launch.backends.kubernetes.backend import Kubernetes
from embark.launch.run_registry import find_run, list_runs
from embark.store import ChecksumWriter, RunDir, checkpoint_name

TARGETS = {"job": ("jobs", "trainer"), "jobset": ("jobsets", "trainer"), "trainjob": ("trainjobs", "node"),
           "pytorchjob": ("pytorchjobs", "pytorch")}
GPU_MESSAGE = ("0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) didn't match Pod's node "
               "affinity/selector.")


@pytest.fixture
def api(tmp_path, monkeypatch):
    with kubernetes_api() as server:
        settle(server, tmp_path, monkeypatch)
        yield server


def test_a_run_lifecycle(api, capsys):
    assert launch_run(Console(), spec_of(), yes=True, dry_run=False) == 0
    output = capsys.readouterr().out
    assert "fits 2 x p5.48xlarge" in output
    assert "an hour on demand" in output
    assert "launched" in output
    assert api.objects[("jobs", "embark", "dlrm")]["spec"]["completions"] == 2
    assert 'name = "dlrm"' in api.objects[("configmaps", "embark", "dlrm-spec")]["data"]["spec.toml"]
    handle, kubernetes = find_run("dlrm").handle, place()
    assert kubernetes.status(handle).reason == "no pod created yet"

    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": GPU_MESSAGE}
    api.pod("dlrm-0-aaaaa", "dlrm", index=0, phase="Running")
    api.pod("dlrm-1-bbbbb", "dlrm", index=1, conditions=(unschedulable,))
    status = kubernetes.status(handle)
    assert status.state == "pending"
    assert "1 of 2 pods run; dlrm-1-bbbbb waits: no node has enough GPUs free (nvidia.com/gpu)" in status.reason
    assert "quota" in status.fix

    api.pod("dlrm-1-bbbbb", "dlrm", index=1, phase="Running", created="2026-11-15T09:00:00Z")
    assert kubernetes.status(handle).state == "running"

    api.preempt("dlrm-1-bbbbb")
    status = kubernetes.status(handle)
    assert status.state == "restarting"
    assert "machine 1 (dlrm-1-bbbbb) was preempted: its node was tainted" in status.reason
    api.pod("dlrm-1-ccccc", "dlrm", index=1, waits="ContainerCreating")
    status = kubernetes.status(handle)
    assert status.state == "restarting"
    assert "its replacement dlrm-1-ccccc waits: the image is being pulled" in status.reason
    api.pod("dlrm-1-ccccc", "dlrm", index=1, phase="Running")
    status = kubernetes.status(handle)
    assert (status.state, status.num_restarts) == ("running", 1)
    assert [part.name for part in status.replicas] == ["dlrm-0-aaaaa", "dlrm-1-ccccc"]

    api.finish("jobs", "dlrm")
    assert status_command("dlrm", console=Console()) == ExitCode.DONE
    assert "succeeded" in capsys.readouterr().out
    del api.objects[("jobs", "embark", "dlrm")]  # as its ttlSecondsAfterFinished does
    assert status_command("dlrm", console=Console()) == ExitCode.DONE
    output = capsys.readouterr().out
    assert "gone" in output
    assert "it was deleted, or removed a day after it ended" in output
    assert "s3://training/runs/dlrm" in output


@pytest.mark.parametrize("target", TARGETS)
def test_each_kind_of_object_is_handed_over_seen_and_taken_away(api, target):
    plural, container = TARGETS[target]
    handle, kubernetes = launched(f"place.target={target}"), place()
    assert api.names(plural) == {"dlrm"}
    for index in (0, 1):
        api.pod(f"dlrm-{index}", "dlrm", index=index, container=container, phase="Running")
        api.log(f"dlrm-{index}", f"hello from {index}")
    assert kubernetes.status(handle).state == "running"
    assert [line.text for line in kubernetes.logs(handle)] == ["hello from 0", "hello from 1"]
    done = kubernetes.cancel(handle)
    assert done.is_complete
    assert (f"{plural}/dlrm", "Foreground") in api.deletions
    for kind in (plural, "pods", "configmaps", "services", "trainingruntimes"):
        assert not api.names(kind), kind
    assert api.names("namespaces") == {"embark"}
    assert "delete namespace embark" in done.remains[0].remove


def test_merged_logs_continue_through_a_cut_and_a_replaced_pod(api):
    handle, kubernetes = launched(), place()
    for index in (0, 1):
        api.pod(f"dlrm-{index}-a", "dlrm", index=index, phase="Running", created="2026-11-15T09:00:00Z")
    for step in range(3):
        for index in (0, 1):
            api.log(f"dlrm-{index}-a", f"step {step} of {index}")
            time.sleep(0.002)
    api.cut_logs = 2
    seen, live = [], threading.Event()

    def follow() -> None:
        for line in kubernetes.logs(handle, follow=True):
            seen.append((line.source, line.text))
            live.set()

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    assert live.wait(HANG_S)
    api.log("dlrm-0-a", "step 3 of 0")
    api.log("dlrm-1-a", "saved on notice")
    until(lambda: ("dlrm-1-a", "saved on notice") in seen)
    api.preempt("dlrm-1-a")
    api.pod("dlrm-1-b", "dlrm", index=1, phase="Running")
    api.log("dlrm-1-b", "resumed at step 3")
    until(lambda: ("dlrm-1-b", "resumed at step 3") in seen)
    api.log("dlrm-0-a", "the last line")
    api.finish("jobs", "dlrm")
    reader.join(HANG_S)
    assert not reader.is_alive()
    assert seen[:6] == [(f"dlrm-{index}-a", f"step {step} of {index}") for step in range(3) for index in (0, 1)]
    assert seen[-1] == ("dlrm-0-a", "the last line")
    assert sorted(seen) == sorted(set(seen)), "a line was shown twice"
    assert len(seen) == 10


@pytest.mark.parametrize(("is_ok", "code"), [(True, ExitCode.DONE), (False, ExitCode.OTHER)])
def test_a_tailed_log_says_why_nothing_runs_and_ends_with_the_run(api, monkeypatch, capsys, is_ok, code):
    monkeypatch.setattr(Kubernetes, "poll_s", 0.05)
    launched("place.nodes=1")
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": GPU_MESSAGE}
    api.pod("dlrm-0-a", "dlrm", index=0, conditions=(unschedulable,))
    codes, said = [], []

    def has_said(text: str) -> bool:
        printed = capsys.readouterr()
        said.append(printed.out + printed.err)
        return text in "".join(said)

    reader = threading.Thread(target=lambda: codes.append(logs_command("dlrm", follow=True, console=Console())),
                              daemon=True)
    reader.start()
    until(lambda: has_said("dlrm is pending: dlrm-0-a waits: no node has enough GPUs free"))
    api.pod("dlrm-0-a", "dlrm", index=0, phase="Running")
    api.log("dlrm-0-a", "the first step")
    until(lambda: has_said("the first step"))
    api.finish("jobs", "dlrm", *(() if is_ok else ("Failed",)))
    reader.join(HANG_S)
    assert codes == [code]
    assert has_said("succeeded" if is_ok else "failed")
    assert "".join(said).count("dlrm is pending") == 1, "said once, as long as it is the same"


def test_a_tailed_log_ends_when_the_run_is_deleted(api, monkeypatch):
    monkeypatch.setattr(Kubernetes, "poll_s", 0.05)
    handle, messages = launched("place.nodes=1"), []
    reader = threading.Thread(target=lambda: list(place(messages).logs(handle, follow=True)), daemon=True)
    reader.start()
    until(lambda: messages == ["dlrm is pending: no pod created yet"])
    del api.objects[("jobs", "embark", "dlrm")]
    reader.join(HANG_S)
    assert not reader.is_alive()


def test_a_suspended_job_names_the_queue_that_holds_it(api):
    api.put("namespaces", "embark", "")
    api.put("localqueues", "research")
    handle = launched("place.queue=research", "place.cluster=existing")
    api.objects[("jobs", "embark", "dlrm")]["spec"]["suspend"] = True
    api.event("dlrm", "Pending", "couldn't assign flavors: insufficient unused quota for nvidia.com/gpu")
    status = place().status(handle)
    assert status.state == "pending"
    assert "the queue research has not admitted it yet" in status.reason
    assert "insufficient unused quota" in status.reason


def test_a_failed_run_says_why_and_ends_with_1(api, capsys):
    launched()
    for index, code in enumerate((75, 64)):
        api.pod(f"dlrm-{index}-a", "dlrm", index=index, phase="Running")
        api.end_pod(f"dlrm-{index}-a", code)
    api.finish("jobs", "dlrm", "Failed", reason="PodFailurePolicy",
               message="Container trainer for pod embark/dlrm-1-a failed with exit code 64 matching FailJob rule at "
                       "index 1")
    assert status_command("dlrm", console=Console()) == ExitCode.OTHER
    output = " ".join(capsys.readouterr().out.split())
    assert "machine 1 (dlrm-1-a): the spec or the data is wrong (exit code 64)" in output
    assert "PodFailurePolicy" in output


@pytest.mark.parametrize(("target", "plural"), [("jobset", "jobsets"), ("trainjob", "trainjobs")])
def test_a_failed_job_set_gives_the_cause_of_its_job(api, target, plural):
    handle = launched(f"place.target={target}")
    for index, code in enumerate((75, 64)):
        api.pod(f"dlrm-node-0-{index}-a", "dlrm", index=index, container=TARGETS[target][1], phase="Running")
        api.end_pod(f"dlrm-node-0-{index}-a", code)
    api.put("jobs", "dlrm-node-0", metadata={"labels": {"jobset.sigs.k8s.io/jobset-name": "dlrm"}})
    api.finish("jobs", "dlrm-node-0", "Failed", reason="PodFailurePolicy",
               message="Container trainer for pod embark/dlrm-node-0-1-a failed with exit code 64 matching FailJob "
                       "rule at index 1")
    api.finish(plural, "dlrm", "Failed", reason="FailJobSetFailurePolicyAction",
               message="applying FailJobSet failure policy action (first failed job: dlrm-node-0)")
    status = place().status(handle)
    assert status.reason.startswith("machine 1 (dlrm-node-0-1-a): the spec or the data is wrong (exit code 64)")


def test_a_pod_on_a_node_that_has_not_started_says_which_node(api):
    handle = launched()
    api.pod("dlrm-0-a", "dlrm", index=0, phase="Running", node="gpu-0")
    api.pod("dlrm-1-a", "dlrm", index=1, node="gpu-1", conditions=({"type": "PodScheduled", "status": "True"},))
    assert place().status(handle).reason == (
        "1 of 2 pods run; dlrm-1-a waits: its container is not created yet, on node gpu-1")


def test_without_a_terminal_only_yes_spends(api):
    with pytest.raises(UserError, match="cannot ask for confirmation") as caught:
        launch_run(Console(), spec_of(), yes=False, dry_run=False)
    assert "--yes" in caught.value.fix
    assert not api.objects
    assert not list_runs().runs


@pytest.mark.parametrize(("answer", "is_launched"), [("", False), ("y", True)])
def test_a_person_is_asked_before_anything_is_made(api, answer, is_launched):
    terminal, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    code = LAUNCH.replace("yes=True", "yes=False")
    process = subprocess.Popen([sys.executable, "-c", code, *SETTINGS], env=env, stdin=theirs, stdout=theirs,
                               stderr=theirs)
    os.close(theirs)
    seen = b""
    while b"[y/N]" not in seen:
        seen += os.read(terminal, 4096)
    assert b"an hour on demand" in seen
    assert b"Launch dlrm on 2 x p5.48xlarge: 16 ranks in training?" in seen
    assert not api.objects
    os.write(terminal, f"{answer}\n".encode())
    assert process.wait(HANG_S) == (ExitCode.DONE if is_launched else ExitCode.INTERRUPTED)
    os.close(terminal)
    assert bool(api.names("jobs")) == is_launched


def test_a_dry_run_says_the_commands_and_asks_nothing_of_the_cluster(api, capsys):
    assert launch_run(Console(), spec_of(), yes=False, dry_run=True) == 0
    output = capsys.readouterr().out
    assert "apply --server-side --field-manager=embark --validate=strict --dry-run=server" in output
    assert "< kubernetes_job.yaml" in output
    assert not api.requests
    assert not list_runs().runs


def test_cancelling_says_what_was_saved_what_was_removed_and_what_remains(api, tmp_path, capsys):
    launched(f"store.root={tmp_path}", "place.nodes=1")
    checkpoints = RunDir(str(tmp_path / "dlrm")).checkpoints
    for step in (100, 200):
        writer = ChecksumWriter(checkpoints.store)
        writer.write(f"{checkpoint_name(step)}/index.json", b"{}")
        checkpoints.commit(step, {"index.json": writer.marks[f"{checkpoint_name(step)}/index.json"]}, {})
    checkpoints.begin(300)
    api.pod("dlrm-0-a", "dlrm", index=0, phase="Running")
    api.ending_s = 1.0
    assert cancel_command("dlrm", yes=True, console=Console()) == 0
    captured = capsys.readouterr()
    assert "removed job.batch/dlrm, configmap/dlrm-spec" in captured.out
    assert "last complete checkpoint: step-000000200" in captured.out
    assert "delete namespace embark" in captured.out
    assert f"checkpoints and events in {tmp_path}/dlrm" in captured.out
    assert "stopping 1 pod; each saves a checkpoint" in captured.err
    assert cancel_command("dlrm", yes=True, console=Console()) == 0
    assert not list_runs().runs
    assert "already finished; removed from the list" in capsys.readouterr().out


def test_the_answer_for_a_program_is_json_alone(api, capsys):
    launched()
    capsys.readouterr()
    assert status_command("dlrm", console=Console(json=True)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["state"] == "pending"
    assert answer["usd_per_hour"] > 0
