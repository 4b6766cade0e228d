"""`az aks`: clusters and their node pools."""

import re
from dataclasses import replace
from typing import Any

from cloudsim.azure.arm import GROUP, NOT_FOUND, POOL, RoleAssignment, Subscription, identifier, names_of
from cloudsim.azure.cluster_cloud import AksCloud
from cloudsim.azure.facts import FACTS, MachineType
from cloudsim.azure.monitoring import WORKSPACE
from cloudsim.azure.networks import PPG, SUBNET, VNET
from cloudsim.azure.storage import REGISTRY
from cloudsim.grammar import ParsedCommand
from cloudsim.kubernetes.admission import install
from cloudsim.kubernetes.cloud import NodePool
from cloudsim.kubernetes.cluster import Cluster
from cloudsim.kubernetes.kinds import releases
from cloudsim.kubernetes.validation import label_error
from cloudsim.kubernetes.volumes import add_storage_class
from cloudsim.state import Refusal, Resource, versions_sold

CLUSTER = "Microsoft.ContainerService/managedClusters"
INFINIBAND = "Microsoft.ContainerService/AKSInfinibandSupport"
PLUGINS = {"nvidia.com/gpu": "nvidia-device-plugin-daemonset", "rdma/ib": "network-operator-sriov-device-plugin"}
SPOT = "kubernetes.azure.com/scalesetpriority"
BLOB_DRIVER = "blob.csi.azure.com"
DRIVERS = ("disk.csi.azure.com", "file.csi.azure.com")


def create_cluster(azure: Subscription, command: ParsedCommand) -> Any:
    group, name = names_of(command)
    azure.group(group)
    location = azure.location(command, group)
    found = azure.find(CLUSTER, group, name)
    if found is not None:
        azure.ready(found)
        return azure.view(found)
    sold = versions_sold(FACTS["aks"]["versions"])
    version = command.text("--kubernetes-version", sold[-2])
    if not any(version == one or version.startswith(f"{one}.") for one in sold):
        raise Refusal(f"(K8sVersionNotSupported) Managed cluster {name} is on version {version}, which is not "
                      f"supported in {location}. Supported are {', '.join(sold)}.")
    if not re.fullmatch(r"[A-Za-z0-9]([\w-]{0,61}[A-Za-z0-9])?", name):
        raise Refusal(f"(InvalidParameter) The value of parameter resourceName is invalid: {name}: at most 63 letters, "
                      "digits, hyphens and underscores, a letter or digit first and last.")
    if command["--enable-workload-identity"] and not command["--enable-oidc-issuer"]:
        raise Refusal("Enabling workload identity requires enabling OIDC issuer (--enable-oidc-issuer).")
    if command.text("--network-plugin-mode") == "overlay" and command.text("--network-plugin", "azure") != "azure":
        raise Refusal('The network plugin mode "overlay" needs --network-plugin azure.')
    size = command.text("--node-vm-size", "Standard_D8ds_v5")
    count = int(command.text("--node-count", "3"))
    kind = azure.machine_type(size, location)
    _check_quota(azure, kind, location, count, is_spot=False)
    registry = _registry(azure, command)
    managed = f"MC_{group}_{name}_{location}"
    azure.create(command, GROUP, managed, location=location, takes_s=0.0, managedBy=f"AKS cluster {name}")
    vnet = azure.create(command, VNET, managed, f"aks-vnet-{identifier(group, name)[:8]}", location=location,
                        takes_s=0.0, addressSpace={"addressPrefixes": [FACTS["aks"]["vnet_prefix"]]})
    azure.create(command, SUBNET, *vnet.name.split("/"), "aks-subnet", location=location, takes_s=0.0, delegations=[],
                 addressPrefix=FACTS["aks"]["subnet_prefix"])
    issuer = f"https://{location}.oic.prod-aks.azure.com/{identifier('tenant')}/{identifier('issuer', group, name)}/"
    made = azure.create(
        command, CLUSTER, group, name, location=location, takes_s=360.0, kubernetesVersion=version,
        nodeResourceGroup=managed,
        oidcIssuerProfile={"enabled": True, "issuerUrl": issuer} if command["--enable-oidc-issuer"] else None,
        securityProfile={"workloadIdentity": {"enabled": True} if command["--enable-workload-identity"] else None},
        identity={"type": "SystemAssigned", "principalId": identifier("cluster", group, name)},
        identityProfile={"kubeletidentity": {"objectId": identifier("kubelet", group, name)}},
        azureMonitorProfile={"metrics": {"enabled": bool(command["--enable-azure-monitor-metrics"])}})
    cluster = Cluster(name, AksCloud(azure, made), azure.clock, azure.account.folder / "clusters" / name, version,
                      tolerates_extended_resources="ExtendedResourceToleration" in FACTS["aks"]["admission"])
    azure.account.clusters[made.name] = cluster
    for driver in DRIVERS:
        cluster.add_csi_driver(driver)
    for name in ("managed-csi", "managed-csi-premium", "default"):
        add_storage_class(cluster, name, "disk.csi.azure.com", is_default=name == "default")
    if command["--enable-blob-driver"]:
        cluster.add_csi_driver(BLOB_DRIVER)
    if command["--enable-azure-monitor-metrics"]:
        _install_prometheus(cluster)
    _attach(azure, made, registry)
    _add_pool(azure, command, made, command.text("--nodepool-name", "nodepool1"), kind, mode="System", count=count)
    return azure.view(made)


