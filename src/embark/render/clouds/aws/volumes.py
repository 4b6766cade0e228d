"""Storage on AWS: the run's buckets, and FSx for Lustre with its data repository."""

from __future__ import annotations

from typing import Any

from embark.render.file import File
from embark.render.job import Job
from embark.render.location import Bucket, buckets, data_source, places, site_of
from embark.render.shell_text import PRELUDE, Shell, command, output_of, run, script, setting, unless, variable
from embark.render.volumes import apply_filled, bucket_files, capacity_gib, speed, volume_files, volume_of

LUSTRE_VERSION = "2.15"


def render_volumes(job: Job) -> list[File]:
    """`storage.sh` makes what the run needs; with `place.volume` also the volume, its claim and the copy."""
    files = [File("storage.sh", _script(job), is_executable=True)]
    volume = volume_of(job)
    if volume:
        files += volume_files(job, lustre_source(), _capacity_gib(job),
                              filled_by="storage.sh puts the file system's id and names in.")
    return files + bucket_mount(job)


def bucket_mount(job: Job) -> list[File]:
    """Mountpoint for S3."""
    read = [place for place in places(job) if place.scheme == "s3" and not place.is_written]
    if job.spec.place.volume or not read:
        return []
    bucket = read[0]
    source = {"mountOptions": ["allow-other", f"region {site_of(job).region}", "read-only"],
              "csi": {"driver": "s3.csi.aws.com", "volumeHandle": f"{job.name}-bucket",
                      "volumeAttributes": {"bucketName": bucket.name}}}
    return bucket_files(job, source, bucket.uri, needs="It needs the add-on aws-mountpoint-s3-csi-driver.")


def lustre_source() -> dict[str, Any]:
    return {
        "mountOptions": ["flock"],
        "csi": {
            "driver": "fsx.csi.aws.com",
            "volumeHandle": "fs-00000000000000000",
            "volumeAttributes": {"dnsname": "fs-00000000000000000.fsx.us-east-1.amazonaws.com", "mountname": "fsx"},
        },
    }


def lustre_configuration(job: Job) -> str:
    """What `--lustre-configuration` takes. PERSISTENT_2 is refused without a throughput."""
    name = job.spec.place.volume.removeprefix("fsx-lustre-")
    if name == "scratch-2":
        return "DeploymentType=SCRATCH_2"
    return f"DeploymentType=PERSISTENT_2,PerUnitStorageThroughput={name},DataCompressionType=LZ4"


