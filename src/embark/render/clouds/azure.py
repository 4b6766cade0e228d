"""Azure: the AKS cluster, plain machines, NetApp Files, Managed Lustre and BlobFuse."""

from collections.abc import Sequence

from embark.render.folder import File
from embark.render.job import Job, Location
from embark.render.pod import tolerations
from embark.render.shell_text import Shell, Step, Words, job_text, quote, script_file, variable
from embark.render.targets.vm_node import about_machines, acr_name, cloud_init, find_by_name, refuse_volume
from embark.render.wheel import upload_words
from embark.render.yaml_text import plain
from embark.values import JsonDict, frozen

IMAGE = "microsoft-dsvm:ubuntu-hpc:2204:latest"  # Microsoft's image with NVIDIA's driver, InfiniBand's and Docker.
_GROUP = ("--resource-group", variable("RESOURCE_GROUP"))
DOCA_DRIVER_VERSION = "doca3.4.0-26.04-0.8.4.0-0"
LUSTRE_DRIVER_VERSION = "v0.4.0"  # A release of kubernetes-sigs/azurelustre-csi-driver, 2026-11.
LUSTRE_DRIVER_FILES = ("rbac-csi-azurelustre-controller", "rbac-csi-azurelustre-node", "csi-azurelustre-driver",
                       "csi-azurelustre-controller", "csi-azurelustre-node-jammy", "csi-azurelustre-node-noble")
DISK_GIB = (256, 512, 1024, 2048)  # Sizes of Premium SSDs that a node's own disk can have.
SYSTEM_GIB = 150  # Part of that disk for the system, images and logs.
POOL = "gpu"  # AKS takes at most 12 small letters and digits.


def render_vm(job: Job) -> list[File]:
    """Write `vm.sh` and `cloud_init.yaml`."""
    refuse_volume(job)
    location = job.location
    words = start_words(job, location, ["--generate-ssh-keys", "--custom-data", Shell('"$FIRST_START"')])
    about = about_machines(job) + " A machine that is only shut down is still billed."
    return [
        script_file("vm.sh", "azure/vm.sh.j2", job, about=about, vm_image=IMAGE, steps=network_steps(job, location),
                    start_words=words, grants=grant_words(job), end_words=end_words(),
                    upload_words=upload_words(job)),
        cloud_init(job, find_by_name(job)),
    ]


def network_steps(job: Job, location: Location) -> list[Step]:
    """Return steps that create the network; all of it is in one resource group, and is deleted with it."""
    steps = [
        Step("the resource group, with all that is in it",
             (("az", "group", "create", "--name", variable("RESOURCE_GROUP"), "--location", variable("LOCATION")),),
             remove=(end_words(),)),
        Step("", (("az", "network", "vnet", "create", *_GROUP, "--name", "embark", "--subnet-name", "machines"),)),
        Step("", (("az", "network", "nsg", "create", *_GROUP, "--name", "embark"),),
             why="Machines of one network may talk; from outside nothing comes in. The public address is for their way "
                 "out."),
    ]
    if _has_set(job):
        steps += [
            Step("", (("az", "ppg", "create", *_GROUP, "--name", job.name, "--location", variable("LOCATION"),
                       "--intent-vm-sizes", location.machine_type),),
                 why="In one availability set the machines share an InfiniBand fabric; in one proximity group they are "
                     "near."),
            Step("", (("az", "vm", "availability-set", "create", *_GROUP, "--name", job.name, "--ppg", job.name,
                       "--platform-fault-domain-count", "1", "--platform-update-domain-count", "1"),)),
        ]
    return steps


