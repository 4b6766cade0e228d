"""An AWS account refuses the order and the settings that Embark's scripts once had."""

from __future__ import annotations

import json

import pytest
import yaml

from cloudsim.account import Call
from cloudsim.aws import open_account
from cloudsim.aws.eks import EksCloud
from cloudsim.aws.machines import machines
from embark.launch.shell import CommandResult

REGION = ("--region", "us-west-2")
REGISTRY = "123456789012.dkr.ecr.us-west-2.amazonaws.com"
BUCKET = "embark-findings"
CLUSTER = {
    "apiVersion": "eksctl.io/v1alpha5", "kind": "ClusterConfig",
    "metadata": {"name": "embark", "region": "us-west-2", "version": "1.34"},
    "availabilityZones": ["us-west-2b", "us-west-2a"],
    "iam": {"podIdentityAssociations": [{
        "namespace": "embark", "serviceAccountName": "embark", "permissionPolicy": {
            "Version": "2012-10-17", "Statement": [
                {"Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": f"arn:aws:s3:::{BUCKET}"},
                {"Effect": "Allow", "Action": ["s3:GetObject", "s3:PutObject"],
                 "Resource": f"arn:aws:s3:::{BUCKET}/runs/*"}]}}]},
    "addons": [{"name": "eks-pod-identity-agent"}, {"name": "aws-fsx-csi-driver"}],
    "managedNodeGroups": [
        {"name": "system", "instanceTypes": ["m7i.large"], "desiredCapacity": 2, "minSize": 2, "maxSize": 2,
         "privateNetworking": True},
        {"name": "p4d-24xlarge", "instanceTypes": ["p4d.24xlarge"], "availabilityZones": ["us-west-2b"],
         "desiredCapacity": 0, "minSize": 0, "maxSize": 2, "privateNetworking": True, "efaEnabled": True}],
}


class Shell:
    """Runs commands one after the other in one account."""

    def __init__(self, folder):
        self.folder = folder
        self.account = open_account(folder)

    def __call__(self, *words: str) -> CommandResult:
        return self.account.run(Call(words[0], words[1:], self.folder, {}))

    def must(self, *words: str) -> str:
        done = self(*words)
        assert done.code == 0, done.err
        return done.out.strip()

    def cluster(self, **changes) -> CommandResult:
        (self.folder / "cluster.yaml").write_text(yaml.safe_dump({**CLUSTER, **changes}))
        return self("eksctl", "create", "cluster", "-f", "cluster.yaml")

    def bucket(self) -> None:
        self.must("aws", "s3api", "create-bucket", "--bucket", BUCKET, *REGION, "--create-bucket-configuration",
                  "LocationConstraint=us-west-2")

    def of_cluster(self, field: str) -> str:
        return self.must("aws", "eks", "describe-cluster", "--name", "embark", *REGION, "--query",
                         f"cluster.resourcesVpcConfig.{field}", "--output", "text")

    def file_system(self, *more: str) -> CommandResult:
        subnet = self.must("aws", "ec2", "describe-subnets", *REGION, "--filters",
                           f"Name=vpc-id,Values={self.of_cluster('vpcId')}", "Name=availability-zone,Values=us-west-2b",
                           "Name=tag:kubernetes.io/role/internal-elb,Values=1", "--query", "Subnets[0].SubnetId",
                           "--output", "text")
        kind = more or ("--lustre-configuration", "DeploymentType=PERSISTENT_2,PerUnitStorageThroughput=1000")
        return self("aws", "fsx", "create-file-system", *REGION, "--file-system-type", "LUSTRE", "--storage-capacity",
                    "1200", "--subnet-ids", subnet, "--security-group-ids", self.of_cluster("clusterSecurityGroupId"),
                    *kind, "--query", "FileSystem.FileSystemId", "--output", "text")

    def link(self, file_system: str) -> CommandResult:
        return self("aws", "fsx", "create-data-repository-association", *REGION, "--file-system-id", file_system,
                    "--file-system-path", "/data", "--data-repository-path", f"s3://{BUCKET}/data")


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


def test_an_empty_account_has_nothing_that_costs_money(shell):
    assert shell.account.paid() == []
    assert "No cluster found for name: embark" in shell("eksctl", "get", "cluster", "--name", "embark", *REGION).err


def test_pod_identities_need_the_agent_before_anything_is_created(shell):
    made = shell.cluster(addons=[{"name": "aws-fsx-csi-driver"}])
    assert 'the "eks-pod-identity-agent" addon must be installed to create pod identity associations' in made.err
    assert shell.account.paid() == []


