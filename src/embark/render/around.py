"""All that stands around a job: the cluster or the machines, storage, alerts, and the script that ties them."""

from __future__ import annotations

from collections.abc import Callable

from embark.render import vm_aws, vm_azure, vm_gcp, volumes_aws, volumes_azure, volumes_gcp
from embark.render.cluster_aks import render_aks
from embark.render.cluster_eks import render_eks
from embark.render.cluster_gke import render_gke
from embark.render.file import File
from embark.render.job import POD_TARGETS, Job
from embark.render.launch_script import render_launch_script
from embark.render.money import render_money
from embark.render.monitoring import render_monitoring
from embark.render.tpu_vm import render_tpu_vm

Render = Callable[[Job], list[File]]
CLUSTERS: dict[str, Render] = {"aws": render_eks, "azure": render_aks, "gcp": render_gke}
VOLUMES: dict[str, Render] = {
    "aws": volumes_aws.render_volumes, "azure": volumes_azure.render_volumes, "gcp": volumes_gcp.render_volumes,
}
MACHINES: dict[str, Render] = {"aws": vm_aws.render_vm, "azure": vm_azure.render_vm, "gcp": vm_gcp.render_vm}


def render_around(job: Job) -> list[File]:
    """Every file that the job needs beside its own; none where it runs on one host of yours."""
    target, cloud = job.spec.place.target, job.cloud
    if target == "compose":
        return []
    files = [*VOLUMES[cloud](job), *render_money(job)]
    if target == "vm":
        return [*MACHINES[cloud](job), *files, *render_monitoring(job)]
    if target == "tpu-vm":
        return [*render_tpu_vm(job), *files]
    if target in POD_TARGETS:
        return [*CLUSTERS[cloud](job), *files, *render_monitoring(job), *render_launch_script(job)]
    return files
