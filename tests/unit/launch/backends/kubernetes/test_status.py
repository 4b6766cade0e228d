"""From what a cluster says of a run to one state and one reason."""

from __future__ import annotations

from typing import Any

import pytest

from embark.launch.backend import RunEvent
from embark.launch.backends.kubernetes.pods import PodStatus, newest
from embark.launch.backends.kubernetes.status import event_of, status_of


def pod(name: str, index: int = 0, phase: str = "Running", *, created: str = "2026-11-15T09:00:00Z",
        state: dict[str, Any] | None = None, conditions: list[dict[str, str]] | None = None, leaving: bool = False,
        node: str = "", last: dict[str, Any] | None = None, init: list[dict[str, Any]] | None = None):
    running = {"running": {}} if phase == "Running" else {}
    metadata: dict[str, Any] = {"name": name, "uid": f"uid of {name}", "creationTimestamp": created, "labels": {
        "batch.kubernetes.io/job-completion-index": str(index)}}
    if leaving:
        metadata["deletionTimestamp"] = created
    shown = state if state is not None else running
    status = {"phase": phase, "conditions": conditions or [],
              "initContainerStatuses": init or [],
              "containerStatuses": [{"name": "sidecar", "state": {"running": {}}},
                                    {"name": "trainer", "state": shown, "lastState": last or {}}]}
    return PodStatus.of({"metadata": metadata, "status": status, "spec": {"nodeName": node} if node else {}}, "trainer")


def status(pods, *, conditions=(), events=(), suspend=False, queue="", num_nodes=2, **metadata):
    job = {"metadata": {"name": "dlrm", "creationTimestamp": "2026-11-15T09:00:00Z", **metadata},
           "spec": {"suspend": suspend},
           "status": {"conditions": [{"type": c, "status": "True", "reason": "Why", "message": "so"}
                                     for c in conditions]}}
    return status_of(job, pods, events, num_nodes=num_nodes, queue=queue)


@pytest.mark.parametrize(
    ("condition", "state"),
    [("Complete", "succeeded"), ("Completed", "succeeded"), ("Succeeded", "succeeded"), ("Failed", "failed"),
     ("FailureTarget", "failed"), ("Suspended", "pending")],
)
def test_every_controller_s_own_word_is_known(condition, state):
    assert status([], conditions=[condition]).state == state


def test_a_condition_that_does_not_hold_is_none():
    job = {"metadata": {"name": "x"}, "status": {"conditions": [{"type": "Failed", "status": "False"}]}}
    assert status_of(job, [], [], num_nodes=1).state == "pending"


def test_it_runs_when_all_its_pods_do():
    assert status([pod("a", 0)]).state == "pending"
    assert status([pod("a", 0), pod("b", 1)]).state == "running"
    assert status([pod("a", 0), pod("b", 1, "Succeeded", state={"terminated": {"exitCode": 0}})]).state == "running"


def test_a_pod_whose_sidecar_runs_and_whose_trainer_waits_does_not_run():
    waits = pod("b", 1, "Running", state={"waiting": {"reason": "ImagePullBackOff", "message": "403 Forbidden"}})
    found = status([pod("a", 0), waits])
    assert found.state == "pending"


PREEMPTED = [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]


def test_a_preempted_pod_is_not_a_failure_and_its_replacement_counts():
    lost = pod("b", 1, "Failed", state={"terminated": {"exitCode": 75}}, conditions=PREEMPTED)
    found = status([pod("a", 0), lost])
    assert found.state == "restarting"
    assert "a pod of higher priority took its place" in found.reason
    back = pod("c", 1, created="2026-11-15T09:05:00Z")
    found = status([lost, back, pod("a", 0)])
    assert (found.state, found.num_restarts) == ("running", 1)
    assert "1 pod preempted and replaced so far" in found.reason
    assert [part.name for part in found.replicas] == ["a", "c"]


def test_a_pod_that_ended_with_a_fault_is_brought_back_and_says_why():
    faulty = pod("b", 1, "Failed", state={"terminated": {"exitCode": 70}})
    found = status([pod("a", 0), faulty])
    assert found.state == "restarting"
    assert "machine 1 (b) ended: a fault worth a retry (exit code 70)" in found.reason
    waits = pod("c", 1, "Pending", created="2026-11-15T09:05:00Z")
    assert "its replacement c waits: not scheduled yet" in status([pod("a", 0), faulty, waits]).reason
    found = status([pod("a", 0), faulty, pod("c", 1, created="2026-11-15T09:05:00Z")])
    assert (found.state, found.reason) == ("running", "restarted 1 time")


def test_a_job_set_that_makes_all_its_pods_again_is_restarting():
    job = {"metadata": {"name": "dlrm"}, "status": {"restarts": 2}}
    found = status_of(job, [pod("a", 0, "Pending"), pod("b", 1, "Pending")], [], num_nodes=2)
    assert (found.state, found.num_restarts) == ("restarting", 2)
    assert found.reason == "restart 2; a waits: not scheduled yet"