def test_metrics_server_is_there_unless_the_default_add_ons_are_not(shell):
    assert shell.cluster(addonsConfig={"disableDefaultAddons": True}).code == 0
    assert not shell.account.cluster().has_metrics_server
    shell.must("eksctl", "delete", "cluster", "--name", "embark", *REGION)
    assert shell.cluster().code == 0
    assert shell.account.cluster().has_metrics_server


def test_a_link_needs_its_bucket_and_an_available_file_system(shell):
    assert shell.cluster().code == 0
    id = shell.file_system().out.strip()
    assert "it must be AVAILABLE" in shell.link(id).err
    shell.account.clock.advance(900)
    assert f"S3 bucket of s3://{BUCKET}/data does not exist" in shell.link(id).err
    shell.bucket()
    assert shell.link(id).code == 0


def test_an_import_is_asynchronous_and_fails_for_what_no_link_covers(shell):
    assert shell.cluster().code == 0
    shell.bucket()
    (shell.folder / "part.bin").write_bytes(b"rows")
    shell.must("aws", "s3", "cp", str(shell.folder / "part.bin"), f"s3://{BUCKET}/data/part.bin", *REGION)
    id = shell.file_system().out.strip()
    shell.account.clock.advance(900)
    assert shell.link(id).code == 0
    start = ("aws", "fsx", "create-data-repository-task", *REGION, "--file-system-id", id, "--type",
             "IMPORT_METADATA_FROM_REPOSITORY", "--report", "Enabled=false", "--query", "DataRepositoryTask.TaskId",
             "--output", "text", "--paths")
    assert "no data repository association that is AVAILABLE" in shell(*start, f"s3://{BUCKET}/data").err
    shell.account.clock.advance(900)

    def state(task: str) -> str:
        return shell.must("aws", "fsx", "describe-data-repository-tasks", *REGION, "--task-ids", task, "--query",
                          "DataRepositoryTasks[0].Lifecycle", "--output", "text")

    task = shell.must(*start, f"s3://{BUCKET}/data")
    assert state(task) == "EXECUTING"
    assert "DataRepositoryTaskExecuting" in shell(*start, f"s3://{BUCKET}/data").err
    shell.account.clock.advance(900)
    assert state(task) == "SUCCEEDED"
    assert (shell.folder / "fsx" / id / "data" / "part.bin").read_bytes() == b"rows"
    other = shell.must(*start, f"s3://{BUCKET}/elsewhere")
    shell.account.clock.advance(900)
    assert state(other) == "FAILED"


def test_the_throughput_of_a_persistent_file_system_is_required(shell):
    assert shell.cluster().code == 0
    refused = shell.file_system("--lustre-configuration", "DeploymentType=PERSISTENT_2")
    assert "PerUnitStorageThroughput is required" in refused.err


def test_file_systems_and_endpoints_block_the_deletion_of_a_cluster(shell):
    assert shell.cluster().code == 0
    id, vpc = shell.file_system().out.strip(), shell.of_cluster("vpcId")
    endpoint = shell.must("aws", "ec2", "create-vpc-endpoint", *REGION, "--vpc-id", vpc, "--service-name",
                          "com.amazonaws.us-west-2.s3", "--vpc-endpoint-type", "Gateway", "--query",
                          "VpcEndpoint.VpcEndpointId", "--output", "text")
    shell.account.clock.advance(900)
    # What destroy once did: it printed nothing, and the file system still cost money.
    assert shell("eksctl", "delete", "cluster", "--name", "embark", *REGION).code == 0
    assert shell.account.paid() == [f"FSx file system {id}"]
    failed = shell("eksctl", "delete", "cluster", "--name", "embark", *REGION, "--wait")
    assert failed.code == 1
    assert id in failed.err
    assert endpoint in failed.err
    shell.must("aws", "fsx", "delete-file-system", *REGION, "--file-system-id", id)
    shell.must("aws", "ec2", "delete-vpc-endpoints", *REGION, "--vpc-endpoint-ids", endpoint)
    assert shell("eksctl", "delete", "cluster", "--name", "embark", *REGION, "--wait").code == 0
    assert shell.account.paid() == []


def test_pods_write_only_where_the_kubelet_may_apply_their_group(shell):
    assert shell.cluster().code == 0
    id = shell.file_system().out.strip()
    shell.account.clock.advance(900)
    name = shell.must("aws", "fsx", "describe-file-systems", *REGION, "--file-system-ids", id, "--query",
                      "FileSystems[0].LustreConfiguration.MountName", "--output", "text")
    cluster = shell.account.cluster()
    pool = cluster.pools["p4d-24xlarge"]

    def volume(modes: list[str], mount: str = name, **csi: str):
        return cluster.cloud.volume({"spec": {"accessModes": modes, "csi": {
            "driver": "fsx.csi.aws.com", "volumeHandle": id, **csi,
            "volumeAttributes": {"dnsname": f"{id}.fsx.us-west-2.amazonaws.com", "mountname": mount}}}}, pool)

    assert not volume(["ReadWriteMany"]).takes_fs_group
    assert not volume(["ReadWriteMany"], fsType="lustre").takes_fs_group
    assert volume(["ReadWriteOnce", "ReadWriteMany"], fsType="lustre").takes_fs_group
    assert "No such file or directory" in volume(["ReadWriteMany"], mount="fsx")


