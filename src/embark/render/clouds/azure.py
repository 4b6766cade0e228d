"""Azure: the AKS cluster, plain machines, NetApp Files, Managed Lustre and BlobFuse."""

from collections.abc import Sequence

from embark.render.folder import File, Files
from embark.render.job import Job
from embark.render.pod import tolerations
from embark.render.shell_text import Shell, Step, Words, job_steps, job_text, job_words, script_file
from embark.render.targets.vm_node import about_machines, acr_name, cloud_init, find_by_name, refuse_volume
from embark.render.wheel import upload_words
from embark.render.yaml_text import plain
from embark.values import JsonDict

IMAGE = "microsoft-dsvm:ubuntu-hpc:2204:latest"  # Microsoft's image with NVIDIA's driver, InfiniBand's and Docker.
DOCA_DRIVER_VERSION = "doca3.4.0-26.04-0.8.4.0-0"
LUSTRE_DRIVER_VERSION = "v0.4.0"  # A release of kubernetes-sigs/azurelustre-csi-driver, 2026-11.
LUSTRE_DRIVER_FILES = ("rbac-csi-azurelustre-controller", "rbac-csi-azurelustre-node", "csi-azurelustre-driver",
                       "csi-azurelustre-controller", "csi-azurelustre-node-jammy", "csi-azurelustre-node-noble")
DISK_GIB = (256, 512, 1024, 2048)  # Sizes of Premium SSDs that a node's own disk can have.
SYSTEM_GIB = 150  # Part of that disk for the system, images and logs.
POOL = "gpu"  # AKS takes at most 12 small letters and digits.


def render_vm(job: Job) -> Files:
    """Write `vm.sh` and `cloud_init.yaml`."""
    refuse_volume(job)
    words = start_words(job, ["--generate-ssh-keys", "--custom-data", Shell('"$FIRST_START"')])
    about = about_machines(job) + " A machine that is only shut down is still billed."
    return [
        script_file("vm.sh", "azure/vm.sh.j2", job, about=about, vm_image=IMAGE, steps=network_steps(job),
                    start_words=words, grants=container_grants(job), upload_words=upload_words(job),
                    registry=acr_name(job.image) if job.place.image else ""),
        cloud_init(job, find_by_name(job))
    ]


def network_steps(job: Job) -> list[Step]:
    """Return steps that create the network."""
    return [*job_steps(job, "network"), *(job_steps(job, "placement") if _has_set(job) else [])]


def start_words(job: Job, given: Sequence[str]) -> Words:
    """Return the command that starts a machine."""
    options = {"start_placed": _has_set(job), "start_reserved": job.has_reservation, "start_spot": job.is_spot}
    return job_words(job, "start", options, given=given)


def container_grants(job: Job) -> list[Words]:
    """Return commands that let a machine's own identity use the run's containers."""
    return [job_words(job, "grant_container", bucket=bucket.name,
                      role=f"Storage Blob Data {'Contributor' if bucket.is_written else 'Reader'}")
            for bucket in job.buckets if bucket.scheme == "az"]


def _has_set(job: Job) -> bool:
    return job.num_nodes > 1 and not job.is_spot and not job.has_reservation


def render_aks(job: Job) -> Files:
    """Write `aks_cluster.sh`, which makes the cluster, and the files that it applies."""
    about = (f"What an AKS cluster with {job.num_nodes} x {job.machine.name} is given once it stands. The cluster "
             "itself is made by commands, not by a file: aks_cluster.sh runs them and applies this.")
    templates = ["aks_cluster.yaml", "gpu_operator_values.yaml"]
    if job.location.has_fabric:
        templates.append("network_operator_values.yaml")
    values = {"doca_driver_version": DOCA_DRIVER_VERSION, "about": about,
              "resource": job.machine.fabric.kubernetes_resource, "tolerations": plain(tolerations(job))}
    files = [File(name, job_text(f"azure/{name}.j2", job, **values)) for name in templates]
    files.insert(1, script_file("aks_cluster.sh", "azure/cluster.sh.j2", job,
                                pool=pool_name(job), registry=acr_name(job.image),
                                has_group=job.num_nodes > 1 and not job.has_reservation,
                                os_disk_gib=os_disk_gib(job),
                                is_lustre=is_lustre(job), lustre_driver_version=LUSTRE_DRIVER_VERSION,
                                lustre_driver_files=LUSTRE_DRIVER_FILES, identities=identities(job)))
    return files


def identities(job: Job) -> list[JsonDict]:
    """Return the managed identities that the script makes: of the run's pods, and of the servers, which only read."""
    serve, versions = job.spec.serve, job.versions
    pods = {"account": job.place.service_account, "identity": '"$IDENTITY"', "title": "the pods' identity",
            "why": "The pods' own identity: workload identity, no key and no secret anywhere.",
            "grants": [one for one in job.buckets if one.scheme == "az"]}
    servers = {"account": serve.service_account, "identity": '"$IDENTITY"-serve', "title": "the servers' identity",
               "why": "That of the servers, which only read.", "grants": [versions]}
    return [pods, *([servers] if versions and not serve.identity else [])]


def pool_name(job: Job) -> str:
    return f"{POOL}spot" if job.is_spot else POOL


def is_lustre(job: Job) -> bool:
    """Return whether the volume is Managed Lustre, whose driver AKS does not have."""
    return "lustre" in job.place.volume


def os_disk_gib(job: Job) -> int:
    """Return the size of a node's disk, on which AKS keeps emptyDir volumes and so the data's cache."""
    needed = SYSTEM_GIB + job.spec.data.cache_gb
    return next((size for size in DISK_GIB if size >= needed), DISK_GIB[-1])
