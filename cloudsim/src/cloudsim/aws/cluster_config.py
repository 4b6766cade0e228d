"""Reads eksctl's ClusterConfig and refuses what eksctl refuses."""

import re
from typing import Any

import yaml

from cloudsim.account import Call
from cloudsim.aws.account import AwsAccount, facts
from cloudsim.aws.ec2 import machine_type
from cloudsim.aws.iam import POLICY_VERSIONS, policy_error
from cloudsim.kubernetes.validation import label_error
from cloudsim.state import Refusal, schema_error, versions_sold
from embark.kubernetes.objects import at
from embark.values import JsonDict, frozen

MIN_ZONES = 2
STACK_NAME = re.compile("[a-zA-Z][-a-zA-Z0-9]*")


@frozen
class ClusterConfig:
    """A ClusterConfig file, checked."""

    name: str
    region: str
    version: str
    raw: JsonDict

    @property
    def zones(self) -> list[str]:
        return [str(one) for one in self.raw.get("availabilityZones") or ()]

    @property
    def groups(self) -> list[JsonDict]:
        return list(self.raw.get("managedNodeGroups") or ())

    @property
    def addons(self) -> set[str]:
        return {str(one["name"]) for one in self.raw.get("addons") or ()}

    @property
    def has_metrics_server(self) -> bool:
        """Whether metrics-server is installed: eksctl does it by default since 0.201."""
        is_default = not at(self.raw, "addonsConfig.disableDefaultAddons")
        return is_default or "metrics-server" in self.addons

    @property
    def identities(self) -> list[JsonDict]:
        return list(at(self.raw, "iam.podIdentityAssociations") or ())

    @property
    def gives_roles(self) -> bool:
        """Whether add-ons get the roles that they need."""
        own = [one for one in self.raw.get("addons") or () if one["name"] == "aws-ebs-csi-driver"]
        roles = ("podIdentityAssociations", "wellKnownPolicies", "attachPolicyARNs", "attachPolicy",
                 "serviceAccountRoleARN", "useDefaultPodIdentityAssociations")
        return bool(at(self.raw, "addonsConfig.autoApplyPodIdentityAssociations")) or any(
            one.get(role) for one in own for role in roles)

    @property
    def has_nat(self) -> bool:
        return bool(at(self.raw, "vpc.nat.gateway") != "Disable")


def read_config(account: AwsAccount, call: Call, path: str) -> ClusterConfig:
    """Read a file, or refuse it with eksctl's own message."""
    def refuse(why: str) -> Refusal:
        return Refusal(f'Error: loading config file "{path}": {why}')

    try:
        raw = yaml.safe_load(call.read(path))
    except yaml.YAMLError as error:
        raise refuse(f"error converting YAML to JSON: {error}") from error
    if not isinstance(raw, dict) or (raw.get("apiVersion"), raw.get("kind")) != ("eksctl.io/v1alpha5", "ClusterConfig"):
        raise refuse("no kind \"ClusterConfig\" is registered for version \"eksctl.io/v1alpha5\"")
    if why := schema_error("aws/eksctl_cluster_config.json", raw):
        raise refuse(f"error unmarshaling JSON: while decoding JSON: json: {why}")
    about = raw.get("metadata") or {}
    found = ClusterConfig(name=str(about.get("name", "")), region=str(about.get("region", "")),
                          version=str(about.get("version", "1.34")), raw=raw)
    _check(account, found, refuse)
    return found