def test_only_pods_of_the_associated_account_write_to_their_prefix(shell):
    assert shell.cluster().code == 0
    cloud = shell.account.cluster().cloud
    assert isinstance(cloud, EksCloud)

    def error(uri: str, *, write: bool = True, name: str = "embark") -> str:
        return cloud.access_error(uri, write=write, namespace="embark", service_account={"metadata": {"name": name}},
                                  pod={})

    assert "NoSuchBucket" in error(f"s3://{BUCKET}/runs/dlrm")
    shell.bucket()
    assert error(f"s3://{BUCKET}/runs/dlrm") == ""
    assert "not authorized to perform: s3:GetObject" in error(f"s3://{BUCKET}/other", write=False)
    assert "NodeInstanceRole" in error(f"s3://{BUCKET}/runs/dlrm", name="default")


def test_two_processors_do_not_fit_on_a_small_node(shell):
    assert shell.cluster().code == 0
    assert shell.account.cluster().pools["system"].allocatable["cpu"] == "1930m"


@pytest.mark.parametrize(("change", "message"), [
    ({"availabilityZones": ["us-west-2b"]}, "only 1 zone(s) specified"),
    ({"availabilityZones": ["us-west-2b", "us-west-2x"]}, "us-west-2x"),
    ({"addonss": []}, 'unknown field "addonss"'),
    ({"addons": [{"name": "aws-fsx-driver"}]}, "addon aws-fsx-driver is not available"),
    ({"metadata": {"name": "embark", "region": "us-west-2", "version": "1.28"}}, "1.28 is not supported"),
    ({"managedNodeGroups": [{**CLUSTER["managedNodeGroups"][1], "availabilityZones": ["us-west-2a", "us-west-2b"]}]},
     "efaEnabled nodegroups must have only one"),
    ({"managedNodeGroups": [{**CLUSTER["managedNodeGroups"][1], "instanceTypes": ["p4x.24xlarge"]}]}, "p4x.24xlarge"),
    ({"managedNodeGroups": [{**CLUSTER["managedNodeGroups"][0], "maxSize": 1}]}, "more than maxSize"),
])
def test_eksctl_refuses_a_file_that_it_cannot_make_a_cluster_of(shell, change, message):
    done = shell.cluster(**change)
    assert done.code == 1
    assert message in done.err
    assert shell.account.paid() == []


def test_machines_beyond_the_quota_do_not_start(shell):
    shell.account.quotas["L-417A185B"] = 96
    assert shell.cluster().code == 0
    scale = ("eksctl", "scale", "nodegroup", "--cluster", "embark", *REGION, "--name", "p4d-24xlarge", "--wait")
    assert shell(*scale, "--nodes", "1").code == 0
    assert "VcpuLimitExceeded" in shell(*scale, "--nodes", "2").err
    assert "can't be greater than max size 2" in shell(*scale, "--nodes", "3").err
    assert "No node group found for name: p4d" in shell(*scale[:-3], "--name", "p4d", "--nodes", "1").err


CLAIM = """apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data, namespace: embark}
spec: {accessModes: [ReadWriteMany], storageClassName: '', volumeName: data, resources: {requests: {storage: 1200Gi}}}
"""


def test_a_claim_is_refused_before_its_namespace_exists(shell):
    assert shell.cluster().code == 0
    (shell.folder / "claim.yaml").write_text(CLAIM)
    assert 'namespaces "embark" not found' in shell("kubectl", "apply", "-f", "claim.yaml").err
    shell.must("kubectl", "create", "namespace", "embark")
    assert shell("kubectl", "apply", "-f", "claim.yaml").code == 0


