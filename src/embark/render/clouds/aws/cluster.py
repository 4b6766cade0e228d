"""An EKS cluster: what eksctl makes of one file, and the steps that eksctl does not do."""

from typing import Any

from embark.render.file import File
from embark.render.job import Job
from embark.render.location import Location, location_of, object_store_paths
from embark.render.scripts import script_file
from embark.render.yaml_text import note, yaml_text

KUBERNETES_VERSION = "1.34"
"""eksctl 0.230's default; in standard support."""
SYSTEM_MACHINE = "m7i.large"
READ_ACTIONS = ["s3:GetObject"]
WRITE_ACTIONS = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]


def render_eks(job: Job) -> list[File]:
    """`eks_cluster.yaml` for eksctl, and `eks_cluster.sh` that runs it and what comes after."""
    location = location_of(job)
    about = (f"An EKS cluster with {job.num_nodes} x {job.machine.name} in {location.zone}. "
             "eks_cluster.sh makes it; by hand: eksctl create cluster -f eks_cluster.yaml")
    return [
        File("eks_cluster.yaml", yaml_text([cluster_config(job)], about=about)),
        script_file("eks_cluster.sh", "aws/cluster.sh.j2", job),
    ]


def cluster_config(job: Job) -> dict[str, Any]:
    """An `eksctl.io/v1alpha5` ClusterConfig."""
    location = location_of(job)
    zones = [location.zone, _other_zone(location.zone)]
    config: dict[str, Any] = {
        "apiVersion": "eksctl.io/v1alpha5",
        "kind": "ClusterConfig",
        "metadata": {"name": location.cluster, "region": location.region, "version": KUBERNETES_VERSION,
                     "tags": {"embark": location.cluster}},
        "availabilityZones": note(zones, "The control plane wants two zones; the GPU machines stand in the first."),
        "vpc": {"nat": {"gateway": note("Single", "One is enough: the data comes through the S3 endpoint.")}},
        "iam": {"withOIDC": True},
        "addonsConfig": {"autoApplyPodIdentityAssociations": True},
        "addons": _addons(job),
        "cloudWatch": {"clusterLogging": {"enableTypes": ["api", "scheduler", "controllerManager"],
                                          "logRetentionInDays": 14}},
        "managedNodeGroups": [_system_group(), _gpu_group(job, location)],
    }
    statements = bucket_statements(job)
    if statements and not job.spec.place.identity:
        config["iam"]["podIdentityAssociations"] = note([{
            "namespace": job.namespace,
            "serviceAccountName": job.spec.place.service_account,
            "permissionPolicy": {"Version": "2012-10-17", "Statement": statements},
        }], "Who the run's pods are to AWS: no key and no secret anywhere.")
    return config


def _addons(job: Job) -> list[dict[str, Any]]:
    names = ["vpc-cni", "coredns", "kube-proxy", "eks-pod-identity-agent"]
    addons: list[dict[str, Any]] = [{"name": name} for name in names]
    addons.append({"name": "amazon-cloudwatch-observability"})
    if job.spec.place.volume.startswith("fsx-"):
        addons.append({"name": "aws-fsx-csi-driver"})
    return addons


def _system_group() -> dict[str, Any]:
    return {
        "name": "system",
        "instanceTypes": [SYSTEM_MACHINE],
        "desiredCapacity": 2,
        "minSize": 2,
        "maxSize": 2,
        "privateNetworking": True,
        "volumeSize": 50,
    }


def _gpu_group(job: Job, location: Location) -> dict[str, Any]:
    group: dict[str, Any] = {
        "name": location.pool,
        "instanceTypes": [location.machine_type],
        "amiFamily": "AmazonLinux2023",
        "availabilityZones": note([location.zone], "Exactly one: EFA does not cross zones."),
        "privateNetworking": note(True, "Machines with several network cards cannot have public addresses."),
        "desiredCapacity": note(job.num_nodes, "Billed from the moment they start. To stop: eksctl scale nodegroup "
                                f"--cluster {location.cluster} --name {location.pool} --nodes 0"),
        "minSize": 0,
        "maxSize": job.num_nodes,
        "volumeSize": 200,
        "disableIMDSv1": True,
        "disablePodIMDS": note(False, "Pods ask the metadata service for spot notices; eksctl then sets the hop limit "
                               "to the 2 that this takes."),
        "labels": {"embark/pool": location.pool},
        "taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}],
        "tags": {"embark": location.cluster, "embark-run": job.name},
    }
    if job.spec.place.spot:
        group["spot"] = True
    if location.has_fabric:
        num = job.machine.num_fabric_devices
        group["efaEnabled"] = note(True, f"All {num} EFA devices of a machine, a security group that lets them talk, "
                                   "and a cluster placement group: eksctl makes all three.")
    if job.machine.local_disk_gb:
        group["overrideBootstrapCommand"] = note(
            "apiVersion: node.eks.aws/v1alpha1\nkind: NodeConfig\nspec:\n  instance:\n    localStorage:\n"
            "      strategy: RAID0\n",
            "The machine's own disks as one, under images and emptyDir volumes: where the data is cached.")
    if not job.machine.is_on_demand and "block" in job.machine.sold and not job.spec.place.spot:
        group["instanceMarketOptions"] = note({"marketType": "capacity-block"},
                                              f"{job.machine.name} is sold in Capacity Blocks. Buy one, and put its id "
                                              "here in place of the zeros.")
        group["capacityReservation"] = {
            "capacityReservationTarget": {"capacityReservationID": "cr-00000000000000000"}}
    return group


def bucket_statements(job: Job) -> list[dict[str, Any]]:
    """What the run may do, as statements of an IAM policy: in S3 its own places, in CloudWatch its own metrics."""
    statements: list[dict[str, Any]] = []
    for path in object_store_paths(job):
        if path.scheme != "s3":
            continue
        arn = f"arn:aws:s3:::{path.name}"
        below = f"{arn}/{path.prefix}/*" if path.prefix else f"{arn}/*"
        may_list = {"Effect": "Allow", "Action": ["s3:ListBucket", "s3:GetBucketLocation"], "Resource": arn}
        if may_list not in statements:
            statements.append(may_list)
        statements.append({"Effect": "Allow", "Action": WRITE_ACTIONS if path.is_written else READ_ACTIONS,
                           "Resource": below})
    watch = job.spec.watch
    if "cloudwatch" in watch.sinks:
        statements.append({"Effect": "Allow", "Action": ["cloudwatch:PutMetricData"], "Resource": "*", "Condition": {
            "StringEquals": {"cloudwatch:namespace": watch.cloudwatch_namespace}}})
    return statements


def _other_zone(zone: str) -> str:
    """Another zone of the region, for the control plane."""
    return zone[:-1] + ("b" if zone.endswith("a") else "a")