def _check(account: AwsAccount, config: ClusterConfig, refuse: Any) -> None:
    if not config.name:
        raise refuse("metadata.name must be set")
    if config.region not in account.backends("ec2"):
        raise refuse(f"--region={config.region} is not supported")
    ec2 = account.backends("ec2")[config.region]
    sold = versions_sold(facts()["eks"]["versions"])
    if config.version not in sold:
        raise refuse(f'invalid version, {config.version} is not supported; supported values: {", ".join(sold)}')
    if not STACK_NAME.fullmatch(config.name):
        raise Refusal(f"Error: validation for {config.name} failed, name must satisfy regular expression pattern: "
                      f"{STACK_NAME.pattern}")
    known = {zone.name for zone in ec2.describe_availability_zones()}
    if config.zones and len(config.zones) < MIN_ZONES:
        raise refuse(f"only {len(config.zones)} zone(s) specified {config.zones}, {MIN_ZONES} are required (can be "
                     "non-unique)")
    for zone in config.zones:
        if zone not in known:
            raise Refusal(f"Error: InvalidParameterValue: Invalid availability-zone(s): [{zone}] in {config.region}")
    for addon in sorted(config.addons - set(facts()["eks"]["addons"])):
        raise Refusal(f"Error: addon {addon} is not available: ResourceNotFoundException: No addon versions found")
    names = [str(group["name"]) for group in config.groups]
    if len(set(names)) < len(names):
        raise refuse("managedNodeGroups: names must be unique")
    for index, group in enumerate(config.groups):
        _check_group(config, group, f"managedNodeGroups[{index}]", refuse)
    if config.identities and "eks-pod-identity-agent" not in config.addons:
        raise refuse('the "eks-pod-identity-agent" addon must be installed to create pod identity associations; please '
                     'add "eks-pod-identity-agent" to addons')
    for index, one in enumerate(config.identities):
        path = f"iam.podIdentityAssociations[{index}]"
        for field in ("namespace", "serviceAccountName"):
            if not one.get(field):
                raise refuse(f"{path}.{field} must be set")
        sources = ("roleARN", "permissionPolicy", "permissionPolicyARNs", "wellKnownPolicies")
        if not any(one.get(field) for field in sources):
            raise refuse(f"at least one of the following must be specified: {path}.roleARN, {path}.permissionPolicy, "
                         f"{path}.permissionPolicyARNs, {path}.wellKnownPolicies")
        if why := policy_error(one.get("permissionPolicy") or {"Version": POLICY_VERSIONS[0]}):
            raise Refusal(f"Error: creating pod identity association {one['serviceAccountName']}: AWS::IAM::Policy: "
                          f"CREATE_FAILED – MalformedPolicyDocument: {why}")


def _check_group(config: ClusterConfig, group: JsonDict, path: str, refuse: Any) -> None:
    desired, least, most = (group.get(name) for name in ("desiredCapacity", "minSize", "maxSize"))
    if desired is not None and least is not None and desired < least:
        raise refuse(f"{path}: cannot set desiredCapacity ({desired}) to less than minSize ({least})")
    if desired is not None and most is not None and desired > most:
        raise refuse(f"{path}: cannot set desiredCapacity ({desired}) to more than maxSize ({most})")
    if most == 0:
        raise Refusal("Error: InvalidParameterException: Minimum value for maxSize is 1")
    types = [*(group.get("instanceTypes") or ()), *([group["instanceType"]] if "instanceType" in group else [])]
    for name in types:
        if machine_type(name) is None:
            raise Refusal(f"Error: InvalidInstanceType: The following supplied instance types do not exist: [{name}]")
    zones = group.get("availabilityZones") or []
    if group.get("efaEnabled"):
        if len(zones) != 1 and len(group.get("subnets") or []) != 1:
            raise refuse(f"{path}.efaEnabled nodegroups must have only one subnet or one availability zone")
        for name in types:
            if not (machine_type(name) or {})["NetworkInfo"].get("EfaSupported"):
                raise refuse(f"instance type {name} does not support EFA")
    for zone in zones:
        if config.zones and zone not in config.zones:
            raise refuse(f"no subnets in {zone}: the cluster's zones are {config.zones}")
    for index, taint in enumerate(group.get("taints") or ()):
        if taint.get("effect") not in ("NoSchedule", "PreferNoSchedule", "NoExecute"):
            raise refuse(f"{path}.taints[{index}]: invalid taint effect: {taint.get('effect')}")
    for key, value in (group.get("labels") or {}).items():
        if why := label_error(str(key), str(value)):
            raise refuse(f"{path}.labels: {why}")