def test_the_efa_chart_needs_its_own_name_and_a_toleration(shell):
    groups = [{**CLUSTER["managedNodeGroups"][1], "desiredCapacity": 1,
               "taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]}]
    assert shell.cluster(managedNodeGroups=groups).code == 0
    shell.must("helm", "repo", "add", "eks", "https://aws.github.io/eks-charts")
    chart = ("eks/aws-efa-k8s-device-plugin", "--install", "--namespace", "kube-system")
    # What eks_cluster.sh once did: it deleted the name that eksctl gave up in 2025.
    shell.must("kubectl", "delete", "daemonset", "aws-efa-k8s-device-plugin-daemonset", "--namespace", "kube-system",
               "--ignore-not-found")
    refused = shell("helm", "upgrade", "aws-efa-k8s-device-plugin", *chart)
    assert "invalid ownership metadata" in refused.err
    cluster = shell.account.cluster()

    def devices() -> dict[str, float]:
        cluster.advance(300)
        return {name: amount for node in cluster.ready_nodes() for name, amount in cluster.allocatable(node).items()}

    assert "vpc.amazonaws.com/efa" not in devices(), "eksctl's own does not tolerate the taint"
    shell.must("helm", "upgrade", "embark-efa", *chart, "--set-json", 'tolerations=[{"operator":"Exists"}]')
    assert devices()["vpc.amazonaws.com/efa"] == 4
    assert devices()["nvidia.com/gpu"] == 8


def cloud_config(setup: str) -> str:
    unit = "[Service]\nExecStart=/usr/local/bin/embark-node\n"
    node = f"#!/bin/bash\nexec docker run --rm --network host {REGISTRY}/embark:1 python -m embark.torchrun\n"
    files = {"/usr/local/bin/embark-setup": f"#!/bin/bash\nset -euo pipefail\n{setup}\n",
             "/usr/local/bin/embark-node": node, "/etc/systemd/system/embark.service": unit}
    return "#cloud-config\n" + yaml.safe_dump({
        "write_files": [{"path": path, "content": text} for path, text in files.items()],
        "runcmd": [["/usr/local/bin/embark-setup"], ["systemctl", "enable", "--now", "embark.service"]]})


def start_machine(shell: Shell, setup: str, actions: list[str]) -> None:
    trust = {"Version": "2012-10-17", "Statement": [
        {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}]}
    policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": actions, "Resource": "*"}]}
    shell.must("aws", "iam", "create-role", "--role-name", "run", "--assume-role-policy-document", json.dumps(trust))
    shell.must("aws", "iam", "put-role-policy", "--role-name", "run", "--policy-name", "run", "--policy-document",
               json.dumps(policy))
    shell.must("aws", "iam", "create-instance-profile", "--instance-profile-name", "run")
    shell.must("aws", "iam", "add-role-to-instance-profile", "--instance-profile-name", "run", "--role-name", "run")
    (shell.folder / "user_data").write_text(cloud_config(setup))
    subnet = shell.must("aws", "ec2", "describe-subnets", *REGION, "--filters", "Name=default-for-az,Values=true",
                        "Name=availability-zone,Values=us-west-2b", "--query", "Subnets[0].SubnetId", "--output",
                        "text")
    shell.must("aws", "ec2", "run-instances", *REGION, "--image-id",
               "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id",
               "--instance-type", "g5.xlarge", "--subnet-id", subnet, "--iam-instance-profile", "Name=run",
               "--user-data", "file://user_data")


LOGIN = (f"aws ecr get-login-password --region us-west-2 | docker login --username AWS --password-stdin {REGISTRY}")
PULL = f"docker pull {REGISTRY}/embark:1"


@pytest.mark.parametrize(("setup", "actions", "message"), [
    (PULL, ["ecr:*"], "no basic auth credentials"),
    (f"{LOGIN}\n{PULL}", ["s3:*"], "not authorized to perform: ecr:GetAuthorizationToken"),
    (f"{LOGIN}\n{PULL}", ["ecr:GetAuthorizationToken"], "not authorized to perform: ecr:BatchCheckLayerAvailability"),
    (f"{LOGIN}\n{PULL}", ["ecr:*"], ""),
])
def test_a_plain_machine_pulls_from_ecr_by_login_and_role(shell, setup, actions, message):
    shell.must("aws", "ecr", "create-repository", "--repository-name", "embark", *REGION)
    shell.account.images.pushed[f"{REGISTRY}/embark:1"] = "sha256:0"
    start_machine(shell, setup, actions)
    machine, = machines(shell.account)
    id, started = machine.instance.id, machine.start()
    assert started.is_training is (message == "")
    assert message in started.log
    shell.must("aws", "iam", "attach-role-policy", "--role-name", "run", "--policy-arn",
               "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore")
    shown = shell("aws", "ssm", "start-session", *REGION, "--target", id)
    assert (shown.code == 0) is started.is_training
    assert message in shown.out + shown.err


def test_a_relative_path_is_the_caller_s_not_the_account_s(tmp_path):
    shell = Shell(tmp_path)
    shell.bucket()
    (tmp_path / "part-0.bin").write_text("rows")
    shell.must("aws", "s3", "cp", "part-0.bin", f"s3://{BUCKET}/data/part-0.bin", *REGION)
    shell.must("aws", "s3", "cp", f"s3://{BUCKET}/data/part-0.bin", "back.bin", *REGION)
    assert (tmp_path / "back.bin").read_text() == "rows"
