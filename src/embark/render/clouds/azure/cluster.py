"""An AKS cluster: the `az` commands that make it, and the objects that give its pods InfiniBand."""

from __future__ import annotations

import json
from typing import Any

from embark.render.clouds.azure.volumes import storage_account_setting
from embark.render.file import File
from embark.render.job import Job
from embark.render.location import Site, buckets, site_of
from embark.render.shell_text import (
    PRELUDE,
    Shell,
    command,
    output_of,
    quote,
    run,
    script,
    setting,
    unless,
    variable,
)
from embark.render.targets.operators import install_operator
from embark.render.yaml_text import note, yaml_text

KUBERNETES_VERSION = "1.34"
SYSTEM_MACHINE = "Standard_D4s_v5"
NETWORK_OPERATOR_VERSION = "26.4.0"
DOCA_DRIVER_VERSION = "doca3.4.0-26.04-0.8.4.0-0"
GPU_OPERATOR_VERSION = "v26.3.3"
POOL = "gpu"
"""AKS takes at most 12 small letters and digits."""
SPOT_TAINT = {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Equal", "value": "spot",
              "effect": "NoSchedule"}
GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def render_aks(job: Job) -> list[File]:
    """`aks_cluster.sh` makes the cluster; `aks_cluster.yaml` and the two values files are what it applies."""
    site = site_of(job)
    about = (f"What an AKS cluster with {job.num_nodes} x {job.machine.name} is given once it stands. The cluster "
             "itself is made by commands, not by a file: aks_cluster.sh runs them and applies this.")
    files = [
        File("aks_cluster.yaml", yaml_text(cluster_objects(job), about=about)),
        File("aks_cluster.sh", _cluster_script(job, site), is_executable=True),
        File("gpu_operator_values.yaml", yaml_text([gpu_operator_values(job)],
             about="Helm values of NVIDIA's GPU operator: driver, device plugin and metrics.")),
    ]
    if site.has_fabric:
        files.append(File("network_operator_values.yaml", yaml_text([network_operator_values(job)],
                          about="Helm values of NVIDIA's network operator, which installs the InfiniBand driver.")))
    return files


def pool_name(job: Job) -> str:
    return f"{POOL}spot" if job.spec.place.spot else POOL


def cluster_objects(job: Job) -> list[dict[str, Any]]:
    """Everything declarative: who may use the cluster's GPUs for what, and InfiniBand where the machine has it."""
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": job.namespace}},
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "embark-training"},
         "value": 1000, "globalDefault": False, "preemptionPolicy": "Never",
         "description": "Training runs: before what has no priority, and never at the cost of what runs."},
    ]
    if site_of(job).has_fabric:
        objects.append(_nic_cluster_policy(job))
    return objects


def gpu_operator_values(job: Job) -> dict[str, Any]:
    values: dict[str, Any] = {
        "driver": {"enabled": note(True, "The pool is made with --gpu-driver None, so this is the only driver.")},
        "daemonsets": {"tolerations": _tolerations(job)},
        "dcgmExporter": {"enabled": True},
        "migManager": {"enabled": False},
        "vgpuDeviceManager": {"enabled": False},
        "vfioManager": {"enabled": False},
        "sandboxDevicePlugin": {"enabled": False},
    }
    if site_of(job).has_fabric:
        values["nfd"] = {"enabled": note(False, "The network operator brings it.")}
        values["driver"]["rdma"] = note({"enabled": True}, "GPUDirect RDMA: NCCL moves memory from GPU to network card "
                                        "without the processor.")
    else:
        values["node-feature-discovery"] = {"worker": {"tolerations": _tolerations(job)}}
    return values


def network_operator_values(job: Job) -> dict[str, Any]:
    not_system = {"key": "kubernetes.azure.com/mode", "operator": "NotIn", "values": ["system"]}
    return {
        "nfd": {"enabled": True},
        "deployCR": note(False, "The policy is in aks_cluster.yaml."),
        "node-feature-discovery": {"worker": {
            "tolerations": _tolerations(job),
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [not_system]}]}}},
        }},
    }


