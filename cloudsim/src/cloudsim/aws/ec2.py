"""What EC2 refuses and moto does not: machine types, zones, quotas, network cards and endpoints."""

import re
from typing import Any
from uuid import uuid4

from cloudsim.aws.account import NUMBER, AwsAccount, facts
from cloudsim.aws.api import ApiError, Parameters, operation
from embark.catalog import load_catalog
from embark.values import JsonDict

PLACEMENT_GROUP = "placement group"


def machine_type(name: str) -> JsonDict | None:
    """Return EC2's own description of a machine type."""
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    found: JsonDict | None = INSTANCE_TYPES.get(name)
    return found


def zones_with(account: AwsAccount, region: str, name: str) -> set[str]:
    """Return the zones that offer a machine type."""
    rows = account.backends("ec2")[region].describe_instance_type_offerings(
        "availability-zone", {"instance-type": [name]})
    return {str(row["Location"]) for row in rows}


def launch_error(account: AwsAccount, zone: str, name: str, count: int, *, is_spot: bool) -> tuple[str, str]:
    """Return EC2's code and message if it does not start this many machines, else two empty texts."""
    region, found = zone[:-1], machine_type(name)
    if found is None:
        return "InvalidInstanceType", f"The following supplied instance types do not exist: [{name}]"
    if zone not in (sold := zones_with(account, region, name)):
        return "Unsupported", (f"Your requested instance type ({name}) is not supported in your requested Availability "
                               f"Zone ({zone}). Please retry your request by not specifying an Availability Zone or "
                               f"choosing {', '.join(sorted(sold)) or 'another region'}.")
    code = quota_code(name, is_spot=is_spot)
    limit = account.quotas.get(code, 0.0)
    used = vcpus_in_use(account, region, code)
    if used + count * int(found["VCpuInfo"]["DefaultVCpus"]) > limit:
        if is_spot:
            return "MaxSpotInstanceCountExceeded", "Max spot instance count exceeded"
        return "VcpuLimitExceeded", (
            f"You have requested more vCPU capacity than your current vCPU limit of {limit:.0f} allows for the "
            "instance bucket that the specified instance type belongs to.")
    return "", ""


def quota_code(name: str, *, is_spot: bool) -> str:
    found = load_catalog().machines.get(name)
    own = None if found is None or found.quota is None else (
        found.quota.spot_code if is_spot else found.quota.on_demand_code)
    return own or str(facts()["quotas"]["spot" if is_spot else "on_demand"])


def vcpus_in_use(account: AwsAccount, region: str, code: str) -> int:
    """Count the vCPUs of plain machines and of nodes that one quota limits."""
    running = [(one.instance_type, one.lifecycle == "spot") for one
               in account.backends("ec2")[region].all_instances() if one.state in ("pending", "running")]
    for key, cluster in account.clusters.items():
        if key.startswith(f"{region}/"):
            for pool in cluster.pools.values():
                is_spot = pool.labels.get("eks.amazonaws.com/capacityType") == "SPOT"
                running += [(pool.machine_type, is_spot)] * len(cluster.nodes_of(pool.name))
    return sum(int((machine_type(name) or {"VCpuInfo": {"DefaultVCpus": 0}})["VCpuInfo"]["DefaultVCpus"])
               for name, is_spot in running if quota_code(name, is_spot=is_spot) == code)


