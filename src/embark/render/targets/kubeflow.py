"""Kubeflow: a TrainJob for Trainer 2, with the runtime it runs on, and a PyTorchJob for the training operator 1.9."""

from typing import Any

from embark.render.command import WAIT_S, plain_command, ranks_words
from embark.render.folder import File
from embark.render.job import MAX_RESTARTS, Job
from embark.render.pod import environment, pod_metadata, pod_spec, resources
from embark.render.targets.kubernetes import (
    KEPT_S,
    RETRIES_PER_NODE,
    deadline,
    failure_rules,
    metadata,
    queued,
    surroundings,
)
from embark.render.yaml_text import note, plain, yaml_text

TRAINER_API = "trainer.kubeflow.org/v1alpha1"
NODE = "node"
"""Trainer 2 gives its variables to a container of this name, in a replicated job of this name."""
MUST_NAME = "pytorch"
"""The training operator's webhook takes no other."""
RESTARTS_PER_NODE = 10


def render_trainjob(job: Job) -> list[File]:
    about = (f"Trains {job.title}. The cluster needs "
             "Kubeflow Trainer 2.3. kubectl apply -f trainjob.yaml")
    return [File("trainjob.yaml", yaml_text([*surroundings(job), training_runtime(job), train_job(job)], about=about))]


def render_pytorchjob(job: Job) -> list[File]:
    about = (f"Trains {job.title}. The cluster needs "
             "Kubeflow's training operator 1.9, the older one; for new clusters take Trainer 2. "
             "kubectl apply -f pytorchjob.yaml")
    return [File("pytorchjob.yaml", yaml_text([*surroundings(job), pytorch_job(job)], about=about))]


def training_runtime(job: Job) -> dict[str, Any]:
    """A runtime of this namespace: `torch-distributed`, which clusters have, has no sidecars and no failure policy."""
    pod = pod_spec(job, _command(job), container=NODE)
    child = {
        "backoffLimit": RETRIES_PER_NODE * job.num_nodes,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": failure_rules(NODE)},
        "template": {"metadata": pod_metadata(job), "spec": pod},
    }
    described = metadata(job)
    return {
        "apiVersion": TRAINER_API,
        "kind": "TrainingRuntime",
        "metadata": {**described, "labels": {**described["labels"], "trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.num_nodes, "torch": {}},
            "template": {"spec": {
                "ttlSecondsAfterFinished": KEPT_S,
                "replicatedJobs": [{
                    "name": NODE,
                    "template": {
                        "metadata": note({"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                                         "by it Trainer knows which job is the training"),
                        "spec": child,
                    },
                }],
            }},
        },
    }


def train_job(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": TRAINER_API,
        "kind": "TrainJob",
        "metadata": queued(job, metadata(job)),
        "spec": {
            **deadline(job),
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
            "trainer": {
                "image": job.image,
                "command": note(_command(job), "Trainer sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, "
                                               "PET_MASTER_ADDR and PET_MASTER_PORT, and refuses them from others"),
                "numNodes": job.num_nodes,
                "numProcPerNode": note(job.num_processes, "a number since 2.3; older ones took \"auto\""),
                "resourcesPerNode": plain(resources(job)),
                "env": [plain(row) for row in environment(job)],
            },
        },
    }


def pytorch_job(job: Job) -> dict[str, Any]:
    pod = pod_spec(job, _command(job), container=MUST_NAME)
    del pod["restartPolicy"]  # the operator takes the one of the replicas
    spec: dict[str, Any] = {
        "nprocPerNode": note(str(job.num_processes), "here: elasticPolicy's own is deprecated"),
        "runPolicy": {
            "cleanPodPolicy": note("None", "logs stay until the job itself goes"),
            "ttlSecondsAfterFinished": KEPT_S,
            "backoffLimit": note(RESTARTS_PER_NODE * job.num_nodes, "this operator counts a preemption like a fault"),
            **deadline(job),
        },
        "elasticPolicy": {
            "rdzvBackend": "c10d",
            "minReplicas": note(job.num_nodes, "as many as the most: fewer would train with tables laid out otherwise"),
            "maxReplicas": job.num_nodes,
            "maxRestarts": MAX_RESTARTS,
            "rdzvConf": [{"key": name, "value": str(WAIT_S)} for name in ("join_timeout", "read_timeout")],
        },
        "pytorchReplicaSpecs": {"Worker": {
            "replicas": job.num_nodes,
            "restartPolicy": note("OnFailure", "here, not in the pod: the operator takes this one"),
            "template": {"metadata": pod_metadata(job), "spec": pod},
        }},
    }
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": queued(job, metadata(job)), "spec": spec}


def _command(job: Job) -> list[str]:
    """Both operators give torchrun's options by PET_… variables."""
    return plain_command(job, ranks_words())