def _nic_cluster_policy(job: Job) -> dict[str, Any]:
    has_nic = {"key": "feature.node.kubernetes.io/pci-15b3.present", "operator": "In", "values": ["true"]}
    resource = job.machine.fabric.kubernetes_resource
    prefix, _, name = resource.partition("/")
    config = {"resourceList": [{"resourcePrefix": prefix, "resourceName": name, "selectors": {
        "vendors": ["15b3"], "linkTypes": ["infiniband"], "isRdma": True}}]}
    return {
        "apiVersion": "mellanox.com/v1alpha1",
        "kind": "NicClusterPolicy",
        "metadata": {"name": note("nic-cluster-policy", "The operator reads the one of this name.")},
        "spec": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [has_nic]}]}},
            "tolerations": _tolerations(job),
            "ofedDriver": {
                "repository": "nvcr.io/nvidia/mellanox",
                "image": "doca-driver",
                "version": note(DOCA_DRIVER_VERSION, "Of the network operator's release; see its platform support page "
                                "when you change one of them."),
                "startupProbe": {"initialDelaySeconds": 10, "periodSeconds": 20},
                "livenessProbe": {"initialDelaySeconds": 30, "periodSeconds": 30},
                "readinessProbe": {"initialDelaySeconds": 10, "periodSeconds": 30},
                "upgradePolicy": {"autoUpgrade": note(False, "An upgrade drains the machine under a run.")},
            },
            "sriovDevicePlugin": {
                "repository": "nvcr.io/nvidia/mellanox",
                "image": "sriov-network-device-plugin",
                "version": f"network-operator-v{NETWORK_OPERATOR_VERSION}",
                "config": note(json.dumps(config, indent=2) + "\n",
                               f"Pods ask for {resource}: {job.machine.num_fabric_devices} on each machine."),
            },
        },
    }


def _tolerations(job: Job) -> list[dict[str, str]]:
    return [GPU_TAINT, SPOT_TAINT] if job.spec.place.spot else [GPU_TAINT]


def _cluster_script(job: Job, site: Site) -> str:
    about = "Makes the AKS cluster where it is not there yet, with its GPU machines and drivers. Safe to repeat."
    group, cluster = ("--resource-group", variable("RESOURCE_GROUP")), variable("CLUSTER")
    settings = [
        setting("RESOURCE_GROUP", site.cluster), setting("CLUSTER", site.cluster),
        setting("LOCATION", site.region),
        setting("ZONE", site.zone, "az vm list-skus shows which zones have the machine."),
        setting("IDENTITY", f"{site.cluster}-train", "What the pods are to Azure."),
    ]
    if any(bucket.scheme == "az" for bucket in buckets(job)):
        settings.append(storage_account_setting(job))
    parts = [
        "\n".join(settings),
        PRELUDE,
        'cd "$(dirname "$0")"',
        run("az", "group", "create", "--name", variable("RESOURCE_GROUP"), "--location", variable("LOCATION")),
    ]
    if site.has_fabric:
        parts.append(_infiniband_feature())
    if job.num_nodes > 1:
        parts.append(_placement_group(site))
    parts += [
        unless(command("az", "aks", "show", *group, "--name", cluster),
               _create_cluster()),
        "# A pool of its own: GPU machines in the system pool run the cluster's own pods and cannot scale to zero.\n"
        + unless(command("az", "aks", "nodepool", "show", *group, "--cluster-name", cluster, "--name", pool_name(job)),
                 _add_pool(job, site)),
        run("az", "aks", "get-credentials", *group, "--name", cluster, "--overwrite-existing"),
        _operators(site),
        run("kubectl", "apply", "-f", "aks_cluster.yaml"),
    ]
    if not job.spec.place.identity:
        parts.append(_identity(job))
    parts += install_operator(job.spec.place.target)
    return script(about, *parts)


def _infiniband_feature() -> str:
    feature = ("--namespace", "Microsoft.ContainerService", "--name", "AKSInfinibandSupport")
    show = output_of("az", "feature", "show", *feature, "--query", "properties.state", "--output", "tsv")
    return f"""\
# Without this feature machines of one pool do not share an InfiniBand fabric. It takes some minutes, once.
{run("az", "feature", "register", *feature)}
if [ "$DRY_RUN" = 0 ]; then
  until [ {show} = Registered ]; do sleep 20; done
fi
{run("az", "provider", "register", "--namespace", "Microsoft.ContainerService")}"""


def _placement_group(site: Site) -> str:
    make = run("az", "ppg", "create", "--resource-group", variable("RESOURCE_GROUP"), "--name", f"{site.cluster}-ppg",
               "--location", variable("LOCATION"), "--zone", variable("ZONE"), "--type", "Standard",
               "--intent-vm-sizes", site.machine_type)
    there = command("az", "ppg", "show", "--resource-group", variable("RESOURCE_GROUP"),
                    "--name", f"{site.cluster}-ppg")
    return "# Machines near each other.\n" + unless(there, make)


