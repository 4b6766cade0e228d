"""A JobSet: all pods start again together when one is lost, which is what a process group needs."""

from typing import Any

from embark.errors import ExitCode
from embark.render.command import indexed_command
from embark.render.file import File
from embark.render.job import EXITS, Job
from embark.render.pod import CONTAINER, pod_metadata, pod_spec
from embark.render.targets import tpu_gke
from embark.render.targets.kubernetes import KEPT_S, RETRIES_PER_NODE, deadline, metadata, queued, surroundings
from embark.render.yaml_text import note, yaml_text

NODE = "node"
"""Of the replicated job; a pod is NAME-node-0-i."""


def render_jobset(job: Job) -> list[File]:
    about = (f"Trains {job.title}. The cluster needs "
             "the JobSet controller, 0.12 or newer. kubectl apply -f jobset.yaml")
    return [File("jobset.yaml", yaml_text([*surroundings(job), jobset(job)], about=about))]


def jobset(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name,
                        "publishNotReadyAddresses": note(True, "the ranks meet before a pod is ready")},
            "ttlSecondsAfterFinished": KEPT_S,
            "failurePolicy": {
                "maxRestarts": RETRIES_PER_NODE,
                "restartStrategy": note("BlockingRecreate", "no new pod before every old one has let go of its GPUs"),
                "rules": _rules(),
            },
            "replicatedJobs": [{"name": NODE, "replicas": _num_slices(job), "template": {"spec": _child(job)}}],
        },
    }


def _child(job: Job) -> dict[str, Any]:
    pod = pod_spec(job, indexed_command(job, f"{job.name}-{NODE}-0-0.{job.name}"))
    return {
        "completionMode": "Indexed",
        "completions": job.num_pods // _num_slices(job),
        "parallelism": job.num_pods // _num_slices(job),
        "backoffLimit": note(0, "the first lost pod ends the attempt of all: the JobSet starts them again together"),
        **deadline(job),
        "podFailurePolicy": {"rules": [
            note({"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                 "the reason PodFailurePolicy tells the rules above that nothing is wrong with the run"),
            {"action": "FailJob",
             "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": _told_codes()}},
        ]},
        "template": {"metadata": pod_metadata(job), "spec": pod},
    }


def _metadata(job: Job) -> dict[str, Any]:
    described = queued(job, metadata(job))
    if not job.is_tpu or job.machine.num_hosts == 1:
        return described
    return {**described, "annotations": {
        tpu_gke.EXCLUSIVE: note(tpu_gke.NODE_POOL, "all hosts of a slice are of one node pool, and no other run's")}}


def _num_slices(job: Job) -> int:
    """A slice of a TPU is a job of its own: its hosts come and go together."""
    return job.num_nodes if job.is_tpu else 1


def _rules() -> list[Any]:
    bad = [int(row.code) for row in EXITS if not row.must_retry]
    return [
        note({"name": "wrong", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"],
              "onJobFailureMessagePatterns": [f"exit code {code} " for code in bad]},
             "the spec or the data is wrong: it would be again"),
        note({"name": "preempted", "action": "RestartJobSetAndIgnoreMaxRestarts",
              "onJobFailureReasons": ["PodFailurePolicy"]},
             "a machine was taken away, or the run saved and asked to be started again: not counted"),
    ]


def _told_codes() -> list[int]:
    return sorted(int(row.code) for row in EXITS if row.code != ExitCode.FAULT)
