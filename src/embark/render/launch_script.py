"""One script a cloud, from nothing to a trained model and back: tools, login, quota, cluster, storage, job, logs."""

from embark.errors import ExitCode
from embark.render.clouds.azure import pool_name
from embark.render.clouds.gcp import pool_names
from embark.render.folder import File
from embark.render.job import Job
from embark.render.location import location_of
from embark.render.monitoring import price_text
from embark.render.pod import CONTAINER
from embark.render.scripts import script_file
from embark.render.targets.kubernetes import MANIFESTS

NAMES = {"aws": "train_dlrm_aws.sh", "azure": "train_dlrm_azure.sh", "gcp": "train_dlrm_gcp.sh"}
TOOLS = {
    "aws": {"aws": "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html",
            "eksctl": "https://eksctl.io/installation/"},
    "azure": {"az": "https://learn.microsoft.com/cli/azure/install-azure-cli"},
    "gcp": {"gcloud": "https://cloud.google.com/sdk/docs/install"},
}
COMMON_TOOLS = {"kubectl": "https://kubernetes.io/docs/tasks/tools/", "helm": "https://helm.sh/docs/intro/install/"}
LOGINS = {"aws": "aws sts get-caller-identity", "azure": "az account show", "gcp": "gcloud auth print-access-token"}
CLUSTER_SCRIPTS = {"aws": "eks_cluster.sh", "azure": "aks_cluster.sh", "gcp": "gke_cluster.sh"}
PLACEHOLDER_REGISTRY = "registry.example.com/"


def render_launch_script(job: Job) -> list[File]:
    """`train_dlrm_CLOUD.sh`, for targets of Kubernetes."""
    if job.spec.place.target not in MANIFESTS:
        return []
    manifest, kind = MANIFESTS[job.spec.place.target]
    pools = {"aws": lambda: [location_of(job).pool], "azure": lambda: [pool_name(job)], "gcp": lambda: pool_names(job)}
    return [script_file(
        NAMES[job.cloud], "launch.sh.j2", job,
        about=f"Trains {job.spec.name} on {job.num_nodes} x {job.machine.name} of {job.cloud}: checks tools, login "
              "and quota, creates what is missing, submits the job and follows it. Safe to repeat: what exists stays. "
              "--dry-run prints every command that would change something, and runs none.",
        tools={**TOOLS[job.cloud], **COMMON_TOOLS}, login=LOGINS[job.cloud], container=CONTAINER,
        cost=f"{price_text(job)} The cluster and storage are extra.", manifest=manifest, kind=kind,
        has_registry="/" in job.image and not job.image.startswith(PLACEHOLDER_REGISTRY),
        cluster_script=CLUSTER_SCRIPTS[job.cloud], pools=pools[job.cloud](), fault_code=int(ExitCode.FAULT))]
