"""Plain EC2 machines: a script that starts, follows and ends them, and what each is given."""

from __future__ import annotations

import json

from embark.render.cluster_eks import bucket_statements
from embark.render.file import File
from embark.render.job import Job
from embark.render.shell_text import (
    PRELUDE,
    Shell,
    command,
    function,
    needed,
    output_of,
    run,
    script,
    setting,
    unless,
    variable,
    verbs,
)
from embark.render.site import Site, site_of
from embark.render.vm_node import LOG, USAGE, cloud_init, refuse_volume

AMI = "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
"""Amazon's base image with NVIDIA's driver, EFA and Docker, whatever is the newest."""
METADATA = "http://169.254.169.254/latest"
FIND_PLACE = f"""\
# This machine's number and the first one's address are tags, which the metadata service shows.
TOKEN=$(curl --silent --fail --request PUT --header 'X-aws-ec2-metadata-token-ttl-seconds: 300' {METADATA}/api/token)
tag() {{
  curl --silent --fail --retry 60 --retry-delay 5 --retry-all-errors \\
    --header "X-aws-ec2-metadata-token: $TOKEN" "{METADATA}/meta-data/tags/instance/$1"
}}
RANK=$(tag embark-rank)
MASTER=$(tag embark-master)"""

FIND_PLUGIN = """
# Where Amazon's image keeps NCCL's plugin for EFA, without which traffic falls back to TCP.
export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu:/opt/amazon/efa/lib"""


def render_vm(job: Job) -> list[File]:
    """`vm.sh`, `cloud_init.yaml`, and the machines' role."""
    refuse_volume(job)
    trust = {"Version": "2012-10-17", "Statement": [
        {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}]}
    policy = {"Version": "2012-10-17", "Statement": bucket_statements(job)}
    return [
        File("vm.sh", _script(job), is_executable=True),
        cloud_init(job, FIND_PLACE + (FIND_PLUGIN if _num_cards(job) and not job.spec.place.image else "")),
        File("vm_role_trust.json", json.dumps(trust, indent=2) + "\n"),
        *([File("vm_role_policy.json", json.dumps(policy, indent=2) + "\n")] if policy["Statement"] else []),
    ]


def _script(job: Job) -> str:
    site = site_of(job)
    about = (f"{job.num_nodes} x {site.machine_type} in {site.zone}, without Kubernetes. vm.sh up starts those that "
             "are not there, vm.sh status lists them, vm.sh logs N shows machine N, vm.sh down ends all.")
    has_cards = _num_cards(job) > 1
    settings = [setting("REGION", site.region), setting("ZONE", site.zone), setting("NAME", job.name),
                setting("AMI", AMI)]
    if has_cards:
        settings.append(needed("SUBNET_ID", "a private subnet with a NAT gateway: machines with several network cards "
                                            "have no public address"))
    else:
        subnet = output_of("aws", "ec2", "describe-subnets", "--region", variable("REGION"), "--filters",
                           Shell('"Name=availability-zone,Values=$ZONE"'), "Name=default-for-az,Values=true",
                           "--query", "Subnets[0].SubnetId", "--output", "text")
        settings.append(f"SUBNET_ID=${{SUBNET_ID:-$({str(subnet)[3:-2]})}}")
    return script(
        about, "\n".join(settings), PRELUDE, 'cd "$(dirname "$0")"',
        function("instance_of", "The id of the machine with this number, if it lives.", _find_instance()),
        function("group_id", "Of the security group, which lets the machines talk to each other and no one else.",
                 _group(job)),
        function("role", "What the machines may do: the run's buckets, and be reached by Session Manager.",
                 *_role(job)),
        function("start", "One machine. The first one's address goes into the others' tags.", _start(job, site)),
        function("up", "Starts the machines that are not there.", _up(job)),
        *_followed(job),
    )


def _num_cards(job: Job) -> int:
    """Fabric devices of a machine that are used: none where it is alone."""
    return job.machine.num_fabric_devices or 0 if job.num_nodes > 1 and site_of(job).has_fabric else 0