def start_words(job: Job, location: Location, given: Sequence[str]) -> Words:
    """Start machine number `$rank`. `given` says who may log in and what it does at its first start."""
    words: list[str] = [
        "az", "vm", "create", *_GROUP, "--name", Shell(f'"{job.name}-$rank"'), "--size", location.machine_type,
        "--image", variable("VM_IMAGE"), "--admin-username", "embark", *given,
        "--os-disk-size-gb", "256", "--assign-identity", "[system]",
        "--vnet-name", "embark", "--subnet", "machines", "--nsg", "embark", "--public-ip-sku", "Standard",
        "--tags", f"embark-run={job.name}",
    ]
    if _has_set(job):
        words += ["--availability-set", job.name, "--ppg", job.name]
    if job.has_reservation:
        words += ["--capacity-reservation-group", job.place.reservation, "--zone", job.location.zone]
    if job.is_spot:
        words += ["--priority", "Spot", "--eviction-policy", "Delete", "--max-price=-1"]
    return tuple(words)


@frozen
class Grants:
    """Commands that give the identity of a machine, `$principal`, roles in `$machine`, `$account` and `$registry`."""

    principal: Words
    machine: Words
    itself: Words  # Lets it deallocate itself when the run has ended.
    account: Words
    grants: tuple[Words, ...]
    registry: Words = ()  # Empty if the image is not in a registry of Azure.
    pulls: tuple[Words, ...] = ()


def grant_words(job: Job) -> Grants:
    """Let the machine's own identity use the run's containers, and pull the image."""
    grants = []
    for bucket in job.buckets:
        if bucket.scheme != "az":
            continue
        role = "Storage Blob Data Contributor" if bucket.is_written else "Storage Blob Data Reader"
        grants.append(_grant(role, Shell(f'"$account"/blobServices/default/containers/{quote(bucket.name)}')))
    registry = acr_name(job.image) if job.place.image else ""
    return Grants(
        principal=("az", "vm", "show", *_GROUP, "--name", Shell(f'"{job.name}-$rank"'),
                   "--query", "identity.principalId", "--output", "tsv"),
        machine=("az", "vm", "show", *_GROUP, "--name", Shell(f'"{job.name}-$rank"'), "--query", "id",
                 "--output", "tsv"),
        itself=_grant("Virtual Machine Contributor", Shell('"$machine"')),
        account=("az", "storage", "account", "show", "--name", variable("STORAGE_ACCOUNT"),
                 "--query", "id", "--output", "tsv"),
        grants=tuple(grants),
        registry=("az", "acr", "show", "--name", registry, "--query", "id", "--output", "tsv") if registry else (),
        pulls=(_grant("AcrPull", Shell('"$registry"')),) if registry else ())


def _grant(role: str, scope: Shell) -> Words:
    return ("az", "role", "assignment", "create", "--role", role, "--assignee-object-id", Shell('"$principal"'),
            "--assignee-principal-type", "ServicePrincipal", "--scope", scope)


def end_words() -> Words:
    return ("az", "group", "delete", "--name", variable("RESOURCE_GROUP"), "--yes")


def _has_set(job: Job) -> bool:
    return job.num_nodes > 1 and not job.is_spot and not job.has_reservation


def render_aks(job: Job) -> list[File]:
    """Write `aks_cluster.sh`, which makes the cluster, and the files that it applies."""
    about = (f"What an AKS cluster with {job.num_nodes} x {job.machine.name} is given once it stands. The cluster "
             "itself is made by commands, not by a file: aks_cluster.sh runs them and applies this.")
    templates = ["aks_cluster.yaml", "gpu_operator_values.yaml"]
    if job.location.has_fabric:
        templates.append("network_operator_values.yaml")
    values = {"doca_driver_version": DOCA_DRIVER_VERSION, "about": about,
              "resource": job.machine.fabric.kubernetes_resource, "tolerations": plain(tolerations(job))}
    files = [File(name, job_text(f"azure/{name}.j2", job, **values)) for name in templates]
    files.insert(1, script_file("aks_cluster.sh", "azure/cluster.sh.j2", job, pool=pool_name(job),
                                registry=acr_name(job.image),
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
