"""EKS's side of a cluster: what its nodes offer, which identity its pods have, what they can pull, read and mount."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from cloudsim.aws import fsx
from cloudsim.aws.account import AwsAccount, facts
from cloudsim.aws.ec2 import launch_error, machine_type
from cloudsim.aws.ecr import HOST, PULL_ACTIONS, EcrRegistry, pull_denial
from cloudsim.aws.iam import bucket_error, role_arn
from cloudsim.aws.network import Network
from cloudsim.kubernetes.cloud import Manifest, NodePool, VolumeFacts
from embark.formatting import to_one_line
from embark.kubernetes.objects import at
from embark.values import JsonDict, JsonMap

NODE_ACTIONS = json.dumps({"Version": "2012-10-17", "Statement": [
    {"Effect": "Allow", "Action": list(PULL_ACTIONS), "Resource": "*"}]})
"""The policy of eksctl's nodes for S3 and ECR, AmazonEC2ContainerRegistryPullOnly."""
STRATEGIES = ("RAID0", "RAID10", "Mount")
GPU_PLUGIN, EFA_PLUGIN = "nvidia-device-plugin-daemonset", "embark-efa-aws-efa-k8s-device-plugin"
"""The device plugins of NVIDIA, by eksctl, and of EFA, by eks_cluster.sh: eksctl's does not tolerate GPU taints."""


@dataclass(slots=True)
class EksCloud:
    """The cloud of one EKS cluster."""

    account: AwsAccount
    name: str
    network: Network
    addons: set[str]
    has_driver_role: bool = False  # The EBS driver may create disks.
    identities: dict[tuple[str, str], JsonDict] = field(default_factory=dict)
    """Maps namespace and service account to the association in the ClusterConfig."""

    def pull_error(self, image: str, pool: NodePool, namespace: str) -> str:
        if not self.network.nat:
            return f'failed to pull and unpack image "{image}": dial tcp: i/o timeout'
        why = EcrRegistry(self.account).image_error(image)
        if not why and HOST.match(image):
            why = pull_denial([NODE_ACTIONS], self._node(pool))
        return f'failed to pull and unpack image "{image}": {why}' if why else ""

    def access_error(self, uri: str, *, write: bool, namespace: str, service_account: Manifest, pod: Manifest) -> str:
        return bucket_error(self.account, uri, *self._identity(namespace, service_account), write=write)

    def volume(self, volume: Manifest, pool: NodePool) -> VolumeFacts | str:
        csi = at(volume, "spec.csi") or {}
        driver = str(csi.get("driver"))
        addon = facts()["eks"]["drivers"].get(driver)
        if addon is None or addon not in self.addons:
            return (f"MountVolume.MountDevice failed: driver name {driver} not found in the list of registered CSI "
                    "drivers")
        if driver != "fsx.csi.aws.com":
            return f"driver {driver} is not part of this rehearsal"
        found = {one.name: one for one in fsx.file_systems(self.account, self.network.region)}.get(csi["volumeHandle"])
        body = {} if found is None else found.attributes["body"]
        given: Mapping[str, str] = csi.get("volumeAttributes") or {}
        source = f"{given.get('dnsname')}@tcp:/{given.get('mountname', 'fsx')}"
        failed = f'MountVolume.SetUp failed: rpc error: code = Internal desc = Could not mount "{source}": '
        if found is None or given.get("dnsname") != body["DNSName"]:
            return f"{failed}mount.lustre: Can't parse NID '{source}': no such host"
        if given.get("mountname", "fsx") != body["LustreConfiguration"]["MountName"]:
            return f"{failed}mount.lustre: mount {source} failed: No such file or directory"
        if not self.account.resources.is_ready(found) or found.attributes["vpc"] != self.network.vpc \
                or self.network.group not in found.attributes["groups"]:
            return f"{failed}mount.lustre: mount {source} failed: Connection timed out"
        # The driver's fsGroupPolicy is ReadWriteOnceWithFSType: the volume must have that access mode and a type.
        modes = at(volume, "spec.accessModes") or []
        takes_group = bool(csi.get("fsType")) and bool({"ReadWriteOnce", "ReadWriteOncePod"} & set(modes))
        return VolumeFacts(fsx.folder_of(self.account, found), takes_fs_group=takes_group, fetches=True)

    def make_disk(self, name: str, driver: str, gib: float) -> str:
        if not self.has_driver_role:
            return ("rpc error: code = Internal desc = Could not create volume: UnauthorizedOperation: the service "
                    "account kube-system/ebs-csi-controller-sa has no role")
        self.account.resources.add("EBS volume", name, is_paid=True)
        return ""

    def drop_disk(self, name: str) -> None:
        self.account.resources.remove("EBS volume", name)

    def on_pool_change(self, pool: NodePool, num_nodes: int) -> str:
        is_spot = pool.labels.get("eks.amazonaws.com/capacityType") == "SPOT"
        cluster = self.account.clusters.get(f"{self.network.region}/{self.name}")
        have = 0 if cluster is None else len(cluster.nodes_of(pool.name))
        code, message = launch_error(self.account, pool.zone, pool.machine_type,
                                     max(0, num_nodes - have), is_spot=is_spot)
        return f"{code} - {message}" if code and num_nodes > have else ""

    def _identity(self, namespace: str, service_account: Manifest) -> tuple[list[str], str]:
        """Return the policies of a pod and the name of its role; without a pod identity these are its node's."""
        name = str((service_account.get("metadata") or {}).get("name", ""))
        found = self.identities.get((namespace, name))
        if found is None or "eks-pod-identity-agent" not in self.addons:
            return [NODE_ACTIONS], role_arn(f"eksctl-{self.name}-nodegroup-NodeInstanceRole", "i-0node")
        policy = found.get("permissionPolicy")
        return ([json.dumps(policy)] if policy else [],
                role_arn(f"eksctl-{self.name}-podidentityrole-{namespace}-{name}", "eks-pod"))

    def _node(self, pool: NodePool) -> str:
        return role_arn(f"eksctl-{self.name}-nodegroup-{pool.name}-NodeInstanceRole", "i-0node")