def need_cluster(azure: Subscription, command: ParsedCommand, flag: str = "--name") -> Resource:
    return azure.need(CLUSTER, command.text("--resource-group"), command.text(flag))


def show_cluster(azure: Subscription, command: ParsedCommand) -> Any:
    group, name = names_of(command)
    azure.group(group)
    found = azure.find(CLUSTER, group, name)
    return azure.view(found if found is not None else need_cluster(azure, command))


def update_cluster(azure: Subscription, command: ParsedCommand) -> Any:
    found = need_cluster(azure, command)
    body, cluster = found.attributes["body"], azure.account.clusters[found.name]
    _attach(azure, found, _registry(azure, command))
    workspace = command["--azure-monitor-workspace-resource-id"]
    if workspace:
        azure.need_id(workspace, WORKSPACE)
    if command["--enable-azure-monitor-metrics"]:
        body["azureMonitorProfile"] = {"metrics": {"enabled": True}}
        _install_prometheus(cluster)
    if command["--enable-blob-driver"]:
        cluster.add_csi_driver(BLOB_DRIVER)
    if command["--enable-oidc-issuer"] and not body["oidcIssuerProfile"]:
        issuer = f"https://{found.location}.oic.prod-aks.azure.com/{identifier('issuer', found.name)}/"
        body["oidcIssuerProfile"] = {"enabled": True, "issuerUrl": issuer}
    if command["--enable-workload-identity"]:
        if not body["oidcIssuerProfile"]:
            raise Refusal("Enabling workload identity requires enabling OIDC issuer (--enable-oidc-issuer).")
        body["securityProfile"] = {"workloadIdentity": {"enabled": True}}
    azure.clock.advance(90.0)
    return azure.view(found)


def _install_prometheus(cluster: Cluster) -> None:
    install(cluster, next(one for one in releases() if one.name == "aks-managed-prometheus"), "kube-system")


def delete_cluster(azure: Subscription, command: ParsedCommand) -> Any:
    if not command["--yes"]:
        raise Refusal("Unable to prompt for confirmation as no tty available. Use --yes.")
    found = need_cluster(azure, command)
    azure.delete(command, azure.group(found.attributes["body"]["nodeResourceGroup"]), takes_s=300.0)
    azure.delete(command, found)
    forget_cluster(azure, found)


def forget_cluster(azure: Subscription, found: Resource) -> None:
    azure.account.clusters.pop(found.name, None)
    if azure.account.context == found.name:
        azure.account.context = ""


def get_credentials(azure: Subscription, command: ParsedCommand) -> Any:
    azure.account.context = need_cluster(azure, command).name


def add_pool(azure: Subscription, command: ParsedCommand) -> Any:
    owner, name = need_cluster(azure, command, "--cluster-name"), command.text("--nodepool-name")
    if azure.find(POOL, *owner.name.split("/"), name) is not None:
        raise Refusal(f"Node pool {name} already exists, please try a different name, use 'aks nodepool list' to get "
                      "current list of node pool")
    if not re.fullmatch(r"[a-z][a-z0-9]{0,11}", name):
        raise Refusal(f"(InvalidParameter) The agent pool name {name} is invalid: at most 12 small letters and digits, "
                      "and a letter first.")
    kind = azure.machine_type(command.text("--node-vm-size", "Standard_D8ds_v5"), owner.location)
    count, least, most = _counts(command)
    is_spot = command.text("--priority", "Regular").lower() == "spot"
    if not is_spot and (command["--eviction-policy"] or command["--spot-max-price"]):
        raise Refusal("(InvalidParameter) --eviction-policy and --spot-max-price need --priority Spot.")
    if is_spot and command.text("--mode", "User") == "System":
        raise Refusal("(InvalidParameter) A Spot node pool can't be a system node pool.")
    zones = azure.zones(command["--zones"] or [], owner.location, name)
    if command["--ppg"]:
        ppg = azure.need_id(command.text("--ppg"), PPG)
        wanted = ppg.attributes["body"]["zones"]
        if ppg.location != owner.location or (wanted and zones != wanted):
            raise Refusal(f"(ProximityPlacementGroupZoneMismatch) The proximity placement group "
                          f"{ppg.name.rpartition('/')[2]} is in {ppg.location}, zone {','.join(wanted)}; the pool is "
                          f"in {owner.location}, zone {','.join(zones)}.")
        if len(zones) > 1:
            raise Refusal("(InvalidParameter) A pool in a proximity placement group has at most one zone.")
    _check_quota(azure, kind, owner.location, count, is_spot=is_spot)
    return azure.view(_add_pool(azure, command, owner, name, kind, mode=command.text("--mode", "User"), count=count,
                                least=least, most=most, is_spot=is_spot, zones=zones))