def _find_instance() -> str:
    return command("aws", "ec2", "describe-instances", "--region", variable("REGION"), "--filters",
                   Shell('"Name=tag:embark-run,Values=$NAME"'), Shell('"Name=tag:embark-rank,Values=$1"'),
                   "Name=instance-state-name,Values=pending,running",
                   "--query", "Reservations[0].Instances[0].InstanceId", "--output", "text")


def _group(job: Job) -> str:
    region = ("--region", variable("REGION"))
    find = output_of("aws", "ec2", "describe-security-groups", *region, "--filters",
                     Shell('"Name=group-name,Values=embark-$NAME"'), Shell('"Name=vpc-id,Values=$vpc"'),
                     "--query", "SecurityGroups[0].GroupId", "--output", "text")
    vpc = output_of("aws", "ec2", "describe-subnets", *region, "--subnet-ids", variable("SUBNET_ID"),
                    "--query", "Subnets[0].VpcId", "--output", "text")
    create = command("aws", "ec2", "create-security-group", *region, "--group-name", Shell('"embark-$NAME"'),
                     "--description", "Machines of one Embark run", "--vpc-id", Shell('"$vpc"'),
                     "--query", "GroupId", "--output", "text", indent="  ").strip()
    permission = Shell('"IpProtocol=-1,UserIdGroupPairs=[{GroupId=$id}]"')
    inward = command("aws", "ec2", "authorize-security-group-ingress", *region, "--group-id", Shell('"$id"'),
                     "--ip-permissions", permission, indent="  ")
    outward = command("aws", "ec2", "authorize-security-group-egress", *region, "--group-id", Shell('"$id"'),
                      "--ip-permissions", permission, indent="  ")
    efa = f"\n  # EFA wants the group named outward too.\n{outward} >/dev/null" if _num_cards(job) else ""
    return f"""\
local id vpc
vpc={vpc}
id={find}
if [ "$id" = None ]; then
  id=$({create})
{inward} >/dev/null{efa}
fi
printf '%s\\n' "$id\""""


def _role(job: Job) -> list[str]:
    """Each step by itself: one that was cut off goes on."""
    role, profile = ("--role-name", Shell('"embark-$NAME"')), ("--instance-profile-name", Shell('"embark-$NAME"'))
    steps = [unless(
        command("aws", "iam", "get-role", *role),
        run("aws", "iam", "create-role", *role, "--assume-role-policy-document", "file://vm_role_trust.json"))]
    if bucket_statements(job):
        steps.append(run("aws", "iam", "put-role-policy", *role, "--policy-name", "buckets",
                         "--policy-document", "file://vm_role_policy.json"))
    steps += [run("aws", "iam", "attach-role-policy", *role, "--policy-arn", f"arn:aws:iam::aws:policy/{name}")
              for name in ("AmazonSSMManagedInstanceCore", "CloudWatchAgentServerPolicy")]
    steps.append(unless(
        command("aws", "iam", "get-instance-profile", *profile),
        run("aws", "iam", "create-instance-profile", *profile),
        run("aws", "iam", "add-role-to-instance-profile", *profile, *role),
        "# It is seen everywhere only after some seconds.",
        run("sleep", "15")))
    return steps


