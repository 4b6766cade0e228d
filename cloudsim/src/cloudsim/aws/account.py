"""The state of an AWS account: moto in this process, clients of it, quotas, and what still costs money."""

import logging
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import boto3
from moto import backends, settings
from moto.server import ThreadedMotoServer

from cloudsim.account import Account
from cloudsim.state import load_facts
from embark.catalog import load_catalog

NUMBER = "123456789012"  # The account number that moto uses.
HOME_REGION = "us-east-1"  # The region of commands that name none.
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": "rehearsal"}


def facts() -> dict[str, Any]:
    return load_facts("aws/facts.toml")


class AwsAccount(Account):
    """An account whose state is in moto as far as moto models it, and in `resources` otherwise."""

    def __init__(self, folder: Path) -> None:
        super().__init__("aws", folder)
        self.endpoint = _moto_endpoint()
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/moto-api/reset", method="POST")).close()
        # Programs other than `aws`, such as `embark data copy`, reach moto over HTTP.
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": self.endpoint, "AWS_EC2_METADATA_DISABLED": "true",
                    "AWS_DEFAULT_REGION": HOME_REGION,
                    "AWS_ALLOW_HTTP": "true", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
                    "KUBECONFIG": str(folder / "kubeconfig")}
        self.quotas: dict[str, float] = dict.fromkeys(_quota_codes(), 1e6)  # vCPUs in each region; tests change them.

    def client(self, service: str, region: str) -> Any:
        return _client(self.endpoint, service, region)

    def backends(self, service: str) -> Any:
        """Return moto's state of a service by region; only regions that were used are among its items."""
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
    """Return a client, which is cached because each one reads the model of its service."""
    return boto3.client(service, region_name=region, endpoint_url=endpoint,
                        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
                        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"])


def _quota_codes() -> set[str]:
    quotas = [one.quota for one in load_catalog().machines.values() if one.cloud == "aws" and one.quota]
    codes = {code for one in quotas for code in (one.on_demand_code, one.spot_code) if code}
    return codes | {facts()["quotas"]["on_demand"], facts()["quotas"]["spot"]}


@cache
def _moto_endpoint() -> str:
    """Start moto's server in a thread. All accounts share it, because they are opened one after the other."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    # To load thousands of images for each region takes seconds; `facts.toml` has the few that are used.
    settings.ec2_load_default_amis = lambda: False
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    return f"http://{host}:{port}"
