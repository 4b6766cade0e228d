"""What a job needs beside its own files: the cluster or the machines, storage, alerts, and the launch script."""

from __future__ import annotations

from collections.abc import Callable

from embark.render.budgets import render_budget
from embark.render.clouds.aws.cluster import render_eks
from embark.render.clouds.aws.vm import render_vm as render_aws_vm
from embark.render.clouds.azure.cluster import render_aks
from embark.render.clouds.azure.vm import render_vm as render_azure_vm
from embark.render.clouds.gcp.cluster import render_gke
from embark.render.clouds.gcp.vm import render_vm as render_gcp_vm
from embark.render.file import File
from embark.render.job import POD_TARGETS, Job
from embark.render.launch_script import render_launch_script
from embark.render.monitoring import render_monitoring
from embark.render.targets.tpu_vm import render_tpu_vm
from embark.render.volumes import render_volumes

Render = Callable[[Job], list[File]]
CLUSTERS: dict[str, Render] = {"aws": render_eks, "azure": render_aks, "gcp": render_gke}
MACHINES: dict[str, Render] = {"aws": render_aws_vm, "azure": render_azure_vm, "gcp": render_gcp_vm}


def render_infrastructure(job: Job) -> list[File]:
    """Every file that the job needs beside its own; none where it runs on one host of yours."""
    target, cloud = job.spec.place.target, job.cloud
    if target == "compose":
        return []
    files = [*render_volumes(job), *render_budget(job)]
    if target == "vm":
        return [*MACHINES[cloud](job), *files, *render_monitoring(job)]
    if target == "tpu-vm":
        return [*render_tpu_vm(job), *files]
    if target in POD_TARGETS:
        return [*CLUSTERS[cloud](job), *files, *render_monitoring(job), *render_launch_script(job)]
    return files
