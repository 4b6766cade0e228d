"""Google Cloud: the GKE cluster, plain machines, Filestore, Managed Lustre and Cloud Storage FUSE."""

from collections.abc import Sequence

from embark.render.folder import File, Files
from embark.render.job import MAX_FLEX_H, Job
from embark.render.shell_text import Shell, Step, Words, job_steps, job_text, job_words, script_file
from embark.render.targets.vm_node import about_machines, cloud_init, find_by_name, refuse_volume
from embark.render.wheel import upload_words
from embark.values import frozen

IMAGE_FAMILY, IMAGE_PROJECT = "common-cu129-ubuntu-2204-nvidia-580", "deeplearning-platform-release"
BUILT_IN = ("a2-", "a3-", "a4", "g2-", "g4-")  # Families whose machines have their GPUs; to others they are attached.
LOCAL_SSD_GB = 375 * 1.073741824  # Google sells them by 375 GiB; the catalog counts in GB.
DEFAULT_ADDONS = ("HttpLoadBalancing", "HorizontalPodAutoscaling", "GcePersistentDiskCsiDriver")
"""What a cluster has without `--addons`; a name that the flag leaves out is switched off."""
INSTALLERS = "https://raw.githubusercontent.com/GoogleCloudPlatform/container-engine-accelerators/master"
INSTALLER_OF = {
    "gpudirect-tcpx": ["gpudirect-tcpx/nccl-tcpx-installer.yaml", "nri_device_injector/nri-device-injector.yaml"],
    "gpudirect-tcpxo": ["gpudirect-tcpxo/nccl-tcpxo-installer.yaml", "nri_device_injector/nri-device-injector.yaml"],
    "gpudirect-rdma": ["gpudirect-rdma/nccl-rdma-installer.yaml"]
}


def render_vm(job: Job) -> Files:
    """Write `vm.sh` and `cloud_init.yaml`."""
    refuse_volume(job)
    words = start_words(job, [Shell('--metadata-from-file=user-data="$FIRST_START"')])
    return [
        script_file("vm.sh", "gcp/vm.sh.j2", job, about=about_machines(job), image_family=IMAGE_FAMILY,
                    image_project=IMAGE_PROJECT, steps=[*account_steps(job), *network_steps(job)], start_words=words,
                    upload_words=upload_words(job)),
        cloud_init(job, find_by_name(job))
    ]


def account_steps(job: Job) -> list[Step]:
    """Return steps that create the machines' service account."""
    services = ["compute", "iam", "artifactregistry", *(["tpu"] if job.is_tpu else [])]
    roles = ["artifactregistry.reader", "logging.logWriter", "monitoring.metricWriter"]
    if job.target == "tpu-vm":  # A slice releases itself when the run has ended.
        roles.append("tpu.admin")
    grants = [job_words(job, "grant_role", role=role) for role in roles]
    grants += [job_words(job, "grant_bucket", bucket=bucket.name,
                         role="objectUser" if bucket.is_written else "objectViewer")
               for bucket in job.buckets if bucket.scheme == "gs"]
    steps = job_steps(job, "account", services=[f"{name}.googleapis.com" for name in services])
    return [*steps, Step("", tuple(grants))]


def network_steps(job: Job) -> list[Step]:
    """Return steps that create the firewall rule and the placement policy."""
    return [*job_steps(job, "network"), *(job_steps(job, "placement") if has_placement(job) else [])]


def has_placement(job: Job) -> bool:
    """Return whether a policy places the machines near each other; a reservation has its own."""
    return job.num_nodes > 1 and job.capacity in ("on-demand", "spot")


def start_words(job: Job, given: Sequence[str]) -> Words:
    """Return the command that starts a machine."""
    machine_type = job.location.machine_type
    options = {"start_attached": not machine_type.startswith(BUILT_IN), "start_spot": job.is_spot,
               "start_flex": job.capacity == "flex-start", "start_reserved": job.has_reservation,
               "start_block": job.capacity == "block", "start_placed": has_placement(job), "project": True}
    return job_words(
        job, "start", options, given=given,
        disk="hyperdisk-balanced" if machine_type.startswith("a4") else "pd-balanced",
        accelerator=job.machine.gke_accelerator, num_gpus=str(job.machine.num_gpus),
        limit_s=str(round(3600 * (job.place.max_hours or MAX_FLEX_H))))


@frozen
class ExtraNetwork:
    """A network card of the machine, and the network it is on."""

    name: str  # The Kubernetes object's, which pods name in an annotation.
    network: str
    subnet: str
    range: str
    device_mode: str  # `NetDevice`, or `RDMA`.


def render_gke(job: Job) -> Files:
    """Write `gke_cluster.sh`, which makes networks, cluster and node pool, and what it applies."""
    machine, place, is_tpu = job.machine, job.place, job.is_tpu
    addons = [*DEFAULT_ADDONS, "GcsFuseCsiDriver"]
    if place.volume:
        addons.append("GcpFilestoreCsiDriver" if place.volume.startswith("filestore") else "LustreCsiDriver")
    is_compact = (machine.num_hosts > 1 if is_tpu
                  else has_placement(job) and machine.fabric.name in ("gvnic", "gpudirect-tcpx"))
    about = (f"What a GKE cluster with {job.num_nodes} x {job.machine.name} is given once it stands. The cluster "
             "itself is made by commands, not by a file: gke_cluster.sh runs them and applies this.")
    return [
        File("gke_cluster.yaml", job_text("gcp/gke_cluster.yaml.j2", job, about=about, networks=extra_networks(job))),
        script_file(
            "gke_cluster.sh", "gcp/cluster.sh.j2", job, networks=extra_networks(job), pools=pool_names(job),
            mtu=8896 if job.machine.fabric.name == "gpudirect-rdma" else 8244, addons=",".join(addons),
            num_disks=round((machine.local_disk_gb or 0) / LOCAL_SSD_GB), is_tpu=is_tpu, is_compact=is_compact,
            nodes_per_pool=machine.num_hosts if machine.num_hosts > 1 else job.num_nodes,
            topology=job.topology,
            installers=[f"{INSTALLERS}/{path}" for path in INSTALLER_OF.get(machine.fabric.name, [])])
    ]


def extra_networks(job: Job) -> list[ExtraNetwork]:
    """Return networks of the fabric: one for each card of TCPX and TCPXO; for RDMA a second ordinary one, and one with
    a subnet for each card."""
    fabric, num = job.machine.fabric.name, job.machine.num_fabric_devices or 0
    prefix = job.location.cluster
    if fabric in ("gpudirect-tcpx", "gpudirect-tcpxo"):
        return [ExtraNetwork(f"vpc{i}", f"{prefix}-net-{i}", f"{prefix}-sub-{i}", f"192.168.{i}.0/24", "NetDevice")
                for i in range(1, num + 1)]
    if fabric == "gpudirect-rdma":
        ordinary = ExtraNetwork("gvnic-1", f"{prefix}-gvnic-net", f"{prefix}-gvnic-sub", "192.168.0.0/24", "NetDevice")
        cards = [ExtraNetwork(f"rdma-{i}", f"{prefix}-rdma-net", f"{prefix}-rdma-sub-{i}", f"192.168.{i + 1}.0/24",
                              "RDMA") for i in range(num)]
        return [ordinary, *cards]
    return []


def pool_names(job: Job) -> list[str]:
    """Return names of the node pools: one for each slice of several hosts, else one for all machines."""
    pool = job.location.pool
    if job.machine.num_hosts == 1 or job.num_nodes == 1:
        return [pool]
    return [f"{pool}-{index}" for index in range(job.num_nodes)]
