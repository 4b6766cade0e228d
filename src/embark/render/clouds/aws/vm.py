"""Plain EC2 machines: a script that starts, follows and ends them, and what each is given."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from embark.render.clouds.aws.cluster import bucket_statements
from embark.render.file import File
from embark.render.job import Job
from embark.render.location import Site, site_of
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
    variable,
    verbs,
)
from embark.render.steps import Step, Words, step_text
from embark.render.targets.vm_node import LOG, USAGE, cloud_init, refuse_volume

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


ROLE_TRUST = {"Version": "2012-10-17", "Statement": [
    {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}]}
_REGION = ("--region", variable("REGION"))
_MANAGED = ("AmazonSSMManagedInstanceCore", "CloudWatchAgentServerPolicy")


def render_vm(job: Job) -> list[File]:
    """`vm.sh`, `cloud_init.yaml`, and the machines' role."""
    refuse_volume(job)
    policy = role_policy(job)
    return [
        File("vm.sh", _script(job), is_executable=True),
        cloud_init(job, FIND_PLACE + plugin_text(job)),
        File("vm_role_trust.json", json.dumps(ROLE_TRUST, indent=2) + "\n"),
        *([File("vm_role_policy.json", json.dumps(policy, indent=2) + "\n")] if policy["Statement"] else []),
    ]


def _script(job: Job) -> str:
    site = site_of(job)
    about = (f"{job.num_nodes} x {site.machine_type} in {site.zone}, without Kubernetes. vm.sh up starts those that "
             "are not there, vm.sh status lists them, vm.sh logs N shows machine N, vm.sh down ends all.")
    has_cards = num_cards(job) > 1
    settings = [setting("REGION", site.region), setting("ZONE", site.zone), setting("NAME", job.name),
                setting("AMI", AMI)]
    if has_cards:
        settings.append(needed("SUBNET_ID", "a private subnet with a NAT gateway: machines with several network cards "
                                            "have no public address"))
    else:
        subnet = output_of(*subnet_words())
        settings.append(f"SUBNET_ID=${{SUBNET_ID:-$({str(subnet)[3:-2]})}}")
    return script(
        about, "\n".join(settings), PRELUDE, 'cd "$(dirname "$0")"',
        function("instance_of", "The id of the machine with this number, if it lives.", _find_instance()),
        function("group_id", "Of the security group, which lets the machines talk to each other and no one else.",
                 _group(job)),
        function("role", "What the machines may do: the run's buckets, and be reached by Session Manager.",
                 *(step_text(step) for step in role_steps(job, "file://vm_role_trust.json",
                                                          "file://vm_role_policy.json"))),
        function("start", "One machine. The first one's address goes into the others' tags.", _start(job, site)),
        function("up", "Starts the machines that are not there.", _up(job)),
        *_followed(job),
    )


def plugin_text(job: Job) -> str:
    """For the program of a machine that has EFA and no image: that brings its own."""
    return FIND_PLUGIN if job.cloud == "aws" and num_cards(job) and not job.spec.place.image else ""


def num_cards(job: Job) -> int:
    """Fabric devices of a machine that are used: none where it is alone."""
    return job.machine.num_fabric_devices or 0 if job.num_nodes > 1 and site_of(job).has_fabric else 0


def _find_instance() -> str:
    return command("aws", "ec2", "describe-instances", "--region", variable("REGION"), "--filters",
                   Shell('"Name=tag:embark-run,Values=$NAME"'), Shell('"Name=tag:embark-rank,Values=$1"'),
                   "Name=instance-state-name,Values=pending,running",
                   "--query", "Reservations[0].Instances[0].InstanceId", "--output", "text")


@dataclass(frozen=True, slots=True)
class GroupWords:
    """Of the security group, which must be asked for by what others printed: `$vpc` and `$id`."""

    vpc: Words
    find: Words
    create: Words
    rules: tuple[Words, ...]
    remove: Words


def group_words(job: Job) -> GroupWords:
    permission = ("--group-id", Shell('"$id"'), "--ip-permissions",
                  Shell('"IpProtocol=-1,UserIdGroupPairs=[{GroupId=$id}]"'))
    rules = [("aws", "ec2", "authorize-security-group-ingress", *_REGION, *permission)]
    if num_cards(job):  # EFA wants the group named outward too
        rules.append(("aws", "ec2", "authorize-security-group-egress", *_REGION, *permission))
    return GroupWords(
        vpc=("aws", "ec2", "describe-subnets", *_REGION, "--subnet-ids", variable("SUBNET_ID"),
             "--query", "Subnets[0].VpcId", "--output", "text"),
        find=("aws", "ec2", "describe-security-groups", *_REGION, "--filters",
              Shell('"Name=group-name,Values=embark-$NAME"'), Shell('"Name=vpc-id,Values=$vpc"'),
              "--query", "SecurityGroups[0].GroupId", "--output", "text"),
        create=("aws", "ec2", "create-security-group", *_REGION, "--group-name", Shell('"embark-$NAME"'),
                "--description", "Machines of one Embark run", "--vpc-id", Shell('"$vpc"'),
                "--query", "GroupId", "--output", "text"),
        rules=tuple(rules),
        remove=("aws", "ec2", "delete-security-group", *_REGION, "--group-id", Shell('"$id"')))