def test_the_newest_pod_of_an_index_is_the_one_that_counts():
    old, new = pod("z", 0, created="2026-11-15T09:00:00Z"), pod("a", 0, created="2026-11-15T09:05:00Z")
    assert newest([new, old]) == [new]


def test_an_unpulled_image_says_so_and_what_to_do():
    waits = pod("a", 0, "Pending", state={"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling x"}})
    found = status([waits], num_nodes=1)
    assert found.state == "pending"
    assert "a waits: the image cannot be pulled (Back-off pulling x)" in found.reason
    assert "place.image" in found.fix


def test_a_volume_that_does_not_mount_is_reported_by_its_event():
    waits = pod("a", 0, "Pending", state={"waiting": {"reason": "ContainerCreating"}}, node="gpu-7")
    event = RunEvent(1.0, "a", "FailedMount", "mount.lustre: no such host", True)
    found = status([waits], events=[event], num_nodes=1)
    assert found.reason == "a waits: mount.lustre: no such host, on node gpu-7"
    assert found.fix == "kubectl describe pvc"


def test_a_scheduled_pod_waits_for_its_node_and_not_for_the_scheduler():
    scheduled = [{"type": "PodScheduled", "status": "True"}]
    new = pod("b", 1, "Pending", conditions=scheduled, node="gpu-7", created="2026-11-15T09:05:00Z")
    assert status([pod("a", 0), new]).reason == (
        "1 of 2 pods run; b waits: its container is not created yet, on node gpu-7")
    lost = pod("c", 1, "Failed", state={"terminated": {"exitCode": 75}}, conditions=PREEMPTED)
    assert "its replacement b waits: its container is not created yet, on node gpu-7" in status(
        [pod("a", 0), lost, new]).reason
    pulls = pod("b", 1, "Pending", conditions=scheduled, node="gpu-7", state={"waiting": {"reason": "ErrImagePull"}})
    found = status([pod("a", 0), pulls])
    assert found.reason == "1 of 2 pods run; b waits: the image cannot be pulled, on node gpu-7"
    assert "place.image" in found.fix
    no_network = RunEvent(1.0, "b", "FailedCreatePodSandBox", "failed to set up network", True)
    assert "failed to set up network, on node gpu-7" in status([pod("a", 0), new], events=[no_network]).reason


def test_an_init_container_that_cannot_start_is_what_its_pod_waits_for():
    waits = pod("a", 0, "Pending", state={"waiting": {"reason": "PodInitializing"}}, node="gpu-7",
                init=[{"name": "daemon", "state": {"waiting": {"reason": "ImagePullBackOff"}}}])
    assert status([waits], num_nodes=1).reason == "a waits: the image cannot be pulled, on node gpu-7"


def test_without_pods_the_controller_s_refusal_is_the_reason():
    event = RunEvent(1.0, "dlrm", "FailedCreate", 'pods "dlrm-0" is forbidden: exceeded quota: gpus', True)
    found = status([], events=[event])
    assert "the namespace's quota is used up" in found.reason
    assert "resourcequota" in found.fix


def test_a_suspended_job_without_a_queue_is_asked_too():
    assert "not by a queue" in status([], suspend=True).reason
    assert "the queue gpus has not admitted it" in status([], suspend=True, queue="gpus").reason