def show_pool(azure: Subscription, command: ParsedCommand) -> Any:
    return azure.view(_need_pool(azure, command))


def list_pools(azure: Subscription, command: ParsedCommand) -> Any:
    owner = need_cluster(azure, command, "--cluster-name")
    return [azure.view(one) for one in azure.below(owner) if one.kind == POOL]


def scale_pool(azure: Subscription, command: ParsedCommand) -> Any:
    pool, count = _need_pool(azure, command), int(command.text("--node-count"))
    if pool.attributes["body"]["enableAutoScaling"]:
        raise Refusal("Cannot scale cluster autoscaler enabled node pool.")
    if pool.attributes["body"]["mode"] == "System" and count < 1:
        raise Refusal("(InvalidParameter) A system node pool has at least one machine.")
    resize(azure, pool, count)
    azure.clock.advance(180.0)
    return azure.view(pool)


def update_pool(azure: Subscription, command: ParsedCommand) -> Any:
    pool = _need_pool(azure, command)
    body = pool.attributes["body"]
    words = [flag for flag in ("--enable-cluster-autoscaler", "--disable-cluster-autoscaler",
                               "--update-cluster-autoscaler") if command[flag]]
    if len(words) > 1:
        raise Refusal(f"Can only specify one of {', '.join(words)}.")
    if "--disable-cluster-autoscaler" in words:
        body |= {"enableAutoScaling": False, "minCount": None, "maxCount": None}
    elif words:
        if "--update-cluster-autoscaler" in words and not body["enableAutoScaling"]:
            raise Refusal("Cluster autoscaler is not enabled for this node pool.\nRun \"az aks nodepool update "
                          "--enable-cluster-autoscaler\" to enable cluster with min-count and max-count.")
        if "--enable-cluster-autoscaler" in words and body["enableAutoScaling"]:
            return None  # az only warns.
        _, least, most = _counts(command, body["count"])
        body |= {"enableAutoScaling": True, "minCount": least, "maxCount": most}
    elif not command["--labels"] and not command["--tags"]:
        raise Refusal('Please specify one or more of "--enable-cluster-autoscaler" or "--disable-cluster-autoscaler" '
                      'or "--update-cluster-autoscaler" or "--tags" or "--labels".')
    owner, name = pool.name.rpartition("/")[0], pool.name.rpartition("/")[2]
    cluster = azure.account.clusters[owner]
    cluster.pools[name] = replace(cluster.pools[name], max_nodes=body["maxCount"] or 0)
    azure.clock.advance(60.0)
    return azure.view(pool)


def delete_pool(azure: Subscription, command: ParsedCommand) -> Any:
    owner, name = need_cluster(azure, command, "--cluster-name"), command.text("--nodepool-name")
    pool = azure.find(POOL, *owner.name.split("/"), name)
    if pool is None:
        raise Refusal(f"Node pool {name} doesnt exist, use 'aks nodepool list' to get current node pool list")
    others = [one for one in azure.below(owner) if one.kind == POOL and one is not pool]
    if pool.attributes["body"]["mode"] == "System" and not any(
            one.attributes["body"]["mode"] == "System" for one in others):
        raise Refusal("(OperationNotAllowed) There has to be at least one system agent pool.")
    azure.delete(command, pool, takes_s=240.0)
    azure.account.clusters[owner.name].remove_pool(name)


def resize(azure: Subscription, pool: Resource, count: int) -> None:
    body = pool.attributes["body"]
    more = count - body["count"]
    if more > 0:
        _check_quota(azure, azure.machine_type(body["vmSize"], pool.location), pool.location, more,
                     is_spot=body["scaleSetPriority"] == "Spot")
    body["count"], pool.is_paid = count, count > 0
    azure.account.clusters[pool.name.rpartition("/")[0]].resize_pool(pool.name.rpartition("/")[2], count)


def _need_pool(azure: Subscription, command: ParsedCommand) -> Resource:
    owner = need_cluster(azure, command, "--cluster-name")
    found = azure.find(POOL, *owner.name.split("/"), command.text("--nodepool-name"))
    if found is None:
        raise Refusal(f"(NotFound) The agent pool '{command.text('--nodepool-name')}' in cluster "
                      f"'{owner.name.rpartition('/')[2]}' could not be found.", NOT_FOUND)
    return azure.ready(found)


