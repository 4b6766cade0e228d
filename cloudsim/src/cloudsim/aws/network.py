"""The network that eksctl creates for a cluster, and what prevents its deletion."""

from dataclasses import dataclass, field
from typing import Any

from cloudsim.aws import fsx
from cloudsim.aws.account import AwsAccount

CIDR = "192.168.0.0/16"


@dataclass(slots=True)
class Network:
    """Ids of the network resources that the stack of a cluster created."""

    region: str
    vpc: str
    subnets: dict[tuple[str, str], str] = field(default_factory=dict)  # Maps (`private` or `public`, zone) to an id.
    group: str = ""  # The cluster's security group, whose members may talk to each other.
    gateway: str = ""  # The internet gateway.
    nat: str = ""
    address: str = ""
    tables: list[str] = field(default_factory=list)
    associations: list[str] = field(default_factory=list)  # Ids that link route tables to subnets.


def make_network(account: AwsAccount, region: str, cluster: str, zones: list[str], *, has_nat: bool) -> Network:
    """Create what eksctl creates: a public and a private subnet in every zone, and one NAT gateway."""
    ec2 = account.client("ec2", region)
    made = Network(region, ec2.create_vpc(CidrBlock=CIDR)["Vpc"]["VpcId"])
    ec2.create_tags(Resources=[made.vpc], Tags=[
        {"Key": "Name", "Value": f"eksctl-{cluster}-cluster/VPC"},
        {"Key": "alpha.eksctl.io/cluster-name", "Value": cluster}])
    made.gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=made.gateway, VpcId=made.vpc)
    number = 0
    for role, tag in (("public", "kubernetes.io/role/elb"), ("private", "kubernetes.io/role/internal-elb")):
        for zone in dict.fromkeys(zones):
            subnet = ec2.create_subnet(VpcId=made.vpc, CidrBlock=f"192.168.{number * 32}.0/19", AvailabilityZone=zone)
            id = subnet["Subnet"]["SubnetId"]
            ec2.create_tags(Resources=[id], Tags=[{"Key": tag, "Value": "1"}])
            made.subnets[role, zone] = id
            number += 1
    if has_nat:
        address = ec2.allocate_address(Domain="vpc")
        made.address = address["AllocationId"]
        public = next(id for (role, _), id in made.subnets.items() if role == "public")
        made.nat = ec2.create_nat_gateway(SubnetId=public, AllocationId=made.address)["NatGateway"]["NatGatewayId"]
    for (role, _), id in made.subnets.items():
        table = ec2.create_route_table(VpcId=made.vpc)["RouteTable"]["RouteTableId"]
        made.tables.append(table)
        made.associations.append(ec2.associate_route_table(RouteTableId=table, SubnetId=id)["AssociationId"])
        if role == "public":
            ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", GatewayId=made.gateway)
        elif made.nat:
            ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", NatGatewayId=made.nat)
    made.group = ec2.create_security_group(GroupName=f"eks-cluster-sg-{cluster}", VpcId=made.vpc,
                                           Description="EKS created security group")["GroupId"]
    ec2.authorize_security_group_ingress(GroupId=made.group, IpPermissions=[
        {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": made.group}]}])
    return made


def remove_machines_access(account: AwsAccount, network: Network) -> None:
    """Delete what CloudFormation deletes first: the NAT gateway and its address, which cost money."""
    ec2 = account.client("ec2", network.region)
    if network.nat:
        ec2.delete_nat_gateway(NatGatewayId=network.nat)
    if network.address:
        ec2.release_address(AllocationId=network.address)
    network.nat = network.address = ""


def obstacles(account: AwsAccount, network: Network) -> list[str]:
    """Return why CloudFormation cannot delete the network, in its words."""
    own, found = set(network.subnets.values()), []
    backend = account.backends("ec2")[network.region]
    names = {id: f"Subnet{role.title()}{zone.replace('-', '').upper()}"
             for (role, zone), id in network.subnets.items()}
    busy: dict[str, str] = {}
    for one in fsx.file_systems(account, network.region):
        busy |= {id: f"{one.kind} {one.name}" for kind, id in one.uses if kind == "subnet"}
    for machine in backend.all_instances():
        if machine.state != "terminated" and machine.subnet_id in own:
            busy[machine.subnet_id] = f"EC2 instance {machine.id}"
    found += [f"AWS::EC2::Subnet/{names[id]}: DELETE_FAILED – \"The subnet '{id}' has dependencies and cannot be "
              f"deleted.\" (network interface of {who})" for id, who in busy.items() if id in own]
    for endpoint in backend.vpc_end_points.values():
        if endpoint.vpc_id == network.vpc and endpoint.state != "deleted":
            found.append(f"AWS::EC2::VPC/VPC: DELETE_FAILED – \"The vpc '{network.vpc}' has dependencies and cannot be "
                         f"deleted.\" (VPC endpoint {endpoint.id} of {endpoint.service_name})")
    for group in backend.groups.get(network.vpc, {}).values():
        if group.id != network.group and group.name != "default":
            found.append(f"AWS::EC2::VPC/VPC: DELETE_FAILED – \"The vpc '{network.vpc}' has dependencies and cannot be "
                         f"deleted.\" (security group {group.id} {group.name})")
    return found


def remove_network(account: AwsAccount, network: Network) -> None:
    ec2: Any = account.client("ec2", network.region)
    for id in network.associations:
        ec2.disassociate_route_table(AssociationId=id)
    for table in network.tables:
        ec2.delete_route_table(RouteTableId=table)
    for subnet in network.subnets.values():
        ec2.delete_subnet(SubnetId=subnet)
    ec2.detach_internet_gateway(InternetGatewayId=network.gateway, VpcId=network.vpc)
    ec2.delete_internet_gateway(InternetGatewayId=network.gateway)
    ec2.delete_security_group(GroupId=network.group)
    ec2.delete_vpc(VpcId=network.vpc)