def test_a_failed_run_gives_the_pod_s_own_reason_first():
    out = pod("a", 0, "Failed", state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
    found = status([out], conditions=["Failed"])
    assert found.reason == "machine 0 (a): killed: it exceeded its memory limit (Why: so)"


def failed(pods, reason, message, *, jobs=()):
    job = {"metadata": {"name": "dlrm"}, "status": {"conditions": [
        {"type": "Failed", "status": "True", "reason": reason, "message": message}]}}
    return status_of(job, pods, [], num_nodes=2, jobs=jobs)


def ended(name: str, index: int, code: int, **more: Any):
    return pod(name, index, "Failed", state={"terminated": {"exitCode": code, "reason": "Error"}}, **more)


WRONG = "Container trainer for pod embark/dlrm-1-b failed with exit code 64 matching FailJob rule at index 1"


def test_the_pod_that_the_job_s_condition_names_decided():
    pods = [ended("dlrm-0-a", 0, 75), ended("dlrm-1-b", 1, 64)]
    found = failed(pods, "PodFailurePolicy", WRONG)
    assert found.reason == ("machine 1 (dlrm-1-b): the spec or the data is wrong (exit code 64), or its budget is "
                            f"spent (PodFailurePolicy: {WRONG})")
    assert "not retried" in found.fix
    assert failed(pods[:1], "PodFailurePolicy", WRONG).reason.startswith("dlrm-1-b: the spec or the data is wrong")


def test_a_replaced_pod_that_decided_is_named_and_not_its_successor():
    newer = ended("dlrm-1-c", 1, 75, created="2026-11-15T09:05:00Z")
    found = failed([ended("dlrm-0-a", 0, 75), ended("dlrm-1-b", 1, 64), newer], "PodFailurePolicy", WRONG)
    assert found.reason.startswith("machine 1 (dlrm-1-b): the spec or the data is wrong")


def test_of_a_job_set_the_first_failed_job_s_condition_names_the_pod():
    def job(name: str, reason: str, message: str):
        return {"metadata": {"name": name}, "status": {"conditions": [
            {"type": "Failed", "status": "True", "reason": reason, "message": message}]}}

    jobs = [job("dlrm-a-0", "BackoffLimitExceeded", "Job has reached the specified backoff limit"),
            job("dlrm-node-0", "PodFailurePolicy", WRONG)]
    message = "jobset failed due to one or more job failures (first failed job: dlrm-node-0)"
    pods = [ended("dlrm-0-a", 0, 75), ended("dlrm-1-b", 1, 64)]
    found = failed(pods, "FailedJobs", message, jobs=jobs)
    assert found.reason.startswith("machine 1 (dlrm-1-b): the spec or the data is wrong (exit code 64)")
    assert "first failed job: dlrm-node-0" in found.reason
    late = [job("dlrm-node-0", "DeadlineExceeded", "Job was active longer than specified deadline")]
    assert failed(pods, "FailedJobs", message, jobs=late).reason.startswith("it ran longer than place.max_hours")


@pytest.mark.parametrize(("reason", "message"), [
    ("DeadlineExceeded", "Job was active longer than specified deadline"),
    ("PyTorchJobFailed", "Job dlrm has failed because it was active longer than specified deadline"),
])
def test_a_deadline_decided_and_no_pod_that_it_stopped(reason, message):
    found = failed([ended("a", 0, 75), ended("b", 1, 75)], reason, message)
    assert found.reason == f"it ran longer than place.max_hours ({reason}: {message})"
    assert "place.max_hours" in found.fix


def test_where_the_controller_names_no_pod_the_most_telling_exit_code_does():
    message = "Job has reached the specified backoff limit"
    pods = [ended("a", 0, 75), ended("b", 1, 70)]
    assert failed(pods, "BackoffLimitExceeded", message).reason.startswith("machine 1 (b): a fault worth a retry")
    again = pod("b", 1, "Running", state={"waiting": {"reason": "CrashLoopBackOff"}},
                last={"terminated": {"exitCode": 64, "reason": "Error"}})
    message = "Job dlrm has failed because it has reached the specified backoff limit"
    assert failed([ended("a", 0, 70), again], "PyTorchJobFailed", message).reason.startswith(
        "machine 1 (b): the spec or the data is wrong")


def test_ray_s_message_says_the_exit_code_and_its_log_is_cut_short():
    message = "Job entrypoint command failed with exit code 64, last available logs: " + "x" * 20_000
    found = failed([pod("a", 0)], "AppFailed", message)
    assert found.reason.startswith("the spec or the data is wrong (exit code 64)")
    assert len(found.reason) < 600


def test_a_run_that_is_being_taken_away_is_not_restarting():
    found = status([pod("a", 0, leaving=True)], deletionTimestamp="2026-11-15T09:10:00Z")
    assert "being deleted; 1 pod still saving" in found.reason


def test_an_event_without_any_time_is_no_fault():
    event = event_of({"involvedObject": {"name": "x"}, "reason": "Y", "message": "a\x1b[31mb", "type": "Warning"})
    assert (event.time_s, event.text, event.is_warning) == (0.0, "a[31mb", True)


def test_an_elastic_run_trains_while_enough_of_its_machines_are_up():
    waits = pod("c", 2, "Pending", conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                                                "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."}])
    job = {"metadata": {"name": "dlrm"}}
    found = status_of(job, [pod("a", 0), pod("b", 1), waits], [], num_nodes=3, min_nodes=2)
    assert found.state == "running"
    assert found.reason == "trains on 2 of 3 machines"
    assert "no node has enough GPUs free" in found.replicas[2].why
    lost = pod("c", 2, "Failed", state={"terminated": {"exitCode": 137}}, conditions=PREEMPTED)
    found = status_of(job, [pod("a", 0), pod("b", 1), lost], [], num_nodes=3, min_nodes=2)
    assert (found.state, found.reason) == ("running", "trains on 2 of 3 machines")
    assert found.replicas[2].why == "a pod of higher priority took its place"
    assert status_of(job, [pod("a", 0), lost, waits], [], num_nodes=3, min_nodes=2).state != "running"