def _group(job: Job) -> str:
    words = group_words(job)
    rules = "\n".join(f"{command(*rule, indent='  ')} >/dev/null" for rule in words.rules)
    return f"""\
local id vpc
vpc={output_of(*words.vpc)}
id={output_of(*words.find)}
if [ "$id" = None ]; then
  id=$({command(*words.create, indent="  ").strip()})
{rules}
fi
printf '%s\\n' "$id\""""


def role_policy(job: Job) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": bucket_statements(job)}


def role_steps(job: Job, trust: str, policy: str) -> list[Step]:
    """Each by itself: one that was cut off goes on. `trust` and `policy` are documents, or file://… of them."""
    role, profile = ("--role-name", Shell('"embark-$NAME"')), ("--instance-profile-name", Shell('"embark-$NAME"'))
    managed = [("--policy-arn", f"arn:aws:iam::aws:policy/{name}") for name in _MANAGED]
    named = [("--policy-name", "buckets")] if bucket_statements(job) else []
    return [
        Step("the role of its machines",
             (("aws", "iam", "create-role", *role, "--assume-role-policy-document", trust),),
             unless=("aws", "iam", "get-role", *role),
             remove=(*(("aws", "iam", "delete-role-policy", *role, *name) for name in named),
                     *(("aws", "iam", "detach-role-policy", *role, *one) for one in managed),
                     ("aws", "iam", "delete-role", *role))),
        *(Step("", (("aws", "iam", "put-role-policy", *role, *name, "--policy-document", policy),)) for name in named),
        *(Step("", (("aws", "iam", "attach-role-policy", *role, *one),)) for one in managed),
        Step("the instance profile of its machines",
             (("aws", "iam", "create-instance-profile", *profile),
              ("aws", "iam", "add-role-to-instance-profile", *profile, *role)),
             unless=("aws", "iam", "get-instance-profile", *profile),
             remove=(("aws", "iam", "remove-role-from-instance-profile", *profile, *role),
                     ("aws", "iam", "delete-instance-profile", *profile)),
             wait_s=15),
    ]


def placement_step() -> Step:
    name = ("--group-name", Shell('"embark-$NAME"'))
    return Step("the placement group of its machines",
                (("aws", "ec2", "create-placement-group", *_REGION, *name, "--strategy", "cluster"),),
                unless=("aws", "ec2", "describe-placement-groups", *_REGION, "--group-names",
                        Shell('"embark-$NAME"')),
                remove=(("aws", "ec2", "delete-placement-group", *_REGION, *name),))


def start_words(job: Job, site: Site) -> Words:
    """One machine, number `$1`. `$USER_DATA` is the file that it is given."""
    words: list[str] = [
        "aws", "ec2", "run-instances", *_REGION, "--image-id", variable("AMI"),
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
    if num_cards(job):
        return (*words, "--network-interfaces", Shell('"${CARDS[@]}"'))
    return (*words, "--subnet-id", variable("SUBNET_ID"), "--security-group-ids", variable("GROUP_ID"))


def card_words(num: int) -> list[Shell]:
    """One card for traffic of every kind, the rest for the fabric alone."""
    kinds = ["efa", *["efa-only"] * (num - 1)]
    return [Shell(f'"NetworkCardIndex={index},DeviceIndex={min(index, 1)},InterfaceType={kind},'
                  'SubnetId=$SUBNET_ID,Groups=$GROUP_ID"') for index, kind in enumerate(kinds)]


def subnet_words() -> Words:
    """The zone's own subnet, where the account has kept it."""
    return ("aws", "ec2", "describe-subnets", *_REGION, "--filters",
            Shell('"Name=availability-zone,Values=$ZONE"'), "Name=default-for-az,Values=true",
            "--query", "Subnets[0].SubnetId", "--output", "text")


def end_words() -> Words:
    return ("aws", "ec2", "terminate-instances", *_REGION, "--instance-ids", Shell('"$id"'))


def _start(job: Job, site: Site) -> str:
    num = num_cards(job)
    if not num:
        return run(*start_words(job, site))
    first, *rest = card_words(num)
    lines = [f"local CARDS=({first})"]
    if rest:
        each = str(rest[0]).replace("NetworkCardIndex=1,", "NetworkCardIndex=$card,")
        lines = ["# One card for traffic of every kind, the rest for the fabric alone.", *lines,
                 f"for card in $(seq 1 {num - 1}); do", f"  CARDS+=({each})", "done"]
    return "\n".join([*lines, run(*start_words(job, site))])


def _up(job: Job) -> str:
    region = ("--region", variable("REGION"))
    placement = step_text(placement_step())
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
    end = run(*end_words())
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
