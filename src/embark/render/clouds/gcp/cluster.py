"""A GKE cluster: the `gcloud` commands that make it, and the objects that give its pods the fast networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from embark.render.file import File
from embark.render.job import Job
from embark.render.location import Site, buckets, site_of
from embark.render.shell_text import (
    PRELUDE,
    Shell,
    command,
    needed,
    option,
    output_of,
    run,
    script,
    setting,
    unless,
    variable,
)
from embark.render.targets import tpu_gke
from embark.render.targets.operators import install_operator
from embark.render.yaml_text import yaml_text

SYSTEM_MACHINE = "e2-standard-4"
LOCAL_SSD_GB = 375 * 1.073741824
"""Google sells them by 375 GiB; the catalog counts in GB."""
INSTALLERS = "https://raw.githubusercontent.com/GoogleCloudPlatform/container-engine-accelerators/master"
INSTALLER_OF = {
    "gpudirect-tcpx": ["gpudirect-tcpx/nccl-tcpx-installer.yaml", "nri_device_injector/nri-device-injector.yaml"],
    "gpudirect-tcpxo": ["gpudirect-tcpxo/nccl-tcpxo-installer.yaml", "nri_device_injector/nri-device-injector.yaml"],
    "gpudirect-rdma": ["gpudirect-rdma/nccl-rdma-installer.yaml"],
}


@dataclass(frozen=True, slots=True)
class ExtraNetwork:
    """A network card of the machine, and the network it is on."""

    name: str
    """The Kubernetes object's, which pods name in an annotation."""
    network: str
    subnet: str
    range: str
    device_mode: str
    """`NetDevice`, or `RDMA`."""


def render_gke(job: Job) -> list[File]:
    """`gke_cluster.sh` makes networks, cluster and node pool; `gke_cluster.yaml` is what it then applies."""
    site = site_of(job)
    about = (f"What a GKE cluster with {job.num_nodes} x {job.machine.name} is given once it stands. The cluster "
             "itself is made by commands, not by a file: gke_cluster.sh runs them and applies this.")
    return [
        File("gke_cluster.yaml", yaml_text(cluster_objects(job), about=about)),
        File("gke_cluster.sh", _cluster_script(job, site), is_executable=True),
    ]


def extra_networks(job: Job) -> list[ExtraNetwork]:
    """Of the fabric: one network for each card of TCPX and TCPXO; for RDMA a second ordinary one, and one with a
    subnet for each card."""
    fabric, num = job.machine.fabric.name, job.machine.num_fabric_devices or 0
    prefix = site_of(job).cluster
    if fabric in ("gpudirect-tcpx", "gpudirect-tcpxo"):
        return [ExtraNetwork(f"vpc{i}", f"{prefix}-net-{i}", f"{prefix}-sub-{i}", f"192.168.{i}.0/24", "NetDevice")
                for i in range(1, num + 1)]
    if fabric == "gpudirect-rdma":
        ordinary = ExtraNetwork("gvnic-1", f"{prefix}-gvnic-net", f"{prefix}-gvnic-sub", "192.168.0.0/24", "NetDevice")
        cards = [ExtraNetwork(f"rdma-{i}", f"{prefix}-rdma-net", f"{prefix}-rdma-sub-{i}", f"192.168.{i + 1}.0/24",
                              "RDMA") for i in range(num)]
        return [ordinary, *cards]
    return []


def project_setting(job: Job) -> str:
    """The project that pays: the spec's, or one that must be named."""
    account = job.spec.place.account
    return setting("PROJECT", account) if account else needed("PROJECT", "the id of your Google Cloud project")


def cluster_objects(job: Job) -> list[dict[str, Any]]:
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": job.namespace}},
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "embark-training"},
         "value": 1000, "globalDefault": False, "preemptionPolicy": "Never",
         "description": "Training runs: before what has no priority, and never at the cost of what runs."},
    ]
    for extra in extra_networks(job):
        objects.append({
            "apiVersion": "networking.gke.io/v1", "kind": "GKENetworkParamSet", "metadata": {"name": extra.name},
            "spec": {"vpc": extra.network, "vpcSubnet": extra.subnet, "deviceMode": extra.device_mode}})
        objects.append({
            "apiVersion": "networking.gke.io/v1", "kind": "Network", "metadata": {"name": extra.name},
            "spec": {"type": "Device", "parametersRef": {
                "group": "networking.gke.io", "kind": "GKENetworkParamSet", "name": extra.name}}})
    return objects


