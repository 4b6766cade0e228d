"""The rendered scripts of AWS with one mistake each: the account refuses it, and the message names the cause."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from integration.account.guide import copy_of_clone

from embark.rehearse.account.session import AccountSession

pytestmark = pytest.mark.slow

IMAGE = "123456789012.dkr.ecr.us-west-2.amazonaws.com/embark:1"
NAMES = f"embark render run.toml --set store.root=s3://embark-mutant/runs --set place.image={IMAGE} >/dev/null"
PUSH = f"""aws ecr create-repository --repository-name embark --region us-west-2 >/dev/null
aws ecr get-login-password --region us-west-2 |
  docker login --username AWS --password-stdin 123456789012.dkr.ecr.us-west-2.amazonaws.com
docker build --tag {IMAGE} . && docker push {IMAGE}"""
DATA = """./storage.sh buckets >/dev/null
mkdir -p criteo-1tb && echo rows >criteo-1tb/part && embark data copy criteo-1tb s3://embark-mutant/data/criteo-1tb"""
START = f"{PUSH}\n{DATA}\n./eks_cluster.sh up >/dev/null 2>&1"
MUTATIONS = {
    # file, what is replaced, by what, the commands that meet it, a part of the message
    "bucket in another region": ("storage.sh", "LocationConstraint=$REGION", "LocationConstraint=eu-west-1",
                                 "./storage.sh buckets", "IllegalLocationConstraintException"),
    "service misspelt": ("eks_cluster.sh", "com.amazonaws.$REGION.s3\" \\", "com.amazonaws.$REGION.s4\" \\",
                         "./eks_cluster.sh up", "Vpc Endpoint Service"),
    "volume before the cluster": ("storage.sh", "nothing", "nothing", f"{DATA}\n./storage.sh volume",
                                  "No cluster found for name: embark"),
    "no data": ("storage.sh", "nothing", "nothing", "./storage.sh buckets\n./storage.sh volume", "There is no data in"),
    "throughput left out": ("storage.sh", ",PerUnitStorageThroughput=1000", "", f"{START}\n./storage.sh volume",
                            "PerUnitStorageThroughput is required"),
    "capacity that is not sold": ("storage.sh", "CAPACITY_GIB=${CAPACITY_GIB:-1200}", "CAPACITY_GIB=2000",
                                  f"{START}\n./storage.sh volume", "Invalid storage capacity"),
    "no wait for the file system": ("storage.sh", "  wait_for AVAILABLE file_system Lifecycle\n", "",
                                    f"{START}\n./storage.sh volume", "must be AVAILABLE"),
    "no wait for the link": ("storage.sh", "  wait_for AVAILABLE link \"$id\" Lifecycle\n", "",
                             f"{START}\n./storage.sh volume", "no data repository association that is AVAILABLE"),
    "zone that does not exist": ("eks_cluster.yaml", "us-west-2b", "us-west-2e", "./eks_cluster.sh up", "us-west-2e"),
    "machine misspelt": ("eks_cluster.yaml", "p4d.24xlarge\n", "p4d.24xlrge\n", "./eks_cluster.sh up", "p4d.24xlrge"),
    "field misspelt": ("eks_cluster.yaml", "privateNetworking", "privateNetwork", "./eks_cluster.sh up",
                       'unknown field "privateNetwork"'),
    "no namespace": ("eks_cluster.sh", "  run kubectl apply -f eks_objects.yaml\n", "",
                     f"{START}\n./storage.sh volume", 'namespaces "embark" not found'),
    "EFA plugin under eksctl's name": ("eks_cluster.sh", "helm upgrade embark-efa",
                                       "helm upgrade aws-efa-k8s-device-plugin", "./eks_cluster.sh up",
                                       "invalid ownership metadata"),
    "too many machines": ("eks_cluster.sh", "    --nodes-max 2 \\\n", "    --nodes-max 1 \\\n",
                          f"{START}\n./eks_cluster.sh machines", "maximum number of nodes"),
    "pool misspelt": ("eks_cluster.sh", "    --name p4d-24xlarge \\\n", "    --name p4d-24xlarg \\\n",
                      f"{START}\n./eks_cluster.sh machines", "No node group found for name: p4d-24xlarg"),
    "cluster deleted before the file system": (
        "storage.sh", "nothing", "nothing", f"{START}\n./storage.sh volume\n./eks_cluster.sh delete",
        "has dependencies and cannot be deleted"),
    "endpoint left in the network": (
        "eks_cluster.sh", "    run aws ec2 delete-vpc-endpoints", "    : aws ec2 delete-vpc-endpoints",
        f"{START}\n./eks_cluster.sh delete", "VPC endpoint"),
    "login in another region": (
        "storage.sh", "nothing", "nothing", PUSH.replace("password --region us-west-2", "password --region us-east-1"),
        "400 Bad Request"),
}


@pytest.fixture(scope="module")
def rendered(tmp_path_factory) -> Path:
    folder = copy_of_clone(tmp_path_factory.mktemp("clone")) / "examples" / "cloud_deployment" / "aws"
    with AccountSession("aws", tmp_path_factory.mktemp("account")) as session:
        done = session.bash(NAMES, folder)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_script_with_one_mistake_is_refused_with_its_cause(name, rendered, tmp_path):
    file, old, new, commands, message = MUTATIONS[name]
    folder, account = tmp_path / "aws", tmp_path / "account"
    shutil.copytree(rendered, folder)
    account.mkdir()
    if old != new:
        text = (folder / file).read_text()
        assert old in text, "the mutation does not apply any more"
        (folder / file).write_text(text.replace(old, new))
    with AccountSession("aws", account) as session:
        done = session.bash(commands, folder)
    assert done.returncode != 0, done.stdout[-3000:]
    assert message in done.stdout
