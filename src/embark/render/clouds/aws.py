"""AWS: the EKS cluster, plain EC2 machines, FSx for Lustre and Mountpoint for S3."""

import json
from collections.abc import Sequence

from embark.catalog import load_catalog
from embark.errors import ExitCode
from embark.render.folder import File
from embark.render.job import Bucket, Job, Location
from embark.render.shell_text import Shell, Step, Words, job_text, render_template, script_file, variable
from embark.render.targets.vm_node import ECR, about_machines, cloud_init, refuse_volume
from embark.render.wheel import upload_words
from embark.values import JsonDict, frozen

AMI = "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
"""Amazon's base image with NVIDIA's driver, EFA and Docker, whatever is the newest."""
FIND_PLUGIN = """
# Where Amazon's image keeps NCCL's plugin for EFA, without which traffic falls back to TCP.
export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu:/opt/amazon/efa/lib"""
ROLE_TRUST = {"Version": "2012-10-17", "Statement": [
    {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}]}
_REGION = ("--region", variable("REGION"))
_MANAGED = ("AmazonSSMManagedInstanceCore", "CloudWatchAgentServerPolicy")
READ_ACTIONS = ["s3:GetObject"]
PULL_ACTIONS = ["ecr:BatchCheckLayerAvailability", "ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage"]
WRITE_ACTIONS = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
ABOUT_OBJECTS = "What the run's objects belong to. eks_cluster.sh applies it."


def render_vm(job: Job) -> list[File]:
    """Write `vm.sh`, `cloud_init.yaml`, and the machines' role."""
    refuse_volume(job)
    policy, num = role_policy(job), num_cards(job)
    values = {
        "ami": AMI, "num_cards": num, "cards": card_words(max(2, num)), "subnet_words": subnet_words(),
        "group": group_words(job), "start_words": start_words(job, job.location), "end_words": end_words(),
        "role_steps": role_steps(job, "file://vm_role_trust.json", "file://vm_role_policy.json"),
        "placement_step": placement_step(), "upload_words": upload_words(job),
    }
    return [
        script_file("vm.sh", "aws/vm.sh.j2", job, about=about_machines(job), **values),
        cloud_init(job, render_template("aws/find_rank.sh") + plugin_text(job)),
        File("vm_role_trust.json", json.dumps(ROLE_TRUST, indent=2) + "\n"),
        *([File("vm_role_policy.json", json.dumps(policy, indent=2) + "\n")] if policy["Statement"] else []),
    ]


def plugin_text(job: Job) -> str:
    """Shell text for a machine with EFA and no image, which has to find the plugin; an image brings its own."""
    return FIND_PLUGIN if job.cloud == "aws" and num_cards(job) and not job.place.image else ""


def num_cards(job: Job) -> int:
    """Return how many fabric devices of a machine are used; none if it is alone."""
    return job.machine.num_fabric_devices or 0 if job.num_nodes > 1 and job.location.has_fabric else 0


@frozen
class GroupWords:
    """Commands on the security group; they use `$vpc` and `$id`, which others print."""

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


def role_policy(job: Job) -> JsonDict:
    return {"Version": "2012-10-17", "Statement": [*bucket_statements(job), *registry_statements(job)]}


def registry_statements(job: Job) -> list[JsonDict]:
    """Return what a machine needs to pull the image from ECR; nodes of EKS have it already."""
    found = ECR.match(job.image)
    if not found:
        return []
    arn = f"arn:aws:ecr:{found['region']}:{found['account']}:repository/{found['name']}"
    return [{"Effect": "Allow", "Action": ["ecr:GetAuthorizationToken"], "Resource": "*"},
            {"Effect": "Allow", "Action": PULL_ACTIONS, "Resource": arn}]


def role_steps(job: Job, trust: str, policy: str) -> list[Step]:
    """Return steps that can each be repeated. `trust` and `policy` are documents, or file://… of them."""
    role, profile = ("--role-name", Shell('"embark-$NAME"')), ("--instance-profile-name", Shell('"embark-$NAME"'))
    managed = [("--policy-arn", f"arn:aws:iam::aws:policy/{name}") for name in _MANAGED]
    named = [("--policy-name", "run")] if role_policy(job)["Statement"] else []
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
                unless=("aws", "ec2", "describe-placement-groups", *_REGION, "--group-names", Shell('"embark-$NAME"')),
                remove=(("aws", "ec2", "delete-placement-group", *_REGION, *name),))