def _cluster_script(job: Job, site: Site) -> str:
    about = "Makes the GKE cluster where it is not there yet, with its networks and GPU machines. Safe to repeat."
    settings = [
        project_setting(job),
        setting("CLUSTER", site.cluster), setting("REGION", site.region),
        setting("ZONE", site.zone, "gcloud compute machine-types list shows which zones have the machine."),
    ]
    parts = [
        "\n".join(settings),
        PRELUDE,
        'cd "$(dirname "$0")"',
        run("gcloud", "services", "enable", "container.googleapis.com", "compute.googleapis.com",
            option("--project", variable("PROJECT"))),
        *_networks(job, site),
        unless(_gcloud("container", "clusters", "describe", variable("CLUSTER"),
                       option("--location", variable("REGION"))),
               _create_cluster(job, site)),
        "# A cluster that was there may lack this run's machines.\n"
        + "\n".join(
            unless(_gcloud("container", "node-pools", "describe", pool, option("--cluster", variable("CLUSTER")),
                           option("--location", variable("REGION"))),
                   _create_pool(job, site, pool)) for pool in pool_names(job)),
        _run("container", "clusters", "get-credentials", variable("CLUSTER"), option("--location", variable("REGION"))),
        run("kubectl", "apply", "-f", "gke_cluster.yaml"),
    ]
    installers = INSTALLER_OF.get(job.machine.fabric.name, [])
    if installers:
        parts.append("\n".join(["# NCCL's plugin for this fabric, put on every GPU machine.",
                                *(run("kubectl", "apply", "-f", f"{INSTALLERS}/{path}") for path in installers)]))
    parts.append(_identity(job))
    parts += install_operator(job.spec.place.target)
    return script(about, *parts)


def _networks(job: Job, site: Site) -> list[str]:
    parts, made = [], set()
    for extra in extra_networks(job):
        is_rdma = extra.device_mode == "RDMA"
        if extra.network not in made:
            made.add(extra.network)
            profile = [Shell('--network-profile="$ZONE-vpc-roce"')] if is_rdma else []
            mtu = "8896" if is_rdma or job.machine.fabric.name == "gpudirect-rdma" else "8244"
            steps = [_run("compute", "networks", "create", extra.network, "--subnet-mode=custom", f"--mtu={mtu}",
                          *profile)]
            if not is_rdma:  # an RDMA network lets all traffic in, and takes no rules
                steps.append(_run("compute", "firewall-rules", "create", f"{extra.network}-internal",
                                  f"--network={extra.network}", "--action=ALLOW",
                                  "--rules=tcp:0-65535,udp:0-65535,icmp", "--source-ranges=192.168.0.0/16"))
            parts.append(unless(_gcloud("compute", "networks", "describe", extra.network), *steps))
        parts.append(unless(
            _gcloud("compute", "networks", "subnets", "describe", extra.subnet, option("--region", variable("REGION"))),
            _run("compute", "networks", "subnets", "create", extra.subnet, f"--network={extra.network}",
                 option("--region", variable("REGION")), f"--range={extra.range}")))
    if not parts:
        return []
    why = f"# The networks of {job.machine.fabric.title}, which NCCL's traffic goes over, past the first card."
    return ["\n".join([why, *parts])]


def _create_cluster(job: Job, site: Site) -> str:
    addons = ["GcsFuseCsiDriver"]
    if job.spec.place.volume:
        addons.append("GcpFilestoreCsiDriver" if job.spec.place.volume.startswith("filestore") else "LustreCsiDriver")
    words: list[str] = [
        "container", "clusters", "create", variable("CLUSTER"),
        option("--location", variable("REGION")), option("--node-locations", variable("ZONE")),
        "--release-channel=regular", f"--machine-type={SYSTEM_MACHINE}", "--num-nodes=2",
        "--enable-ip-alias", "--enable-dataplane-v2", Shell('--workload-pool="$PROJECT.svc.id.goog"'),
        f"--addons={','.join(addons)}", "--enable-image-streaming",
        "--enable-managed-prometheus", "--monitoring=SYSTEM,DCGM", "--labels=embark=cluster",
    ]
    if site.has_fabric:
        words.append("--enable-multi-networking")
    why = "# One zone, so that counts are what they say: each zone of a regional pool has the whole count."
    return f"{why}\n{_run(*words)}"


