"""The account itself: moto in this process, clients to it, quotas, and what still costs money."""

import logging
import tomllib
import urllib.request
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import boto3
from moto import backends, settings
from moto.server import ThreadedMotoServer

from cloudsim.account import Account
from embark.catalog import load_catalog

NUMBER = "123456789012"  # moto's account.
HOME_REGION = "us-east-1"  # Of the login: where commands go that name no region.
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": "rehearsal"}
NOT_MODELLED = [
    "AWS: what the caller itself may do (IAM of the user who runs the scripts); every call of theirs is allowed",
    "AWS: whether a zone has capacity at the moment (InsufficientInstanceCapacity), and spot interruptions",
    "AWS: eksctl's CloudFormation stacks, beyond what blocks their deletion",
    "AWS: NCCL over EFA, Lustre's throughput, CloudWatch's metrics and log groups, mails of budgets and alarms",
    "AWS: that EFA needs a rule to its own security group for outbound traffic too",
    "AWS: that a new role or policy takes some seconds to be effective everywhere; here it is at once",
    "AWS: bucket names that another account has taken; they are unique in the world",
]


@cache
def facts() -> dict[str, Any]:
    """`facts.toml` beside this module."""
    text = (files("cloudsim.aws") / "facts.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


class AwsAccount(Account):
    """Of AWS. What moto models is in moto; the rest in `resources`."""

    def __init__(self, folder: Path) -> None:
        super().__init__("aws", folder)
        self.endpoint = _moto_endpoint()
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/moto-api/reset", method="POST")).close()
        # Programs that do not go through `aws`, such as `embark data copy`, reach it over HTTP.
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": self.endpoint, "AWS_EC2_METADATA_DISABLED": "true",
                    "AWS_DEFAULT_REGION": HOME_REGION,
                    "AWS_ALLOW_HTTP": "true", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
                    "KUBECONFIG": str(folder / "kubeconfig")}
        self.quotas: dict[str, float] = dict.fromkeys(_quota_codes(), 1e6)  # vCPUs in each region; may be set.
        self.not_modelled += NOT_MODELLED

    def client(self, service: str, region: str) -> Any:
        return _client(self.endpoint, service, region)

    def backends(self, service: str) -> Any:
        """moto's state of a service, by region; those that were never asked for are not among its items."""
        return backends.get_backend(service)[NUMBER]

    def paid(self) -> list[str]:
        found = super().paid()
        for region, ec2 in self.backends("ec2").items():
            found += [f"EC2 instance {one.id} in {region}" for one in ec2.all_instances() if one.state == "running"]
            found += [f"NAT gateway {one.id} in {region}" for one in ec2.nat_gateways.values()
                      if one.state == "available"]
            found += [f"Elastic IP address {one.public_ip} in {region}" for one in ec2.addresses]
        for region, eks in self.backends("eks").items():
            found += [f"EKS cluster {name} in {region}" for name in eks.clusters]
        for cluster in self.clusters.values():
            found += [f"EC2 instance {node.name} of cluster {cluster.name}" for node in cluster.nodes]
        found += [f"S3 bucket {name}" for name in self.backends("s3")["aws"].buckets]
        for region, ecr in self.backends("ecr").items():
            found += [f"ECR repository {name} in {region}" for name in ecr.repositories]
        for region, watch in self.backends("cloudwatch").items():
            found += [f"CloudWatch alarm {name} in {region}" for name in watch.alarms]
        return found


@cache
def _client(endpoint: str, service: str, region: str) -> Any:
    """Kept, since each reads the service's model."""
    return boto3.client(service, region_name=region, endpoint_url=endpoint,
                        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
                        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"])


def _quota_codes() -> set[str]:
    quotas = [one.quota for one in load_catalog().machines.values() if one.cloud == "aws" and one.quota]
    codes = {code for one in quotas for code in (one.on_demand_code, one.spot_code) if code}
    return codes | {facts()["quotas"]["on_demand"], facts()["quotas"]["spot"]}


@cache
def _moto_endpoint() -> str:
    """moto's server in a thread of this process; one for all accounts, which are opened one after the other."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    settings.ec2_load_default_amis = lambda: False  # Thousands for each region, and seconds; `facts.toml` has ours.
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    return f"http://{host}:{port}"
