"""TPUs on GKE: what their pods ask for, and the node pools that are their slices.

The webhook of GKE tells each pod its place in the slice (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES), and each slice its place
among several of a JobSet (MEGASCALE_…); JAX reads these by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from embark.errors import Mistake
from embark.render.yaml_text import note

if TYPE_CHECKING:
    from embark.render.job import Job

RESOURCE = "google.com/tpu"
FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
"""Of v5e and v6e, by chips."""
DEEP = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8",
        1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16"}
"""Of v4 and v5p."""
TOPOLOGIES = {"v5litepod": FLAT, "v6e": FLAT, "v4": DEEP, "v5p": DEEP}
PORTS = {"tpu": 8471, "coordinator": 8476}
"""Where the hosts' runtimes meet, and where JAX's processes do."""
_ROOT = "embark-lint: ignore EMB153: the chips' devices are root's"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
NODE_POOL = "cloud.google.com/gke-nodepool"


def is_tpu(job: Job) -> bool:
    return job.machine.gpu.kind == "tpu"


def topology(job: Job) -> str:
    """Empty where GKE has no such slice."""
    return TOPOLOGIES.get(job.machine.name.rpartition("-")[0], {}).get(job.machine.num_gpus, "")


def mistakes(job: Job) -> Iterator[Mistake]:
    """What keeps it from being pods."""
    machine, place = job.machine, job.spec.place
    if not topology(job) or not machine.gke_accelerator:
        yield Mistake("", "place.machine", machine.name, "GKE has no node pools of it",
                      'take a v4, v5e, v5p or v6e, or set place.target = "tpu-vm"')
    if place.target == "job" and job.num_nodes > 1:
        yield Mistake("", "place.nodes", str(job.num_nodes), "a Job has the hosts of one slice alone",
                      'set place.target = "jobset" for several slices, or name a larger one')


def selector(job: Job) -> dict[str, Any]:
    return {"cloud.google.com/gke-tpu-accelerator": job.machine.gke_accelerator,
            "cloud.google.com/gke-tpu-topology": topology(job)}


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