def pool_names(job: Job) -> list[str]:
    """Of the run's machines."""
    pool = site_of(job).pool
    return tpu_gke.pool_names(job, pool) if tpu_gke.is_tpu(job) else [pool]


def _create_pool(job: Job, site: Site, pool: str) -> str:
    if tpu_gke.is_tpu(job):
        return _run(*tpu_gke.pool_words(job, pool, site.machine_type))
    machine = job.machine
    words: list[str] = [
        "container", "node-pools", "create", pool, option("--cluster", variable("CLUSTER")),
        option("--location", variable("REGION")), option("--node-locations", variable("ZONE")),
        f"--machine-type={site.machine_type}",
        f"--accelerator=type={machine.gke_accelerator},count={machine.gpus_per_host},gpu-driver-version=latest",
        f"--num-nodes={job.num_nodes}", "--enable-autoscaling", "--total-min-nodes=0",
        f"--total-max-nodes={job.num_nodes}", "--location-policy=ANY",
        "--enable-gvnic", "--workload-metadata=GKE_METADATA", "--disk-size=200",
        f"--node-labels=embark/pool={site.pool}",
    ]
    if job.spec.place.spot:
        words.append("--spot")
    num_disks = round((machine.local_disk_gb or 0) / LOCAL_SSD_GB)
    if num_disks:
        words.append(f"--ephemeral-storage-local-ssd=count={num_disks}")
    if job.num_nodes > 1 and machine.fabric.name in ("gvnic", "gpudirect-tcpx"):
        words.append("--placement-type=COMPACT")
    if not machine.is_on_demand and not job.spec.place.spot and "flex-start" in machine.sold:
        words += ["--flex-start", "--reservation-affinity=none", "--no-enable-autorepair"]
    for extra in extra_networks(job):
        words.append(f"--additional-node-network=network={extra.network},subnetwork={extra.subnet}")
    return _run(*words)


def _identity(job: Job) -> str:
    """Workload identity federation: roles are given to the service account of the pods itself."""
    used = [bucket for bucket in buckets(job) if bucket.scheme == "gs"]
    place = job.spec.place
    subject = f"ns/{job.namespace}/sa/{place.service_account}"
    if place.identity:
        member = Shell(f'"serviceAccount:$PROJECT.svc.id.goog[{job.namespace}/{place.service_account}]"')
        return "\n".join([
            "# The pods may be the service account that the spec names; what that may do is yours to say.",
            _run("iam", "service-accounts", "add-iam-policy-binding", place.identity, option("--member", member),
                 "--role=roles/iam.workloadIdentityUser"),
        ])
    if not used:
        return ""
    number = output_of("gcloud", "projects", "describe", variable("PROJECT"),
                       option("--format", "value(projectNumber)"))
    steps = [
        "# The pods' own identity: their service account holds the roles; no key and no secret anywhere.",
        f'NUMBER=0\nif [ "$DRY_RUN" = 0 ]; then NUMBER={number}; fi',
        'POOL="projects/$NUMBER/locations/global/workloadIdentityPools/$PROJECT.svc.id.goog"',
        f'MEMBER="principal://iam.googleapis.com/$POOL/subject/{subject}"',
    ]
    for bucket in used:
        role = "roles/storage.objectUser" if bucket.is_written else "roles/storage.objectViewer"
        steps.append(_run("storage", "buckets", "add-iam-policy-binding", f"gs://{bucket.name}",
                          option("--member", variable("MEMBER")), option("--role", role)))
    return "\n".join(steps)


def _gcloud(*words: str) -> str:
    return command("gcloud", *words, option("--project", variable("PROJECT")))


def _run(*words: str) -> str:
    return run("gcloud", *words, option("--project", variable("PROJECT")))