def _capacity_gib(job: Job) -> int:
    """FSx counts 1200, then by 2400."""
    volume = volume_of(job)
    wanted = capacity_gib(volume) if volume else 0
    return 1200 if wanted <= 1229 else -(-wanted // 2400) * 2400


def _script(job: Job) -> str:
    site = site_of(job)
    about = "Makes the run's storage where it is not there yet. Safe to repeat."
    parts = [
        f"{setting('CLUSTER', site.cluster)}\n{setting('REGION', site.region)}",
        PRELUDE,
        'cd "$(dirname "$0")"',
        *(_bucket(bucket) for bucket in buckets(job) if bucket.scheme == "s3"),
    ]
    if volume_of(job):
        parts += _lustre(job)
    return script(about, *parts)


def _bucket(bucket: Bucket) -> str:
    name = ("--bucket", bucket.name)
    make = f"""\
# us-east-1 is the one region that must not be named.
if [ "$REGION" = us-east-1 ]; then
  {run("aws", "s3api", "create-bucket", *name, "--region", variable("REGION"))}
else
{run("aws", "s3api", "create-bucket", *name, "--region", variable("REGION"),
     "--create-bucket-configuration", Shell('"LocationConstraint=$REGION"'), indent="  ")}
fi"""
    block = run("aws", "s3api", "put-public-access-block", *name, "--public-access-block-configuration",
                "BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true")
    return unless(command("aws", "s3api", "head-bucket", *name), make, block)


def _lustre(job: Job) -> list[str]:
    size_gib = _capacity_gib(job)
    volume = volume_of(job)
    token = f"{job.namespace}-{job.claim_name}"
    tag = "embark-volume"
    find = output_of("aws", "fsx", "describe-file-systems", "--region", variable("REGION"), "--query",
                     Shell(f"\"FileSystems[?Tags[?Key=='{tag}' && Value=='{token}']].FileSystemId | [0]\""),
                     "--output", "text")
    create = command("aws", "fsx", "create-file-system", "--region", variable("REGION"),
                     "--client-request-token", token, "--file-system-type", "LUSTRE",
                     "--file-system-type-version", LUSTRE_VERSION, "--storage-type", "SSD",
                     "--storage-capacity", Shell('"$CAPACITY_GIB"'), "--subnet-ids", variable("SUBNET_ID"),
                     "--security-group-ids", variable("GROUP_ID"),
                     "--lustre-configuration", lustre_configuration(job),
                     "--tags", f"Key={tag},Value={token}",
                     "--query", "FileSystem.FileSystemId", "--output", "text", indent="      ").strip()
    vpc = _cluster_field("cluster.resourcesVpcConfig.vpcId")
    group = _cluster_field("cluster.resourcesVpcConfig.clusterSecurityGroupId")
    subnet = output_of("aws", "ec2", "describe-subnets", "--region", variable("REGION"),
                       "--filters", Shell('"Name=vpc-id,Values=$VPC_ID"'),
                       Shell('"Name=availability-zone,Values=$ZONE"'),
                       "Name=tag:kubernetes.io/role/internal-elb,Values=1",
                       "--query", "Subnets[0].SubnetId", "--output", "text")
    attribute = {name: output_of("aws", "fsx", "describe-file-systems", "--region", variable("REGION"),
                                 "--file-system-ids", variable("FS_ID"), "--query", f"FileSystems[0].{name}",
                                 "--output", "text")
                 for name in ("Lifecycle", "DNSName", "LustreConfiguration.MountName")}
    patch = ('"{\\"spec\\":{\\"csi\\":{\\"volumeHandle\\":\\"$FS_ID\\",\\"volumeAttributes\\":'
             '{\\"dnsname\\":\\"$DNS_NAME\\",\\"mountname\\":\\"$MOUNT_NAME\\"}}}}"')
    return [
        f"# {speed(volume, size_gib) if volume else ''} More reads faster, by 2400.\n"
        f"{setting('CAPACITY_GIB', str(size_gib))}\n{setting('ZONE', site_of(job).zone)}",
        f"""\
# In the machines' own zone and subnet, behind the cluster's security group, which lets its members talk.
if [ "$DRY_RUN" = 0 ]; then
  VPC_ID={vpc}
  GROUP_ID={group}
  SUBNET_ID={subnet}
  FS_ID={find}
else
  VPC_ID=vpc-0 GROUP_ID=sg-0 SUBNET_ID=subnet-0 FS_ID=None
fi
if [ "$FS_ID" = None ]; then
  if [ "$DRY_RUN" = 1 ]; then
    printf '+ aws fsx create-file-system … in %s of %s\\n' "$SUBNET_ID" "$VPC_ID" >&2
    FS_ID=fs-0
  else
    FS_ID=$({create})
  fi
fi
if [ "$DRY_RUN" = 0 ]; then
  until [ {attribute["Lifecycle"]} = AVAILABLE ]; do sleep 30; done
  DNS_NAME={attribute["DNSName"]}
  MOUNT_NAME={attribute["LustreConfiguration.MountName"]}
fi""",
        _association(job),
        apply_filled(patch),
    ]


def _association(job: Job) -> str:
    """Objects of the bucket appear as files, and are fetched when they are first read."""
    folder = job.spec.data.path.removeprefix(job.spec.place.volume_path).strip("/") or "data"
    there = output_of("aws", "fsx", "describe-data-repository-associations", "--region", variable("REGION"),
                      "--filters", Shell('"Name=file-system-id,Values=$FS_ID"'),
                      "--query", "Associations[0].AssociationId", "--output", "text")
    events = "Events=[NEW,CHANGED,DELETED]"
    make = run("aws", "fsx", "create-data-repository-association", "--region", variable("REGION"),
               "--file-system-id", variable("FS_ID"), "--file-system-path", f"/{folder}",
               "--data-repository-path", variable("DATA_SOURCE"), "--batch-import-meta-data-on-create",
               "--s3", f"AutoImportPolicy={{{events}}},AutoExportPolicy={{{events}}}", indent="  ")
    return f"""\
# Objects of the bucket appear as files, and are fetched when they are first read.
{setting("DATA_SOURCE", data_source(job))}
if [ "$DRY_RUN" = 1 ] || [ {there} = None ]; then
{make}
fi"""


def _cluster_field(query: str) -> Shell:
    return output_of("aws", "eks", "describe-cluster", "--name", variable("CLUSTER"), "--region", variable("REGION"),
                     "--query", query, "--output", "text")
