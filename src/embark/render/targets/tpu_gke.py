"""TPUs on GKE: what their pods ask for, and the node pools that are their slices.

The webhook of GKE tells each pod its place in the slice (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES), and each slice its place
among several of a JobSet (MEGASCALE_…); JAX reads these by itself.
"""

from typing import Any

from embark.render.job import Job
from embark.render.yaml_text import note

RESOURCE = "google.com/tpu"
PORTS = {"tpu": 8471, "coordinator": 8476}
"""Where the hosts' runtimes meet, and where JAX's processes do."""
_ROOT = "embark-lint: ignore EMB153: the chips' devices are root's"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
NODE_POOL = "cloud.google.com/gke-nodepool"


def selector(job: Job) -> dict[str, Any]:
    return {"cloud.google.com/gke-tpu-accelerator": job.machine.gke_accelerator,
            "cloud.google.com/gke-tpu-topology": job.topology}


def ports() -> list[dict[str, Any]]:
    return [{"name": name, "containerPort": port} for name, port in PORTS.items()]


def pod_security() -> dict[str, Any]:
    return {"runAsUser": note(0, _ROOT), "seccompProfile": {"type": "RuntimeDefault"}}


def container_security() -> dict[str, Any]:
    added = note(["SYS_RESOURCE"], "the runtime locks memory beyond the container's limit; without privileged: true")
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": added}}


def pool_names(job: Job, pool: str) -> list[str]:
    """A slice of several hosts is a node pool of its own; slices of one host are the nodes of one."""
    if job.machine.num_hosts == 1 or job.num_nodes == 1:
        return [pool]
    return [f"{pool}-{index}" for index in range(job.num_nodes)]


def nodes_per_pool(job: Job) -> int:
    return job.machine.num_hosts if job.machine.num_hosts > 1 else job.num_nodes