@operation("ec2.RunInstances")
def run_instances(account: AwsAccount, region: str, given: Parameters) -> None:
    ec2 = account.backends("ec2")[region]
    _check_image(ec2, given["ImageId"])
    name, cards = given["InstanceType"], given.get("NetworkInterfaces") or []
    subnet_id = (cards[0] if cards else given).get("SubnetId")
    subnets = {one.id: one for by_zone in ec2.subnets.values() for one in by_zone.values()}
    for one in {subnet_id, *(card.get("SubnetId") for card in cards)} - {None}:
        if one not in subnets:
            raise ApiError("InvalidSubnetID.NotFound", f"The subnet ID '{one}' does not exist")
    known = {one.id for by_vpc in ec2.groups.values() for one in by_vpc.values()}
    groups = [*(given.get("SecurityGroupIds") or ()), *(one for card in cards for one in card.get("Groups") or ())]
    for one in groups:
        if one not in known:
            raise ApiError("InvalidGroup.NotFound", f"The security group '{one}' does not exist")
    wanted = (given.get("Placement") or {}).get("AvailabilityZone")
    zone = subnets[subnet_id].availability_zone if subnet_id else wanted or f"{region}a"
    if wanted and wanted != zone:
        raise ApiError("InvalidParameterValue", f"The availability zone '{wanted}' is not that of {subnet_id}: {zone}")
    group = (given.get("Placement") or {}).get("GroupName")
    if group and account.resources.find(PLACEMENT_GROUP, f"{region}/{group}") is None:
        raise ApiError("InvalidPlacementGroup.Unknown", f"The Placement Group '{group}' is unknown.")
    is_spot = (given.get("InstanceMarketOptions") or {}).get("MarketType") == "spot"
    code, message = launch_error(account, zone, name, int(given.get("MaxCount", 1)), is_spot=is_spot)
    if code:
        raise ApiError(code, message)
    _check_cards(name, cards)
    _check_profile(account, given.get("IamInstanceProfile") or {})
    data = given.get("UserData") or b""
    size = len(data.encode() if isinstance(data, str) else data)
    if size > facts()["images"]["user_data_bytes"]:
        raise ApiError("InvalidParameterValue", "User data is limited to 16384 bytes")


