"""The guide of examples/cloud_deployment/gcp."""

from __future__ import annotations

from embark.render.budgets import budget_usd, needed_units
from embark.render.guides.parts import (
    cost_table,
    machines_table,
    prices_note,
    settings_table,
    spot_section,
    table,
    targets_section,
    trouble_table,
    watch_section,
)
from embark.render.job import Job
from embark.render.launch_script import NAMES
from embark.render.location import data_source, site_of
from embark.render.targets.tpu_vm import RUNTIME_VERSIONS
from embark.render.volumes import data_target, volume_of


def gcp_guide(job: Job) -> str:
    site, volume, script = site_of(job), volume_of(job), NAMES["gcp"]
    quota = job.machine.quota
    registry = f"{site.region}-docker.pkg.dev/your-project/embark"
    return f"""\
# Training on Google Cloud

From an empty project to a DLRM with Criteo's terabyte tables on {job.num_nodes} x `{job.machine.name}`:
{job.world_size} GPUs, GKE, {volume.title if volume else "Cloud Storage"} for the data, checkpoints in Cloud Storage.
Every file here was written by `embark render run.toml`; nothing in them needs to be edited by hand.

```text
 your machine ── embark render ──► files ── {script} ──► GKE   (or Vertex AI, plain machines, TPUs)
                                                           │
   Cloud Storage: checkpoints, curves ◄──────────── pods, one a machine
                                                           │
   Filestore: data ────────────────────────► {job.num_processes} ranks each, {job.machine.fabric.title} between them
```

## What it costs

{cost_table(job)}

The control plane is $0.10 an hour more. The GPU machines go by themselves some ten minutes after the last pod;
Filestore is paid for as long as it stands: see [Clean up](#clean-up).

{machines_table(["gcp"])}

{prices_note()} An `a2-highgpu-8g` has 680 GB of memory and no GPUDirect; A3 High has GPUDirect-TCPX, A3 Mega TCPXO, A3
Ultra and A4 RDMA, and `gke_cluster.sh` makes the networks that each of them needs.

## Before you begin

1. **Tools.** [Google Cloud CLI](https://cloud.google.com/sdk/docs/install) (it is not on PyPI),
   [kubectl](https://kubernetes.io/docs/tasks/tools/), [Helm](https://helm.sh/docs/intro/install/), Docker or another
   builder of images, and Embark:

   ```bash
   gcloud components install gke-gcloud-auth-plugin kubectl
   pip install 'embark-rec[cloud,columns]'
   ```

2. **Login.** A project with billing, and roles to make clusters, networks and storage in it:

   ```bash
   gcloud auth login
   gcloud auth application-default login
   export PROJECT=your-project
   gcloud config set project "$PROJECT"
   ```

3. **Quota.** GPUs are counted by region, and once more over all regions; not by zone. This run needs
   {needed_units(job)} of `{quota.on_demand if quota else ""}` in {site.region} (spot:
   `{quota.spot if quota else ""}`) and
   {needed_units(job)} of `GPUS_ALL_REGIONS`. A new project has none. Ask in the console under IAM, Quotas:

   ```bash
   ./money.sh quota
   ```

4. **A limit on the bill.** A mail at half, four fifths and all of ${budget_usd(job)}:

   ```bash
   ./money.sh budget
   ```

## Step 1: your names

A bucket's name is the world's, so take your own. Everything else follows from `run.toml`:

```bash
embark render run.toml --out . \\
  --set store.root=gs://YOUR-BUCKET/runs \\
  --set place.image={registry}/embark:1
embark lint .
```

## Step 2: the image

It holds torch, TorchRec and FBGEMM in versions that go together. The fabric's libraries come from the machine.

```bash
gcloud services enable artifactregistry.googleapis.com
gcloud artifacts repositories create embark --repository-format=docker --location={site.region}
gcloud auth configure-docker {site.region}-docker.pkg.dev
docker build --tag {registry}/embark:1 .
docker push {registry}/embark:1
```

Docker prints the digest when it has pushed; `--set place.image=…/embark@sha256:…` pins it, so that a restart in a week
runs the same image.

## Step 3: the cluster

```bash
./gke_cluster.sh      # DRY_RUN=1 in front only says what it would do
```

There is no file that is a GKE cluster, so [gke_cluster.sh](gke_cluster.sh) runs the commands, and
[gke_cluster.yaml](gke_cluster.yaml) is what it then applies. What older guides get wrong, and how it is here:

- a regional cluster with `--num-nodes 2` has two machines *in each zone*, six in all: here `--node-locations` names one
  zone, `{site.zone}`, and {job.num_nodes} means {job.num_nodes};
- drivers come with `gpu-driver-version=latest`, not from a DaemonSet;
- `--spot`, not `--preemptible`, which ends after 24 hours whatever happens;
- the pool scales from 0 to {job.num_nodes}, so an idle cluster costs its two small machines.

```bash
kubectl get nodes --label-columns cloud.google.com/gke-accelerator,topology.kubernetes.io/zone
kubectl get nodes --output custom-columns='NAME:.metadata.name,GPUS:.status.allocatable.nvidia\\.com/gpu'
```

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

### Vertex AI

No cluster to keep: Vertex AI starts the machines, runs the image and ends them. You need `roles/aiplatform.user` and a
bucket for its staging; the files are written with your project in them:

```bash
embark render run.toml --set place.target=vertex --set place.account="$PROJECT" --set place.volume="" \\
  --set data.path=gs://YOUR-BUCKET/data/criteo-1tb --out vertex
vertex/vertex_job.sh          # or: python vertex/vertex_job.py
```

### Plain machines

```bash
embark render run.toml --set place.target=vm --set place.volume="" \\
  --set data.path=gs://YOUR-BUCKET/data/criteo-1tb --out vm
vm/vm.sh up && vm/vm.sh logs 0
```

### TPUs

TorchRec has no kernels for TPUs; Embark's trainer for them is JAX. A slice is asked for and waited for:

```bash
embark render run.toml --set place.machine=v5e-16 --set place.nodes=1 --set place.target=tpu-vm --set place.volume="" \\
  --set data.path=gs://YOUR-BUCKET/data/criteo-1tb --out tpu
tpu/tpu_vm.sh up && tpu/tpu_vm.sh logs 0
```

{table(["TPU", "System of its hosts"], [[f"`{name}`", f"`{version}`"] for name, version in RUNTIME_VERSIONS.items()])}

{watch_section(job, script)}

{spot_section(job)}

GKE gives the pods of a spot machine 15 seconds unless its pool is told to give more, whatever the pod asks for.
Checkpoints on the way, not at the end, are what counts here. Commitments for one or three years are cheaper than on
demand and are not taken away: `embark catalog show {job.machine.name}`.

## What the pods are told

{settings_table(job)}

What is *not* set is as deliberate: `NCCL_NET_GDR_LEVEL=0` would switch off the very path that TCPX is, and
`NCCL_IB_DISABLE=1` the one of A3 Ultra and A4.

## Clean up

```bash
./{script} clean      # the job and the GPU machines, which are nearly all of the bill
./{script} destroy    # and the cluster
gcloud filestore instances list
```

Filestore and the bucket stay, and are paid for, until you delete them: `gcloud filestore instances delete
{job.claim_name} --location={site.zone}`, `gcloud storage rm --recursive gs://YOUR-BUCKET`.

## When something is wrong

{trouble_table([
    ["`GCE_STOCKOUT`, `ZONE_RESOURCE_POOL_EXHAUSTED`", "Google has none free there now", "Another `place.zone`, spot, "
     "or wait; it is not your quota"],
    ["`QUOTA_EXCEEDED`", "It is your quota, of the region or over all regions", "`./money.sh quota`"],
    ["Nodes show no `nvidia.com/gpu`", "The driver is being installed, or failed",
     "`kubectl get pods -n kube-system -l k8s-app=nvidia-gpu-device-plugin`"],
    ["`403` from Cloud Storage", "The pods' service account has no role on the bucket yet", "`./gke_cluster.sh` again; "
     "roles take some minutes"],
    ["Pods of A3 wait for a network", "A `Network` object is missing", "`kubectl get networks.networking.gke.io`; "
     "`kubectl apply -f gke_cluster.yaml`"],
])}

## Files

| File | What |
|---|---|
| [run.toml](run.toml) | the run: the one file to edit |
| [{script}]({script}) | from nothing to a trained model |
| [gke_cluster.sh](gke_cluster.sh), [gke_cluster.yaml](gke_cluster.yaml) | networks, cluster, machines |
| [storage.sh](storage.sh), [volume.yaml](volume.yaml), [claim.yaml](claim.yaml) | buckets and the file system |
| [data_copy_job.yaml](data_copy_job.yaml) | fills the file system from the bucket |
| [money.sh](money.sh), [monitoring.sh](monitoring.sh), [idle_gpus.json](idle_gpus.json) | quota, budget, alarms |
| [Dockerfile](Dockerfile) | the image |

Read on: [GPUs on GKE](https://cloud.google.com/kubernetes-engine/docs/how-to/gpus),
[GPUDirect on GKE](https://cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx),
[Vertex AI custom training](https://cloud.google.com/vertex-ai/docs/training/overview).
"""


def _storage_text(job: Job) -> str:
    volume = volume_of(job)
    if volume is None:
        return "The pods read the bucket itself, and keep what they have read on the machines' own disks."
    return f"""\
[storage.sh](storage.sh) makes the bucket and {volume.title}, and gives it to the cluster as a volume. The launch script
then copies `{data_source(job)}` to `{data_target(job)}` once, by
[data_copy_job.yaml](data_copy_job.yaml). How fast it reads follows from how much is bought, by far not
10 GB/s for 10 TiB: `embark catalog volumes --tib 10`.
`CAPACITY_GIB=10240 ./storage.sh` buys more; `--set place.volume=managed-lustre-1000` is the fast one.

A file system is not a must: with `data.path = "gs://…"` and no `place.volume` the pods read the bucket itself and keep
what they have read on the machines' own disks, which is as fast from the second epoch on."""