def _counts(command: ParsedCommand, now: int | None = None) -> tuple[int, int | None, int | None]:
    """Return the initial number of machines and the autoscaler's limits."""
    count = int(command.text("--node-count", "3")) if now is None else now
    least, most = command["--min-count"], command["--max-count"]
    if not command["--enable-cluster-autoscaler"] and not command["--update-cluster-autoscaler"]:
        if least is not None or most is not None:
            raise Refusal("min-count and max-count are required for --enable-cluster-autoscaler, please use the flag")
        return count, None, None
    if least is None or most is None:
        raise Refusal("Please specify both min-count and max-count when --enable-cluster-autoscaler is enabled")
    if int(least) > int(most):
        raise Refusal("Value of min-count should be less than or equal to value of max-count")
    if now is None and not int(least) <= count <= int(most):
        raise Refusal("node-count is not in the range of min-count and max-count")
    if command.text("--mode") == "System" and int(least) < 1:
        raise Refusal("Value of min-count should be greater than or equal to 1 for System node pools")
    return count, int(least), int(most)


def _add_pool(azure: Subscription, command: ParsedCommand, owner: Resource, name: str, kind: MachineType, *, mode: str,
              count: int, least: int | None = None, most: int | None = None, is_spot: bool = False,
              zones: list[str] | None = None) -> Resource:
    taints = _taints(command) if mode == "User" else []
    labels = dict(one.partition("=")[::2] for one in command["--labels"] or [] if mode == "User")
    for key, value in labels.items():
        if why := label_error(key, value):
            raise Refusal(f"(InvalidParameter) --labels: invalid label: {why}")
    labels |= {"kubernetes.azure.com/agentpool": name, "agentpool": name, "kubernetes.azure.com/mode": mode.lower(),
               "topology.kubernetes.io/region": owner.location, "kubernetes.azure.com/cluster": name}
    if is_spot:
        taints.append({"key": SPOT, "value": "spot", "effect": "NoSchedule"})
        labels[SPOT] = "spot"
    made = azure.create(
        command, POOL, *owner.name.split("/"), name, location=owner.location, takes_s=240.0, is_paid=count > 0,
        count=count, vmSize=kind.name, mode=mode, enableAutoScaling=most is not None, minCount=least, maxCount=most,
        scaleSetPriority="Spot" if is_spot else "Regular", availabilityZones=zones or None, nodeLabels=labels)
    disk_gib = int(command.text("--node-osdisk-size", "0")) or kind.os_disk_gib
    allocatable = kind.allocatable(disk_gib)
    # Without the feature the machines of a pool share no fabric, and the driver finds no active port.
    if kind.num_adapters and azure.features.get(INFINIBAND, float("inf")) <= azure.clock.now:
        allocatable["rdma/ib"] = str(kind.num_adapters)
    zone = f"{owner.location}-{zones[0]}" if zones else "0"
    azure.account.clusters[owner.name].add_pool(NodePool(
        name, kind.name, zone, count, allocatable, labels, tuple(taints), max_nodes=most or 0,
        devices_after={one: PLUGINS[one] for one in allocatable if one in PLUGINS}))
    return made


def _taints(command: ParsedCommand) -> list[dict[str, str]]:
    found = []
    for word in filter(None, command.text("--node-taints").split(",")):
        match = re.fullmatch(r"([^=:]+)(?:=([^:]*))?:(NoSchedule|NoExecute|PreferNoSchedule)", word)
        if match is None:
            raise Refusal(f"Invalid node taint: {word}: key=value:Effect, and the effect is NoSchedule, NoExecute or "
                          "PreferNoSchedule.", 2)
        found.append({"key": match[1], "value": match[2] or "", "effect": match[3]})
    return found


def _registry(azure: Subscription, command: ParsedCommand) -> Resource | None:
    name = command.text("--attach-acr")
    if not name:
        return None
    found = azure.by_id(name) if name.startswith("/") else azure.global_name(REGISTRY, name)
    if found is None:
        raise Refusal(f"ACR {name} not found. Have you provided the right ACR name?", NOT_FOUND)
    return found


def _attach(azure: Subscription, cluster: Resource, registry: Resource | None) -> None:
    if registry is not None:
        kubelet = cluster.attributes["body"]["identityProfile"]["kubeletidentity"]["objectId"]
        azure.assignments.append(RoleAssignment("AcrPull", kubelet, azure.id_of(registry)))


def _check_quota(azure: Subscription, kind: MachineType, location: str, count: int, *, is_spot: bool) -> None:
    error = azure.quota_error(kind, location, count, is_spot=is_spot)
    if error:
        raise Refusal(error)