def _start(job: Job, site: Site) -> str:
    words: list[str] = [
        "aws", "ec2", "run-instances", "--region", variable("REGION"), "--image-id", variable("AMI"),
        "--instance-type", site.machine_type, "--count", "1",
        "--iam-instance-profile", Shell('"Name=embark-$NAME"'),
        "--user-data", Shell('"fileb://$USER_DATA"'),
        "--metadata-options", "HttpTokens=required,HttpPutResponseHopLimit=2,InstanceMetadataTags=enabled",
        "--block-device-mappings", "DeviceName=/dev/sda1,Ebs={VolumeSize=200,VolumeType=gp3}",
        "--instance-initiated-shutdown-behavior", "terminate",
        "--tag-specifications",
        Shell('"ResourceType=instance,Tags=[{Key=Name,Value=$NAME-$1},{Key=embark-run,Value=$NAME},'
              '{Key=embark-rank,Value=$1}]"'),
    ]
    if job.num_nodes > 1:
        words += ["--placement", Shell('"GroupName=embark-$NAME,AvailabilityZone=$ZONE"')]
    if job.spec.place.spot:
        words += ["--instance-market-options",
                  "MarketType=spot,SpotOptions={SpotInstanceType=one-time,InstanceInterruptionBehavior=terminate}"]
    num = _num_cards(job)
    cards = ""
    if num:
        words += ["--network-interfaces", Shell('"${CARDS[@]}"')]
        kind = "efa" if num == 1 else "efa-only"
        cards = f"""\
# One card for traffic of every kind, the rest for the fabric alone.
local CARDS=("NetworkCardIndex=0,DeviceIndex=0,InterfaceType=efa,SubnetId=$SUBNET_ID,Groups=$GROUP_ID")
for card in $(seq 1 {num - 1}); do
  CARDS+=("NetworkCardIndex=$card,DeviceIndex=1,InterfaceType={kind},SubnetId=$SUBNET_ID,Groups=$GROUP_ID")
done
""" if num > 1 else """\
local CARDS=("NetworkCardIndex=0,DeviceIndex=0,InterfaceType=efa,SubnetId=$SUBNET_ID,Groups=$GROUP_ID")
"""
    else:
        words += ["--subnet-id", variable("SUBNET_ID"), "--security-group-ids", variable("GROUP_ID")]
    return cards + run(*words)


def _up(job: Job) -> str:
    region = ("--region", variable("REGION"))
    placement = unless(
        command("aws", "ec2", "describe-placement-groups", *region, "--group-names", Shell('"embark-$NAME"')),
        run("aws", "ec2", "create-placement-group", *region, "--group-name", Shell('"embark-$NAME"'),
            "--strategy", "cluster"))
    address = output_of("aws", "ec2", "describe-instances", *region, "--instance-ids",
                        Shell('"$(instance_of 0)"'), "--query", "Reservations[0].Instances[0].PrivateIpAddress",
                        "--output", "text")
    tag = run("aws", "ec2", "create-tags", *region, "--resources", Shell('"$(instance_of "$rank")"'),
              "--tags", Shell('"Key=embark-master,Value=$address"'), indent="  ")
    return f"""\
local rank address
role
{placement if job.num_nodes > 1 else "# One machine needs no placement group."}
GROUP_ID=sg-0
if [ "$DRY_RUN" = 0 ]; then GROUP_ID=$(group_id); fi
# 16 KB is all that a machine may be given, so it is packed.
USER_DATA=$(mktemp)
gzip --best --stdout cloud_init.yaml >"$USER_DATA"
for rank in $(seq 0 {job.num_nodes - 1}); do
  if [ "$(instance_of "$rank" 2>/dev/null || printf None)" = None ]; then start "$rank"; fi
done
rm -f "$USER_DATA"
if [ "$DRY_RUN" = 1 ]; then return 0; fi
# A first machine that was replaced has another address.
address={address}
for rank in $(seq 0 {job.num_nodes - 1}); do
{tag}
done"""


def _followed(job: Job) -> list[str]:
    region = ("--region", variable("REGION"))
    ask = ("Reservations[].Instances[].[Tags[?Key=='embark-rank']|[0].Value,InstanceId,State.Name,PrivateIpAddress]")
    listing = command("aws", "ec2", "describe-instances", *region, "--filters",
                      Shell('"Name=tag:embark-run,Values=$NAME"'), "--query", Shell(f'"{ask}"'), "--output", "table")
    tail = json.dumps({"command": [f"tail --follow=name --lines=100 {LOG}"]})
    follow = command("aws", "ssm", "start-session", *region, "--target", Shell('"$(instance_of "${1:-0}")"'),
                     "--document-name", "AWS-StartInteractiveCommand", "--parameters", tail)
    end = run("aws", "ec2", "terminate-instances", *region, "--instance-ids", Shell('"$id"'))
    return [
        function("status", "Which machines there are.", listing),
        function("logs", "What one machine says.", follow),
        function("down", "Ends all machines; the run's files stay in its bucket.", f"""\
local rank id
for rank in $(seq 0 {job.num_nodes - 1}); do
  id=$(instance_of "$rank")
  if [ "$id" != None ]; then {end}; fi
done"""),
        verbs("up", "status", "logs", "down", usage=USAGE),
    ]
