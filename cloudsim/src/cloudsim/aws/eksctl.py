"""`eksctl`: clusters, node groups and pod identities."""

import json
from dataclasses import dataclass

from cloudsim.account import AnsweredBy, Call
from cloudsim.aws.account import HOME_REGION, NUMBER, AwsAccount, facts
from cloudsim.aws.cluster_config import ClusterConfig, read_config
from cloudsim.aws.ec2 import machine_type
from cloudsim.aws.eks import GPU_PLUGIN, EksCloud, node_pool
from cloudsim.aws.network import (
    Network,
    make_network,
    obstacles,
    remove_machines_access,
    remove_network,
)
from cloudsim.grammar import ParsedCommand, load_grammar
from cloudsim.kubernetes.cluster import Cluster
from cloudsim.kubernetes.volumes import add_storage_class
from cloudsim.state import Refusal
from embark.values import JsonDict

CREATE_S, GROUP_S, SCALE_S, DELETE_S = 900.0, 240.0, 120.0, 600.0
STACK = "CloudFormation stack"


@dataclass(slots=True)
class Group:
    """The size limits of a node group."""

    least: int
    most: int


class Eksctl:
    """Creates at once what CloudFormation would, and advances the clock by the time that takes."""

    name = "eksctl"
    answered_by: AnsweredBy = "stand-in"

    def __init__(self, account: AwsAccount) -> None:
        self.account = account
        self.grammar = load_grammar("eksctl")
        self.groups: dict[tuple[str, str], Group] = {}  # The key is that of the cluster and the group's name.

    def run(self, call: Call) -> str:
        given = self.grammar.parse(call.words)
        answers = {
            "version": self._version, "get cluster": self._get_cluster, "get nodegroup": self._get_group,
            "get podidentityassociation": self._get_identity, "create cluster": self._create_cluster,
            "create nodegroup": self._create_group, "create podidentityassociation": self._create_identity,
            "update podidentityassociation": self._update_identity, "scale nodegroup": self._scale,
            "delete nodegroup": self._delete_group, "delete cluster": self._delete_cluster}
        return answers[given.name](call, given)

    def _version(self, call: Call, given: ParsedCommand) -> str:
        return f"{self.grammar.version}\n"

    def _get_cluster(self, call: Call, given: ParsedCommand) -> str:
        region, name = self._region(call, given), given.text("--name") or given.positionals.get("NAME")
        if name:
            self._cluster(region, str(name))
        rows = [{"Name": one.name, "Region": region, "Owned": "True"} for key, one in self.account.clusters.items()
                if key.startswith(f"{region}/") and name in (None, one.name)]
        return _printed(rows, given)

    def _get_group(self, call: Call, given: ParsedCommand) -> str:
        key, cluster = self._named(call, given)
        name = given.text("--name") or given.positionals.get("NAME")
        if name and name not in cluster.pools:
            raise Refusal(f"Error: nodegroup with name {name} not found")
        return _printed([{"Cluster": cluster.name, "NodeGroup": pool.name, "MinSize": self.groups[key, pool.name].least,
                          "MaxSize": self.groups[key, pool.name].most, "DesiredCapacity": pool.num_nodes,
                          "InstanceType": pool.machine_type} for pool in cluster.pools.values()
                         if name in (None, pool.name)], given)

    def _get_identity(self, call: Call, given: ParsedCommand) -> str:
        _, cluster = self._named(call, given)
        return _printed([{"Namespace": namespace, "ServiceAccountName": name}
                         for namespace, name in _cloud(cluster).identities], given)

    def _create_cluster(self, call: Call, given: ParsedCommand) -> str:
        config = self._config(call, given)
        key = f"{config.region}/{config.name}"
        if key in self.account.clusters or self.account.resources.find(STACK, key):
            raise Refusal(f'Error: creating CloudFormation stack "eksctl-{config.name}-cluster": operation error '
                          f"CloudFormation: CreateStack, AlreadyExistsException: Stack [eksctl-{config.name}-cluster] "
                          "already exists")
        known = self.account.client("ec2", config.region).describe_availability_zones()["AvailabilityZones"]
        zones = config.zones or [row["ZoneName"] for row in known][:3]
        network = make_network(self.account, config.region, config.name, zones, has_nat=config.has_nat)
        self.account.client("eks", config.region).create_cluster(
            name=config.name, version=config.version,
            roleArn=f"arn:aws:iam::{NUMBER}:role/eksctl-{config.name}-cluster",
            resourcesVpcConfig={"subnetIds": list(network.subnets.values()), "securityGroupIds": [network.group]})
        self.account.backends("eks")[config.region].clusters[config.name].resources_vpc_config |= {
            "vpcId": network.vpc, "clusterSecurityGroupId": network.group}
        self.account.resources.add(STACK, key, network=network)
        cloud = EksCloud(self.account, config.name, network, config.addons, config.gives_roles)
        cluster = Cluster(config.name, cloud, self.account.clock, self.account.folder / "clusters" / config.name,
                          config.version, tolerates_extended_resources=True,
                          has_metrics_server=config.has_metrics_server)
        self.account.clusters[key] = cluster
        self.account.clock.advance(CREATE_S)
        for addon, name in facts()["eks"]["daemon_sets"].items():
            if addon in config.addons | {"vpc-cni", "kube-proxy"}:
                cluster.add_daemon_set(name)
        for driver, addon in facts()["eks"]["drivers"].items():
            if addon in config.addons:
                cluster.add_csi_driver(driver)
        add_storage_class(cluster, "gp2", "kubernetes.io/aws-ebs")  # Not the default one since 1.30.
        for one in config.identities:
            cloud.identities[one["namespace"], one["serviceAccountName"]] = one
        for group in config.groups:
            self._add_group(key, cluster, config, group)
        self.account.clock.advance(GROUP_S)
        self.account.context = key
        return f'EKS cluster "{config.name}" in "{config.region}" region is ready\n'

    def _create_group(self, call: Call, given: ParsedCommand) -> str:
        config = self._config(call, given) if given["--config-file"] else self._flags_config(call, given)
        key, cluster = self._cluster(config.region, config.name)
        wanted = given.text("--include").split(",") if given["--include"] else []
        found = [one for one in config.groups if not wanted or one["name"] in wanted]
        if not found:
            raise Refusal(f"Error: no nodegroups match the include filter {wanted}: "
                          f"{[one['name'] for one in config.groups]} are in the config file")
        new = [one for one in found if one["name"] not in cluster.pools]  # eksctl skips groups that exist.
        for group in new:
            self._add_group(key, cluster, config, group)
        self.account.clock.advance(GROUP_S if new else 0.0)
        return f'created {len(new)} managed nodegroup(s) in cluster "{config.name}"\n'

    def _flags_config(self, call: Call, given: ParsedCommand) -> ClusterConfig:
        """Return the node group that flags describe, in all zones of the cluster."""
        _, cluster = self._named(call, given)
        kind, num = given.text("--node-type", "m5.large"), int(given.text("--nodes", "2"))
        if machine_type(kind) is None:
            raise Refusal(f"Error: InvalidInstanceType: The following supplied instance types do not exist: [{kind}]")
        group = {"name": given.text("--name") or given.positionals.get("NAME"), "instanceTypes": [kind],
                 "desiredCapacity": num, "minSize": int(given.text("--nodes-min", str(num))),
                 "maxSize": int(given.text("--nodes-max", str(num))),
                 "volumeSize": int(given.text("--node-volume-size", str(facts()["eks"]["disk_gib"]))),
                 "privateNetworking": bool(given["--node-private-networking"])}
        zones = sorted({zone for _, zone in _cloud(cluster).network.subnets})
        return ClusterConfig(cluster.name, self._region(call, given), cluster.version,
                             {"availabilityZones": zones, "managedNodeGroups": [group]})

    def _add_group(self, key: str, cluster: Cluster, config: ClusterConfig, group: JsonDict) -> None:
        zones = group.get("availabilityZones") or config.zones
        network = _cloud(cluster).network
        for zone in zones:
            if ("private" if group.get("privateNetworking") else "public", zone) not in network.subnets:
                raise Refusal(f'Error: could not find subnets in {zone} for nodegroup "{group["name"]}"')
        pool = node_pool(group, cluster=config.name, region=config.region, zone=zones[0])
        if why := cluster.cloud.on_pool_change(pool, pool.num_nodes):
            raise Refusal(f'Error: failed to create nodegroups for cluster "{config.name}"\n'
                          'AWS::EKS::Nodegroup/ManagedNodeGroup: CREATE_FAILED – "AsgInstanceLaunchFailures: Could '
                          f'not launch On-Demand Instances. {why}" ({group["name"]})')
        if "capacityReservation" in group:
            target = (group["capacityReservation"].get("capacityReservationTarget") or {}).get("capacityReservationID")
            raise Refusal(f"Error: InvalidCapacityReservationId.NotFound: The capacity reservation '{target}' does not "
                          "exist")
        cluster.add_pool(pool)
        most = int(group.get("maxSize", max(2, pool.num_nodes)))
        self.groups[key, pool.name] = Group(int(group.get("minSize", pool.num_nodes)), most)
        if "nvidia.com/gpu" in pool.allocatable:
            cluster.add_daemon_set(GPU_PLUGIN)
        if group.get("efaEnabled"):  # eksctl's plugin for EFA does not tolerate the taint of GPU machines.
            cluster.add_daemon_set("aws-efa-k8s-device-plugin", tolerates=False)

    def _create_identity(self, call: Call, given: ParsedCommand) -> str:
        return self._put_identities(call, given, must_exist=False)

    def _update_identity(self, call: Call, given: ParsedCommand) -> str:
        return self._put_identities(call, given, must_exist=True)

    def _put_identities(self, call: Call, given: ParsedCommand, *, must_exist: bool) -> str:
        config = self._config(call, given)
        _, cluster = self._cluster(config.region, config.name)
        known = _cloud(cluster).identities
        for one in config.identities:
            key = one["namespace"], one["serviceAccountName"]
            if must_exist and key not in known:
                raise Refusal(f'Error: pod identity association "{key[0]}/{key[1]}" not found')
            if not must_exist and key in known:
                raise Refusal(f"Error: ResourceInUseException: Association already exists: {key[0]}/{key[1]}")
            known[key] = one
        return "all tasks were completed successfully\n"

    def _scale(self, call: Call, given: ParsedCommand) -> str:
        key, cluster = self._named(call, given)
        name = given.text("--name") or str(given.positionals.get("NAME") or "")
        nodes = int(given.text("--nodes", "-1"))
        least, most = (None if given[flag] is None else int(given.text(flag))
                       for flag in ("--nodes-min", "--nodes-max"))
        if nodes < 0:
            raise Refusal("Error: number of nodes must be 0 or greater")
        if most is not None and most < nodes:
            raise Refusal("Error: maximum number of nodes must be greater than or equal to number of nodes")
        if least is not None and least > nodes:
            raise Refusal("Error: minimum number of nodes must be less than or equal to number of nodes")
        failed = (f'Error: failed to scale nodegroup "{name}" for cluster "{cluster.name}", error: operation error '
                  "EKS: UpdateNodegroupConfig, ")
        if name not in cluster.pools:
            raise Refusal(f"{failed}ResourceNotFoundException: No node group found for name: {name}.")
        limits = self.groups[key, name]
        least, most = limits.least if least is None else least, limits.most if most is None else most
        if most < 1:
            raise Refusal(f"{failed}InvalidParameterException: Minimum value for maxSize is 1")
        if not least <= nodes <= most:
            limit = f"greater than max size {most}" if nodes > most else f"less than min size {least}"
            raise Refusal(f"{failed}InvalidParameterException: desired capacity {nodes} can't be {limit}")
        if why := cluster.cloud.on_pool_change(cluster.pools[name], nodes):
            raise Refusal(f"Error: failed to scale nodegroup \"{name}\" for cluster \"{cluster.name}\", error: "
                          f"AsgInstanceLaunchFailures: Could not launch On-Demand Instances. {why}")
        self.groups[key, name] = Group(least, most)
        cluster.resize_pool(name, nodes)
        self.account.clock.advance(SCALE_S if given["--wait"] else 0.0)
        return "nodegroup successfully scaled\n" if given["--wait"] else "initiated scaling of nodegroup\n"

    def _delete_group(self, call: Call, given: ParsedCommand) -> str:
        _, cluster = self._named(call, given)
        name = given.text("--name") or str(given.positionals.get("NAME") or "")
        if name not in cluster.pools:
            raise Refusal(f"Error: nodegroup with name {name} not found")
        cluster.remove_pool(name)
        self.account.clock.advance(GROUP_S)
        return f'deleted 1 nodegroup(s) from cluster "{cluster.name}"\n'

    def _delete_cluster(self, call: Call, given: ParsedCommand) -> str:
        """Delete a cluster. Without --wait, eksctl does not report how the deletion of the cluster's own stack ends."""
        region = self._region(call, given)
        name = given.text("--name") or str(given.positionals.get("NAME") or "")
        if given["--config-file"]:
            config = self._config(call, given)
            region, name = config.region, config.name
        key = f"{region}/{name}"
        stack = self.account.resources.find(STACK, key)
        if stack is None:
            raise Refusal(f'Error: unable to describe cluster control plane: operation error EKS: DescribeCluster, '
                          f"ResourceNotFoundException: No cluster found for name: {name}.")
        network: Network = stack.attributes["network"]
        if self.account.clusters.pop(key, None):
            self.account.client("eks", region).delete_cluster(name=name)
        for known in [one for one in self.groups if one[0] == key]:
            del self.groups[known]
        if self.account.context == key:
            self.account.context = ""
        remove_machines_access(self.account, network)
        self.account.clock.advance(DELETE_S if given["--wait"] else GROUP_S)
        if why := obstacles(self.account, network):
            if not given["--wait"]:
                return "all cluster resources were deleted\n"
            failed = f'Error: failed to delete cluster with nodegroup(s): stack "eksctl-{name}-cluster": DELETE_FAILED'
            raise Refusal("\n".join([failed, *why]))
        remove_network(self.account, network)
        self.account.resources.remove(STACK, key)
        return "all cluster resources were deleted\n"

    def _config(self, call: Call, given: ParsedCommand) -> ClusterConfig:
        if not given["--config-file"]:
            raise Refusal(f"Error: {given.name} without --config-file is not part of this rehearsal")
        for flag in ("--name", "--cluster", "--region", "--version", "--nodes", "--node-type", "--zones"):
            if given[flag] is not None and given.name != "delete cluster":
                raise Refusal(f"Error: cannot use {flag} when --config-file/-f is set")
        return read_config(self.account, call, given.text("--config-file"))

    def _named(self, call: Call, given: ParsedCommand) -> tuple[str, Cluster]:
        if given["--config-file"]:
            config = read_config(self.account, call, given.text("--config-file"))
            return self._cluster(config.region, config.name)
        return self._cluster(self._region(call, given), given.text("--cluster"))

    def _cluster(self, region: str, name: str) -> tuple[str, Cluster]:
        found = self.account.clusters.get(f"{region}/{name}")
        if found is None:
            raise Refusal(f'Error: unable to describe cluster control plane: operation error EKS: DescribeCluster, '
                          f"ResourceNotFoundException: No cluster found for name: {name}.")
        return f"{region}/{name}", found

    def _region(self, call: Call, given: ParsedCommand) -> str:
        return given.text("--region") or call.env.get("AWS_REGION") or call.env.get("AWS_DEFAULT_REGION") or HOME_REGION


def _cloud(cluster: Cluster) -> EksCloud:
    assert isinstance(cluster.cloud, EksCloud)
    return cluster.cloud


def _printed(rows: list[JsonDict], given: ParsedCommand) -> str:
    if given["--output"] in ("json", "yaml"):
        return json.dumps(rows, indent=4) + "\n"
    return "".join("\t".join(map(str, row.values())) + "\n" for row in [{name: name for name in rows[0]}, *rows]) \
        if rows else "No clusters found\n"
