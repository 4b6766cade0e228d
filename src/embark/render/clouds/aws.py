"""AWS: the EKS cluster, plain EC2 machines, FSx for Lustre and Mountpoint for S3."""

import json
from collections.abc import Sequence

from embark.catalog import load_catalog
from embark.render.folder import File, Files
from embark.render.job import Bucket, Job
from embark.render.shell_text import Shell, Step, Words, job_steps, job_text, job_words, render_template, script_file
from embark.render.targets.vm_node import ECR, about_machines, cloud_init, refuse_volume
from embark.render.wheel import upload_words
from embark.values import JsonDict

AMI = "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
"""Amazon's base image with NVIDIA's driver, EFA and Docker, whatever is the newest."""
FIND_PLUGIN = """
# Where Amazon's image keeps NCCL's plugin for EFA, without which traffic falls back to TCP.
export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu:/opt/amazon/efa/lib"""
ROLE_TRUST = {"Version": "2012-10-17", "Statement": [
    {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}]}
READ_ACTIONS = ["s3:GetObject"]
PULL_ACTIONS = ["ecr:BatchCheckLayerAvailability", "ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage"]
WRITE_ACTIONS = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
ABOUT_OBJECTS = "What the run's objects belong to. eks_cluster.sh applies it."


def render_vm(job: Job) -> Files:
    """Write `vm.sh`, `cloud_init.yaml`, and the machines' role."""
    refuse_volume(job)
    policy, num = role_policy(job), num_cards(job)
    values = {
        "ami": AMI, "num_cards": num, "cards": card_words(max(2, num)), "start_words": start_words(job),
        "role_steps": role_steps(job, "file://vm_role_trust.json", "file://vm_role_policy.json"),
        "placement_step": job_steps(job, "placement")[0], "upload_words": upload_words(job)
    }
    return [
        script_file("vm.sh", "aws/vm.sh.j2", job, about=about_machines(job), **values),
        cloud_init(job, render_template("aws/find_rank.sh") + plugin_text(job)),
        File("vm_role_trust.json", json.dumps(ROLE_TRUST, indent=2) + "\n"),
        *([File("vm_role_policy.json", json.dumps(policy, indent=2) + "\n")] if policy["Statement"] else [])
    ]


def plugin_text(job: Job) -> str:
    """Shell text for a machine with EFA and no image, which has to find the plugin; an image brings its own."""
    return FIND_PLUGIN if job.cloud == "aws" and num_cards(job) and not job.place.image else ""


def num_cards(job: Job) -> int:
    """Return how many fabric devices of a machine are used; none if it is alone."""
    return job.machine.num_fabric_devices or 0 if job.num_nodes > 1 and job.location.has_fabric else 0


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
    return job_steps(job, "role", trust=trust, policy=policy,
                     policy_name="run" if role_policy(job)["Statement"] else "")


def start_words(job: Job) -> Words:
    """Return the command that starts a machine."""
    options = {"start_reserved": job.has_reservation, "start_placed": job.num_nodes > 1 and not job.has_reservation,
               "start_block": job.capacity == "block", "start_spot": job.is_spot,
               "start_cards": num_cards(job) > 0, "start_one_card": not num_cards(job)}
    return job_words(job, "start", options)


def card_words(num: int) -> list[Shell]:
    """Network interfaces: one for traffic of every kind, the rest for the fabric alone."""
    kinds = ["efa", *["efa-only"] * (num - 1)]
    return [Shell(f'"NetworkCardIndex={index},DeviceIndex={min(index, 1)},InterfaceType={kind},'
                  'SubnetId=$SUBNET_ID,Groups=$GROUP_ID"') for index, kind in enumerate(kinds)]


def render_eks(job: Job) -> Files:
    """Write `eks_cluster.yaml` for eksctl, and `eks_cluster.sh` that runs it and what comes after."""
    zone = job.location.zone
    values = {"second_zone": f"{zone[:-1]}{'b' if zone.endswith('a') else 'a'}",
              "version": load_catalog().versions["eks"]}
    return [
        File("eks_cluster.yaml", job_text("aws/eks_cluster.yaml.j2", job, statements=bucket_statements(job),
                                          server_statements=path_statements([job.versions] if job.versions else []),
                                          **values)),
        File("eks_objects.yaml", job_text("aws/eks_objects.yaml.j2", job, about=ABOUT_OBJECTS)),
        script_file("eks_cluster.sh", "aws/cluster.sh.j2", job, **values)
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
