"""Which files each target needs."""

from collections.abc import Callable

from embark.spec import file_of
from .clouds import aws, azure, gcp
from .folder import File, Files
from .image import render_image, render_tpu_image
from .job import FOLLOW, POD_TARGETS, SLURM, Job
from .monitoring import render_budget, render_monitoring
from .serving import SERVE_TARGETS
from .targets import endpoints, kubernetes
from .targets.follow import render_follow
from .targets.serve import render_serve
from .targets.slurm import render_slurm
from .targets.torchx import render_torchx
from .targets.tpu_vm import render_tpu_vm
from .targets.vertex import render_vertex
from .volumes import render_volumes
from .wheel import wheel_file

Render = Callable[[Job], Files]
QUEUED = ("job", "jobset", "trainjob", "pytorchjob", "ray")  # Targets that Kueue can hold back.
TARGETS: dict[str, Render] = {  # plain machines, `vm` and `tpu-vm`, have no job object
    "job": kubernetes.render_job,
    "jobset": kubernetes.render_jobset,
    "trainjob": kubernetes.render_trainjob,
    "pytorchjob": kubernetes.render_pytorchjob,
    "ray": kubernetes.render_ray,
    "torchx": render_torchx,
    "vertex": render_vertex,
    SLURM: render_slurm,
    FOLLOW: render_follow,
    "serve": render_serve,
    "kserve": render_serve,
    "cloud-run": endpoints.render_cloud_run,
    "vertex-endpoint": endpoints.render_vertex_endpoint,
    "sagemaker": endpoints.render_sagemaker,
    "azureml": endpoints.render_azureml
}

CLUSTERS: dict[str, Render] = {"aws": aws.render_eks, "azure": azure.render_aks, "gcp": gcp.render_gke}
MACHINES: dict[str, Render] = {"aws": aws.render_vm, "azure": azure.render_vm, "gcp": gcp.render_vm}


def render(job: Job) -> Files:
    """Return every file: those of all targets, the image, the queue if one is named, and the infrastructure."""
    others = [file for target in job.targets[1:] for file in TARGETS[target](job.with_target(target))]
    files = [*own_files(job), *others, *kubernetes.render_export_job(job), *render_infrastructure(job)]
    paths = [file.path for file in files]
    assert len(set(paths)) == len(paths), f"two files of one name: {sorted(paths)}"
    return files


def own_files(job: Job) -> Files:
    """Return the files that start the ranks, the image they run in, and the wheel that is installed there."""
    target = job.target
    files = [*(TARGETS[target](job) if target in TARGETS else []), wheel_file()]
    # The job has their text in its spec; here a person edits them.
    own = {file_of(section.kind): section.code for section in (job.spec.model, job.spec.data) if section.is_custom}
    if target == FOLLOW and job.spec.stream.is_custom:
        own[file_of(job.spec.stream.source)] = job.spec.stream.code
    files += [File(name, code) for name, code in own.items()]
    if target != "tpu-vm":
        files = [*files, *(render_tpu_image(job) if job.is_tpu and target not in SERVE_TARGETS else render_image(job))]
    return [*files, *kubernetes.render_kueue(job)] if set(job.targets) & set(QUEUED) else files


def render_infrastructure(job: Job) -> Files:
    """Return every file that the job needs beside its own; none in a cluster that exists."""
    target, cloud = job.target, job.cloud
    in_pods = target in (*POD_TARGETS, FOLLOW)
    if target in SERVE_TARGETS or target == SLURM or (in_pods and job.place.is_existing):
        return []
    files = [*render_volumes(job), *render_budget(job)]
    if target == "vm":
        return [*MACHINES[cloud](job), *files, *render_monitoring(job)]
    if target == "tpu-vm":
        return [*render_tpu_vm(job), *files]
    if in_pods:
        return [*CLUSTERS[cloud](job), *files, *render_monitoring(job), *kubernetes.render_launch_script(job)]
    return files
