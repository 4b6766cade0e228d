"""Plain EC2 machines: their first start, with the rights of their role."""

import base64
import gzip
import re
from itertools import pairwise
from typing import Any

from cloudsim.account import Call
from cloudsim.aws.account import AwsAccount
from cloudsim.aws.cli import AwsCli
from cloudsim.aws.ecr import HOST, EcrRegistry, pull_denial
from cloudsim.aws.iam import denial, role_arn, role_documents
from cloudsim.machine import CLOUD_CONFIG, FirstStart, FunctionProgram, MachineDocker, first_start
from cloudsim.state import Refusal

TIMEOUT = "dial tcp: i/o timeout"


class Machine:
    """An instance with its role and its route to the internet."""

    def __init__(self, account: AwsAccount, region: str, instance: Any) -> None:
        self.account, self.region, self.instance = account, region, instance
        self.role = _role_of(account, instance)
        self.documents = role_documents(account, self.role) if self.role else []
        self.who = role_arn(self.role, instance.id)

    @property
    def is_reachable(self) -> bool:
        """Whether Session Manager's agent is connected, which needs rights of its own and a route to the internet."""
        return self.has_way_out and not denial(self.documents, self.who, "ssm:UpdateInstanceInformation", "*")

    @property
    def has_way_out(self) -> bool:
        """Whether the machine reaches the internet: through a NAT gateway or by a public address, which a machine with
        several network cards does not get."""
        ec2, subnet = self.account.client("ec2", self.region), self.instance.subnet_id
        network = [{"Name": "vpc-id", "Values": [self.instance.vpc_id]}]
        tables = ec2.describe_route_tables(Filters=network)["RouteTables"]
        own = [one for one in tables if any(row.get("SubnetId") == subnet for row in one["Associations"])]
        main = [one for one in tables if any(row.get("Main") for row in one["Associations"])]
        if any(route.get("NatGatewayId") for table in (own or main) for route in table["Routes"]):
            return True
        is_public = ec2.describe_subnets(SubnetIds=[subnet])["Subnets"][0]["MapPublicIpOnLaunch"]
        return len(self.instance.nics) <= 1 and bool(is_public)

    def login_error(self, host: str, user: str, password: str) -> str:
        return EcrRegistry(self.account).login_error(host, user, password) if self.has_way_out else TIMEOUT

    def pull_error(self, image: str, logins: set[str]) -> str:
        if not self.has_way_out:
            return TIMEOUT
        if why := EcrRegistry(self.account).image_error(image):
            return why
        if found := HOST.match(image):
            host, path = image.partition("/")[0], image.partition("/")[2]
            if host not in logins:
                return f'Head "https://{host}/v2/{path}": no basic auth credentials'
            name = re.split("[:@]", path)[0]
            arn = f"arn:aws:ecr:{found[2]}:{found[1]}:repository/{name}"
            if why := pull_denial(self.documents, self.who, arn):
                return f"denied: {why}"
        return ""

    def start(self) -> FirstStart:
        text = _user_data(self.instance.user_data)
        if not text.startswith(CLOUD_CONFIG):
            return FirstStart(log="no cloud-config\n")
        aws = AwsCli(self.account, denial=lambda action: denial(self.documents, self.who, action, "*"))
        start = first_start(text, MachineDocker(self), [aws, FunctionProgram("curl", self._metadata)])
        if start.is_training and (why := self._meeting_error()):
            return FirstStart(log=f"{start.log}{why}\n")
        return start

    def _meeting_error(self) -> str:
        """Return why ranks on several machines do not reach each other: their security group must allow itself."""
        found = self.account.client("ec2", self.region).describe_instances(InstanceIds=[self.instance.id])
        instance = found["Reservations"][0]["Instances"][0]
        tags = {one["Key"]: one["Value"] for one in instance.get("Tags", ())}
        if "embark-master" not in tags:
            return ""
        ids = {group["GroupId"] for card in instance["NetworkInterfaces"] for group in card.get("Groups", ())}
        groups = self.account.client("ec2", self.region).describe_security_groups(
            GroupIds=sorted(ids))["SecurityGroups"] if ids else []
        if any(_names_itself(one, "IpPermissions") for one in groups):
            return ""
        return (f"torch.distributed.DistNetworkError: The client socket has timed out while trying to connect to "
                f"{tags['embark-master']}:29500; no rule of {sorted(ids)} lets the machines in")

    def _metadata(self, call: Call) -> str:
        """Answer a request of curl to the metadata service."""
        url = next((word for word in call.words if word.startswith("http://169.254.169.254/latest/")), "")
        path = url.removeprefix("http://169.254.169.254/latest/")
        if path == "api/token":
            return "token"
        options = self.account.client("ec2", self.region).describe_instances(InstanceIds=[self.instance.id])[
            "Reservations"][0]["Instances"][0].get("MetadataOptions", {})
        is_served = options.get("InstanceMetadataTags") == "enabled"
        tags = {one["key"]: one["value"] for one in self.instance.get_tags()} if is_served else {}
        name = path.removeprefix("meta-data/tags/instance/")
        if name == path or name not in tags:
            raise Refusal("curl: (22) The requested URL returned error: 404", 22)
        return str(tags[name])


def machines(account: AwsAccount) -> list[Machine]:
    """List the machines that are running."""
    return [Machine(account, region, one) for region, ec2 in account.backends("ec2").items()
            for one in ec2.all_instances() if one.state == "running"]


def start_session(account: AwsAccount, call: Call) -> str:
    """Answer `aws ssm start-session` with the log of a machine. A real session only shows it; here a machine that does
    not train is an error, so that a rehearsal ends where a reader would notice."""
    target = next((after for word, after in pairwise(call.words) if word == "--target"), "")
    found = {one.instance.id: one for one in machines(account)}.get(target)
    if found is None or not found.is_reachable:
        raise Refusal("An error occurred (TargetNotConnected) when calling the StartSession operation: "
                      f"{target} is not connected.", 254)
    start = found.start()
    if not start.is_training:
        raise Refusal(start.log.rstrip("\n"))
    return f"{start.log}training in {start.image}\n"


def _names_itself(group: dict[str, Any], rules: str) -> bool:
    return any(pair.get("GroupId") == group["GroupId"] for rule in group[rules]
               for pair in rule.get("UserIdGroupPairs", ()))


def _role_of(account: AwsAccount, instance: Any) -> str:
    profile = getattr(instance, "iam_instance_profile", None) or {}
    arn = profile.get("Arn", "") if isinstance(profile, dict) else str(getattr(profile, "arn", ""))
    name = arn.rpartition("/")[2]
    for one in account.backends("iam")["aws"].instance_profiles.values():
        # A role that does not trust EC2 gives the machine no credentials.
        if one.name == name and one.roles and "ec2.amazonaws.com" in str(one.roles[0].assume_role_policy_document):
            return str(one.roles[0].name)
    return ""


def _user_data(given: Any) -> str:
    """Decode the user data that moto stores in base64, and decompress it if it was compressed."""
    raw = base64.b64decode(given.as_bytes()) if given else b""
    return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