@operation("ec2.CreatePlacementGroup")
def create_placement_group(account: AwsAccount, region: str, given: Parameters) -> JsonDict:
    name = given["GroupName"]
    if account.resources.find(PLACEMENT_GROUP, f"{region}/{name}"):
        raise ApiError("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
    made = account.resources.add(PLACEMENT_GROUP, f"{region}/{name}", location=region, body={
        "GroupName": name, "State": "available", "Strategy": given.get("Strategy", "cluster"),
        "GroupId": f"pg-0{uuid4().hex[:16]}"})
    return {"PlacementGroup": made.attributes["body"]}


@operation("ec2.DescribePlacementGroups")
def describe_placement_groups(account: AwsAccount, region: str, given: Parameters) -> JsonDict:
    found = {one.attributes["body"]["GroupName"]: one for one in account.resources.of_kind(PLACEMENT_GROUP)
             if one.location == region}
    for name in given.get("GroupNames") or ():
        if name not in found:
            raise ApiError("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
    names = given.get("GroupNames") or list(found)
    return {"PlacementGroups": [found[name].attributes["body"] for name in names]}


@operation("ec2.DeletePlacementGroup")
def delete_placement_group(account: AwsAccount, region: str, given: Parameters) -> JsonDict:
    describe_placement_groups(account, region, {"GroupNames": [given["GroupName"]]})
    account.resources.remove(PLACEMENT_GROUP, f"{region}/{given['GroupName']}")
    return {}


@operation("ec2.CreateVpcEndpoint")
def create_vpc_endpoint(account: AwsAccount, region: str, given: Parameters) -> None:
    ec2 = account.backends("ec2")[region]
    if given["VpcId"] not in ec2.vpcs:
        raise ApiError("InvalidVpcId.NotFound", f"The Vpc Id {given['VpcId']} does not exist")
    services = {f"com.amazonaws.{region}.{name}" for name in facts()["endpoints"]["gateway"]}
    if given["ServiceName"] not in services and given.get("VpcEndpointType", "Gateway") == "Gateway":
        raise ApiError("InvalidServiceName", f"The Vpc Endpoint Service '{given['ServiceName']}' does not exist")
    for one in given.get("RouteTableIds") or ():
        if one not in ec2.route_tables:
            raise ApiError("InvalidRouteTableId.NotFound", f"The routeTable ID '{one}' does not exist")
    others = [one for one in ec2.vpc_end_points.values() if one.vpc_id == given["VpcId"]
              and one.service_name == given["ServiceName"] and one.state != "deleted"]
    if others:
        raise ApiError("RouteAlreadyExists", f"route table already has a route with destination-prefix-list-id of "
                                             f"{given['ServiceName']}")


@operation("service-quotas.GetServiceQuota")
def get_service_quota(account: AwsAccount, region: str, given: Parameters) -> JsonDict | None:
    if given["ServiceCode"] != "ec2":
        return None
    if given["QuotaCode"] not in account.quotas:
        raise ApiError("NoSuchResourceException", "The specified quota does not exist in this region.")
    return {"Quota": {"ServiceCode": "ec2", "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)",
                      "QuotaCode": given["QuotaCode"], "Value": account.quotas[given["QuotaCode"]], "Unit": "None",
                      "Adjustable": True, "GlobalQuota": False}}


@operation("service-quotas.RequestServiceQuotaIncrease")
def request_quota(account: AwsAccount, region: str, given: Parameters) -> JsonDict:
    if given["ServiceCode"] != "ec2" or given["QuotaCode"] not in account.quotas:
        raise ApiError("NoSuchResourceException", "The specified quota does not exist in this region.")
    return {"RequestedQuota": {
        "Id": uuid4().hex, "ServiceCode": "ec2", "QuotaCode": given["QuotaCode"], "Status": "PENDING",
        "DesiredValue": given["DesiredValue"], "Requester": f'{{"accountId":"{NUMBER}"}}'}}


def _check_image(ec2: Any, image: str) -> None:
    parameter = image.removeprefix("resolve:ssm:")
    if parameter != image:
        if parameter not in facts()["images"]["parameters"]:
            raise ApiError("InvalidParameterValue", "invalid value for parameter imageId: the SSM parameter "
                                                    f"{parameter} does not exist")
    elif not re.fullmatch(r"ami-[0-9a-f]{8,17}", image):
        raise ApiError("InvalidAMIID.Malformed", f'Invalid id: "{image}" (expecting "ami-...")')
    elif image not in ec2.amis:
        raise ApiError("InvalidAMIID.NotFound", f"The image id '[{image}]' does not exist")


def _check_cards(name: str, cards: list[JsonDict]) -> None:
    network = (machine_type(name) or {})["NetworkInfo"]
    num_fabric = sum(str(one.get("InterfaceType", "")).startswith("efa") for one in cards)
    if num_fabric > network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0):
        raise ApiError("InvalidParameterCombination", f"{name} has no more than "
                       f"{network.get('EfaInfo', {}).get('MaximumEfaInterfaces', 0)} EFA interfaces, not {num_fabric}.")
    for one in cards:
        if one.get("InterfaceType", "interface") not in ("interface", "efa", "efa-only"):
            raise ApiError("InvalidParameterValue", f"Invalid value '{one['InterfaceType']}' for InterfaceType. "
                                                    "Allowed values are interface, efa, efa-only.")
        if int(one.get("NetworkCardIndex", 0)) >= network["MaximumNetworkCards"]:
            raise ApiError("InvalidParameterValue", f"Network card index {one['NetworkCardIndex']} exceeds the "
                                                    f"{network['MaximumNetworkCards']} cards of {name}.")
    if len(cards) > 1 and any(one.get("AssociatePublicIpAddress") for one in cards):
        raise ApiError("InvalidParameterCombination", "The associatePublicIPAddress parameter cannot be specified when "
                                                      "launching with multiple network interfaces.")


def _check_profile(account: AwsAccount, profile: dict[str, str]) -> None:
    if not profile:
        return
    name = profile.get("Name") or profile["Arn"].rpartition("/")[2]
    known = account.backends("iam")["aws"].instance_profiles
    found = next((one for one in known.values() if one.name == name), None)
    if found is None:
        raise ApiError("InvalidParameterValue", f"Value ({name}) for parameter iamInstanceProfile.name is invalid. "
                                                "Invalid IAM Instance Profile name")
    if not found.roles:
        raise ApiError("InvalidParameterValue", f'IAM Instance Profile "{name}" has no associated IAM Roles')


