"""The guide of examples/cloud_deployment/aws."""

from __future__ import annotations

from embark.render.budgets import budget_usd, needed_units
from embark.render.guides.parts import (
    cost_table,
    machines_table,
    prices_note,
    settings_table,
    spot_section,
    targets_section,
    trouble_table,
    watch_section,
)
from embark.render.job import Job
from embark.render.launch_script import NAMES
from embark.render.location import data_source, site_of
from embark.render.volumes import data_target, volume_of


def aws_guide(job: Job) -> str:
    site, volume, script = site_of(job), volume_of(job), NAMES["aws"]
    quota = job.machine.quota
    num = job.machine.num_fabric_devices
    registry = "123456789012.dkr.ecr." + site.region + ".amazonaws.com"
    return f"""\
# Training on AWS

From an empty account to a DLRM with Criteo's terabyte tables on {job.num_nodes} x `{job.machine.name}`:
{job.world_size} GPUs, EKS, EFA between the machines, {volume.title if volume else "S3"} for the data, checkpoints in
S3. Every file here was written by `embark render run.toml`; nothing in them needs to be edited by hand.

```text
 your machine ── embark render ──► files ── {script} ──► EKS
                                                           │
   S3: data, checkpoints, curves ◄──────────────────── pods, one a machine
     │                                                     │
     └─ FSx for Lustre (a cache of the bucket) ──────► {job.num_processes} ranks each, EFA between them
```

## What it costs

{cost_table(job)}

The control plane is $0.10 an hour more, and a NAT gateway about $0.05. Nothing here stops by itself: see
[Clean up](#clean-up).

{machines_table(["aws"])}

{prices_note()}

## Before you begin

1. **Tools.** [AWS CLI](https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html),
   [eksctl](https://eksctl.io/installation/), [kubectl](https://kubernetes.io/docs/tasks/tools/),
   [Helm](https://helm.sh/docs/intro/install/), Docker or another builder of images, and Embark:

   ```bash
   pip install 'embark-rec[cloud,columns]'
   ```

2. **Login.** A user or role that may make clusters, roles, networks and file systems. Best is single sign-on:

   ```bash
   aws configure sso
   aws sts get-caller-identity
   ```

3. **Quota.** A new account may start no large GPU machine at all. This run needs {needed_units(job)} vCPUs of
   "{quota.on_demand if quota else ""}" (and for spot, of "{quota.spot if quota else ""}"). Ask early; it takes hours
   to days:

   ```bash
   ./money.sh quota
   aws service-quotas request-service-quota-increase --service-code ec2 --region {site.region} \\
     --quota-code {quota.on_demand_code if quota else ''} --desired-value {needed_units(job)}
   ```

4. **A limit on the bill.** A mail at half, four fifths and all of ${budget_usd(job)}:

   ```bash
   EMAIL=you@example.com ./money.sh budget
   ```

## Step 1: your names

A bucket's name is the world's, so take your own. Everything else follows from `run.toml`:

```bash
embark render run.toml --out . \\
  --set store.root=s3://YOUR-BUCKET/runs \\
  --set place.image={registry}/embark:1
embark lint .
```

## Step 2: the image

It holds torch, TorchRec and FBGEMM in versions that go together, and EFA's libraries, without which NCCL falls back to
TCP without a word.

```bash
aws ecr create-repository --repository-name embark --region {site.region}
aws ecr get-login-password --region {site.region} | docker login --username AWS --password-stdin {registry}
docker build --tag {registry}/embark:1 .
docker push {registry}/embark:1
```

Docker prints the digest when it has pushed; `--set place.image=…/embark@sha256:…` pins it, so that a restart in a week
runs the same image.

## Step 3: the cluster

```bash
./eks_cluster.sh      # DRY_RUN=1 in front only says what it would do
```

[eks_cluster.sh](eks_cluster.sh) hands [eks_cluster.yaml](eks_cluster.yaml) to eksctl, which takes about twenty minutes,
and then does what eksctl does not:

- a gateway endpoint for S3, without which every byte of data is paid for at the NAT gateway;
- the EFA device plugin from AWS's chart: eksctl's own does not tolerate the taint of GPU machines.

Of what is in the file, these are what older guides miss: the GPU machines stand in exactly one zone (`{site.zone}`),
behind private addresses, with `efaEnabled`; pods may ask the metadata service for a spot notice; and the pods' access
to S3 is theirs alone, by Pod Identity, and only to this run's places.

```bash
kubectl get nodes --label-columns node.kubernetes.io/instance-type,topology.kubernetes.io/zone
COLUMNS='NAME:.metadata.name,GPUS:.status.allocatable.nvidia\\.com/gpu'
kubectl get nodes --output custom-columns="$COLUMNS,EFA:.status.allocatable.vpc\\.amazonaws\\.com/efa"
```

Each GPU machine must show {job.num_processes} GPUs and {num} EFA devices. If EFA shows `<none>`, training would work,
at a fraction of the speed.

## Step 4: data

Criteo's terabyte is [on Hugging Face](https://huggingface.co/datasets/criteo/CriteoClickLogs): 24 files, a day each.
The same `run.toml` says what the tables are, so preparing needs only where the files lie and which day is held out:

```bash
./storage.sh
embark data prepare run.toml --set data.path=criteo-1tb --set 'data.prepare.input=day_*.gz' \\
  --set data.prepare.format=criteo --set data.prepare.split=file --set 'data.prepare.validation_files=["day_23.gz"]'
embark data copy criteo-1tb {data_source(job)}
```

{_storage_text(job)}

## Step 5: train

```bash
./{script} --dry-run    # every command that it would run
./{script}              # looks at tools, login and quota, makes what is missing, starts, follows the log
```

{targets_section(job)}

Without Kubernetes at all: `embark render run.toml --set place.target=vm --set place.volume="" --set data.path=s3://…
--out vm` writes `vm.sh`, which starts the machines themselves, with EFA, and a service on each.

{watch_section(job, script)}

{spot_section(job)}

## What the pods are told

{settings_table(job)}

What is *not* set is as deliberate: `FI_PROVIDER`, `FI_EFA_USE_DEVICE_RDMA`, `NCCL_PROTO` and `NCCL_IB_DISABLE` either
mean nothing on EFA or take a choice away that the plugin makes better.

To see that EFA is used, run once with `NCCL_DEBUG=INFO` and look for `NET/OFI Selected provider is efa`; `NET/Socket`
means that it is not.

## Clean up

```bash
./{script} clean      # the job and the GPU machines, which are nearly all of the bill
./{script} destroy    # and the cluster
aws fsx describe-file-systems --region {site.region} --query 'FileSystems[].[FileSystemId,StorageCapacity]'
```

The file system and the bucket stay, and are paid for, until you delete them: `aws fsx delete-file-system
--file-system-id fs-…`, `aws s3 rb s3://YOUR-BUCKET --force`.

## When something is wrong

{trouble_table([
    ["Nodes show no `vpc.amazonaws.com/efa`", "The EFA device plugin does not run there",
     "`kubectl get pods -n kube-system -l name=aws-efa-k8s-device-plugin`; run `eks_cluster.sh` again"],
    ["`InsufficientInstanceCapacity`", "AWS has none free in this zone now",
     "Another `place.zone`, a Capacity Block, or wait; it is not your quota"],
    ["`VcpuLimitExceeded`", "It is your quota", "`./money.sh quota`"],
    ["Machines start and do not join", "No way out of their subnet",
     "The NAT gateway of eks_cluster.yaml must be there"],
    ["`AccessDenied` from S3", "The pods' role names other places", "Render with the right `store.root`, then "
     "`eksctl update podidentityassociation -f eks_cluster.yaml`"],
])}

## Files

| File | What |
|---|---|
| [run.toml](run.toml) | the run: the one file to edit |
| [{script}]({script}) | from nothing to a trained model |
| [eks_cluster.yaml](eks_cluster.yaml), [eks_cluster.sh](eks_cluster.sh) | the cluster |
| [storage.sh](storage.sh), [volume.yaml](volume.yaml), [claim.yaml](claim.yaml) | buckets and the file system |
| [data_copy_job.yaml](data_copy_job.yaml) | fills the file system by copying, where an association is not wanted |
| [money.sh](money.sh), [monitoring.sh](monitoring.sh) | quota, budget, alarms |
| [Dockerfile](Dockerfile) | the image |

Read on: [EFA on EKS](https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html),
[FSx for Lustre](https://docs.aws.amazon.com/fsx/latest/LustreGuide/what-is.html),
[Capacity Blocks](https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html).
"""


def _storage_text(job: Job) -> str:
    volume = volume_of(job)
    if volume is None:
        return "The pods read the bucket itself, and keep what they have read on the machines' own disks."
    return f"""\
[storage.sh](storage.sh) makes the bucket and {volume.title}, links
`{data_source(job)}` to it, and gives it to the cluster as a volume. Objects of the bucket appear as files under
`{data_target(job)}` and are fetched when they are first read. How fast it reads follows from how much of it is
bought: 1.2 TiB at 1000 MB/s/TiB read 1.2 GB/s, however the machines are connected. `CAPACITY_GIB=4800 ./storage.sh`
buys more.

A file system is not a must: with `data.path = "s3://…"` and no `place.volume` the pods read the bucket itself and keep
what they have read on the machines' own NVMe disks, which is as fast from the second epoch on."""