def node_pool(group: JsonMap, *, cluster: str, region: str, zone: str) -> NodePool:
    """Return the machines of a node group as Kubernetes sees them."""
    name = str((group.get("instanceTypes") or [group.get("instanceType", "m5.large")])[0])
    found = machine_type(name) or {}
    config, join_error = _node_config(group)
    disk_gib = float(group.get("volumeSize", facts()["eks"]["disk_gib"]))
    if at(config, "spec.instance.localStorage.strategy") in ("RAID0", "RAID10"):
        disk_gib = float((found.get("InstanceStorageInfo") or {}).get("TotalSizeInGB", disk_gib)) * 1e9 / 2**30
    allocatable = _allocatable(found, disk_gib)
    devices: dict[str, str] = {}
    gpus = sum(int(gpu["Count"]) for gpu in (found.get("GpuInfo") or {}).get("Gpus", []))
    if gpus:
        allocatable["nvidia.com/gpu"] = str(gpus)
        devices["nvidia.com/gpu"] = GPU_PLUGIN
    if group.get("efaEnabled"):
        allocatable["vpc.amazonaws.com/efa"] = str(found["NetworkInfo"]["EfaInfo"]["MaximumEfaInterfaces"])
        allocatable["hugepages-2Mi"] = f"{2 * facts()['eks']['hugepages']}Mi"
        devices["vpc.amazonaws.com/efa"] = EFA_PLUGIN
    labels = {
        "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux", "node.kubernetes.io/instance-type": name,
        "topology.kubernetes.io/region": region, "topology.kubernetes.io/zone": zone,
        "eks.amazonaws.com/capacityType": "SPOT" if group.get("spot") else "ON_DEMAND",
        "eks.amazonaws.com/nodegroup": str(group["name"]), "alpha.eksctl.io/cluster-name": cluster,
        "alpha.eksctl.io/nodegroup-name": str(group["name"]), **(group.get("labels") or {})}
    taints = tuple({"key": str(one["key"]), "value": str(one.get("value", "")), "effect": str(one["effect"])}
                   for one in group.get("taints") or ())
    num = int(group.get("desiredCapacity", group.get("minSize", 2)))
    return NodePool(name=str(group["name"]), machine_type=name, zone=zone, num_nodes=num, allocatable=allocatable,
                    labels=labels, taints=taints, devices_after=devices, join_error=join_error)


def _node_config(group: JsonMap) -> tuple[Any, str]:
    """Return the NodeConfig of a node group's user data, and why nodeadm refuses it."""
    text = group.get("overrideBootstrapCommand")
    if not text:
        return {}, ""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return {}, f"nodeadm: NodeConfig: error converting YAML to JSON: {to_one_line(str(error))}"
    if (at(config, "apiVersion"), at(config, "kind")) != ("node.eks.aws/v1alpha1", "NodeConfig"):
        return {}, "nodeadm: the user data has no NodeConfig of node.eks.aws/v1alpha1"
    strategy = at(config, "spec.instance.localStorage.strategy")
    if strategy not in (None, *STRATEGIES):
        return {}, f"nodeadm: spec.instance.localStorage.strategy: {strategy} is none of {', '.join(STRATEGIES)}"
    return config, ""


def _allocatable(machine: JsonMap, disk_gib: float) -> dict[str, str]:
    rules = facts()["eks"]
    cpus, network = int(machine["VCpuInfo"]["DefaultVCpus"]), machine["NetworkInfo"]
    reserved, left = 0.0, cpus
    for num, share in rules["cpu_steps"]:
        taken = min(left, num)
        reserved, left = reserved + taken * share, left - taken
    reserved += left * rules["cpu_rest"]
    pods = int(network["MaximumNetworkInterfaces"]) * (int(network["Ipv4AddressesPerInterface"]) - 1) + 2
    memory_mib = int(machine["MemoryInfo"]["SizeInMiB"]) * rules["memory_share"]
    memory_mib -= rules["reserved_mib"] + rules["reserved_mib_per_pod"] * pods + rules["eviction_mib"]
    return {"cpu": f"{round((cpus - reserved) * 1000)}m", "memory": f"{round(memory_mib)}Mi", "pods": str(pods),
            "ephemeral-storage": f"{int((disk_gib * 0.9 - rules['disk_reserved_gib']) * 1024)}Mi"}


