"""All that stands around a job: the cluster or the machines, storage, alerts, and the script that ties them."""

from __future__ import annotations

from collections.abc import Callable

from embark.render.budgets import render_money
from embark.render.clouds.aws import vm as vm_aws
from embark.render.clouds.aws import volumes as volumes_aws
from embark.render.clouds.aws.cluster import render_eks
from embark.render.clouds.azure import vm as vm_azure
from embark.render.clouds.azure import volumes as volumes_azure
from embark.render.clouds.azure.cluster import render_aks
from embark.render.clouds.gcp import vm as vm_gcp
from embark.render.clouds.gcp import volumes as volumes_gcp
from embark.render.clouds.gcp.cluster import render_gke
from embark.render.file import File
from embark.render.job import POD_TARGETS, Job
from embark.render.launch_script import render_launch_script
from embark.render.monitoring import render_monitoring
from embark.render.targets.tpu_vm import render_tpu_vm

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