def start_words(job: Job, location: Location) -> Words:
    """Start machine number `$1` with the file `$USER_DATA`."""
    words: list[str] = [
        "aws", "ec2", "run-instances", *_REGION, "--image-id", variable("AMI"),
        "--instance-type", location.machine_type, "--count", "1",
        "--iam-instance-profile", Shell('"Name=embark-$NAME"'),
        "--user-data", Shell('"fileb://$USER_DATA"'),
        "--metadata-options", "HttpTokens=required,HttpPutResponseHopLimit=2,InstanceMetadataTags=enabled",
        "--block-device-mappings", "DeviceName=/dev/sda1,Ebs={VolumeSize=200,VolumeType=gp3}",
        "--instance-initiated-shutdown-behavior", "terminate",
        "--tag-specifications",
        Shell('"ResourceType=instance,Tags=[{Key=Name,Value=$NAME-$1},{Key=embark-run,Value=$NAME},'
              '{Key=embark-rank,Value=$1}]"'),
    ]
    if job.has_reservation:  # which decides where its machines stand: no placement group
        words += ["--capacity-reservation-specification",
                  f"CapacityReservationTarget={{CapacityReservationId={job.place.reservation}}}",
                  "--placement", Shell('"AvailabilityZone=$ZONE"')]
    elif job.num_nodes > 1:
        words += ["--placement", Shell('"GroupName=embark-$NAME,AvailabilityZone=$ZONE"')]
    if job.capacity == "block":
        words += ["--instance-market-options", "MarketType=capacity-block"]
    if job.is_spot:
        words += ["--instance-market-options",
                  "MarketType=spot,SpotOptions={SpotInstanceType=one-time,InstanceInterruptionBehavior=terminate}"]
    if num_cards(job):
        return (*words, "--network-interfaces", Shell('"${CARDS[@]}"'))
    return (*words, "--subnet-id", variable("SUBNET_ID"), "--security-group-ids", variable("GROUP_ID"))


def card_words(num: int) -> list[Shell]:
    """Network interfaces: one for traffic of every kind, the rest for the fabric alone."""
    kinds = ["efa", *["efa-only"] * (num - 1)]
    return [Shell(f'"NetworkCardIndex={index},DeviceIndex={min(index, 1)},InterfaceType={kind},'
                  'SubnetId=$SUBNET_ID,Groups=$GROUP_ID"') for index, kind in enumerate(kinds)]


def subnet_words() -> Words:
    """Find the zone's default subnet, if the account still has it."""
    return ("aws", "ec2", "describe-subnets", *_REGION, "--filters",
            Shell('"Name=availability-zone,Values=$ZONE"'), "Name=default-for-az,Values=true",
            "--query", "Subnets[0].SubnetId", "--output", "text")


def end_words() -> Words:
    return ("aws", "ec2", "terminate-instances", *_REGION, "--instance-ids", Shell('"$id"'))


def render_eks(job: Job) -> list[File]:
    """Write `eks_cluster.yaml` for eksctl, and `eks_cluster.sh` that runs it and what comes after."""
    zone = job.location.zone
    values = {"second_zone": f"{zone[:-1]}{'b' if zone.endswith('a') else 'a'}", "exit_codes": ExitCode,
              "version": load_catalog().versions["eks"]}
    return [
        File("eks_cluster.yaml", job_text("aws/eks_cluster.yaml.j2", job, statements=bucket_statements(job),
                                          server_statements=path_statements([job.versions] if job.versions else []),
                                          **values)),
        File("eks_objects.yaml", job_text("aws/eks_objects.yaml.j2", job, about=ABOUT_OBJECTS)),
        script_file("eks_cluster.sh", "aws/cluster.sh.j2", job, **values),
    ]


def bucket_statements(job: Job) -> list[JsonDict]:
    """Return statements of an IAM policy that allow the run its own paths in S3 and its own metrics in CloudWatch."""
    statements = path_statements([path for path in job.object_store_paths if path.scheme == "s3"])
    watch = job.spec.watch
    if "cloudwatch" in watch.sinks:
        statements.append({"Effect": "Allow", "Action": ["cloudwatch:PutMetricData"], "Resource": "*", "Condition": {
            "StringEquals": {"cloudwatch:namespace": watch.cloudwatch_namespace}}})
    return statements


def path_statements(paths: Sequence[Bucket]) -> list[JsonDict]:
    """Return statements that allow to list the buckets of these paths, and to read or write what is below them."""
    statements: list[JsonDict] = []
    for path in paths:
        arn = f"arn:aws:s3:::{path.name}"
        below = f"{arn}/{path.prefix}/*" if path.prefix else f"{arn}/*"
        may_list = {"Effect": "Allow", "Action": ["s3:ListBucket", "s3:GetBucketLocation"], "Resource": arn}
        if may_list not in statements:
            statements.append(may_list)
        statements.append({"Effect": "Allow", "Action": WRITE_ACTIONS if path.is_written else READ_ACTIONS,
                           "Resource": below})
    return statements