def _create_cluster() -> str:
    words = [
        "az", "aks", "create", "--resource-group", variable("RESOURCE_GROUP"), "--name", variable("CLUSTER"),
        "--location", variable("LOCATION"), "--kubernetes-version", KUBERNETES_VERSION,
        "--nodepool-name", "system", "--node-count", "2", "--node-vm-size", SYSTEM_MACHINE,
        "--network-plugin", "azure", "--network-plugin-mode", "overlay",
        "--enable-managed-identity", "--enable-oidc-issuer", "--enable-workload-identity",
        "--enable-azure-monitor-metrics", "--node-os-upgrade-channel", "NodeImage", "--generate-ssh-keys",
    ]
    return run(*words)


def _add_pool(job: Job, site: Site) -> str:
    words: list[str] = [
        "az", "aks", "nodepool", "add", "--resource-group", variable("RESOURCE_GROUP"),
        "--cluster-name", variable("CLUSTER"), "--name", pool_name(job), "--mode", "User",
        "--node-vm-size", site.machine_type, "--zones", variable("ZONE"), "--os-sku", "Ubuntu",
        "--node-osdisk-size", "256", "--gpu-driver", "None",
        "--node-count", str(job.num_nodes), "--enable-cluster-autoscaler", "--min-count", "0",
        "--max-count", str(job.num_nodes),
        "--node-taints", "nvidia.com/gpu=present:NoSchedule",
        "--labels", f"embark/pool={site.pool}",
    ]
    if job.num_nodes > 1:
        words += ["--ppg", output_of("az", "ppg", "show", "--resource-group", variable("RESOURCE_GROUP"),
                                     "--name", f"{site.cluster}-ppg", "--query", "id", "--output", "tsv")]
    if job.spec.place.spot:
        # -1: pay up to the price on demand, so that a price alone never takes the machine away.
        words += ["--priority", "Spot", "--eviction-policy", "Delete", "--spot-max-price=-1"]
    return run(*words)


def _operators(site: Site) -> str:
    repo = run("helm", "repo", "add", "--force-update", "nvidia", "https://helm.ngc.nvidia.com/nvidia")
    network = run("helm", "upgrade", "network-operator", "nvidia/network-operator", "--install",
                  "--namespace", "nvidia-network-operator", "--create-namespace",
                  "--version", NETWORK_OPERATOR_VERSION, "--values", "network_operator_values.yaml", "--wait")
    gpu = run("helm", "upgrade", "gpu-operator", "nvidia/gpu-operator", "--install",
              "--namespace", "gpu-operator", "--create-namespace",
              "--version", GPU_OPERATOR_VERSION, "--values", "gpu_operator_values.yaml", "--wait")
    return "\n".join([repo, *([network] if site.has_fabric else []), gpu])


def _identity(job: Job) -> str:
    """Workload identity: no key and no secret; the pod's service account is the identity."""
    group = ("--resource-group", variable("RESOURCE_GROUP"))
    name, account = ("--name", variable("IDENTITY")), job.spec.place.service_account
    issuer = output_of("az", "aks", "show", *group, "--name", variable("CLUSTER"),
                     "--query", "oidcIssuerProfile.issuerUrl", "--output", "tsv")
    steps = [
        "# The pods' own identity: workload identity, no key and no secret anywhere.",
        run("az", "identity", "create", *group, *name, "--location", variable("LOCATION")),
        run("az", "identity", "federated-credential", "create", *group, "--name", job.namespace,
            "--identity-name", variable("IDENTITY"), "--issuer", issuer,
            "--subject", f"system:serviceaccount:{job.namespace}:{account}",
            "--audiences", "api://AzureADTokenExchange"),
    ]
    for bucket in buckets(job):
        if bucket.scheme != "az":
            continue
        role = "Storage Blob Data Contributor" if bucket.is_written else "Storage Blob Data Reader"
        principal = output_of("az", "identity", "show", *group, *name, "--query", "principalId", "--output", "tsv")
        storage = output_of("az", "storage", "account", "show", "--name", variable("STORAGE_ACCOUNT"), "--query", "id",
                          "--output", "tsv")
        scope = f'{storage}/blobServices/default/containers/{quote(bucket.name)}'
        steps.append(run("az", "role", "assignment", "create", "--role", role,
                         "--assignee-object-id", principal,
                         "--assignee-principal-type", "ServicePrincipal", "--scope", Shell(scope)))
    client = output_of("az", "identity", "show", *group, *name, "--query", "clientId", "--output", "tsv")
    steps += [
        unless(command("kubectl", "get", "serviceaccount", account, "--namespace", job.namespace),
               run("kubectl", "create", "serviceaccount", account, "--namespace", job.namespace)),
        run("kubectl", "annotate", "serviceaccount", account, Shell(f"azure.workload.identity/client-id={client}"),
            "--namespace", job.namespace, "--overwrite"),
    ]
    return "\n".join(steps)
