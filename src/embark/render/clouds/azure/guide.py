"""The guide of examples/cloud_deployment/azure."""

from __future__ import annotations

from embark.render.budgets import budget_usd, needed_units
from embark.render.clouds.azure.cluster import GPU_OPERATOR_VERSION, NETWORK_OPERATOR_VERSION, pool_name
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


def azure_guide(job: Job) -> str:
    site, volume, script = site_of(job), volume_of(job), NAMES["azure"]
    quota = job.machine.quota
    num = job.machine.num_fabric_devices or 0
    per_gpu = (job.machine.fabric_gbit_per_s or 0) / max(1, num)
    return f"""\
# Training on Azure

From an empty subscription to a DLRM with Criteo's terabyte tables on {job.num_nodes} x `{job.machine.name}`:
{job.world_size} GPUs, AKS, InfiniBand between the machines, {volume.title if volume else "Blob Storage"} for the data,
checkpoints in Blob Storage. Every file here was written by `embark render run.toml`; nothing in them needs to be edited
by hand.

```text
 your machine ── embark render ──► files ── {script} ──► AKS
                                                             │
   Blob Storage: checkpoints, curves ◄─────────────── pods, one a machine
                                                             │
   NetApp Files (NFS): data ───────────────────────► {job.num_processes} ranks each, InfiniBand between them
```

## What it costs

{cost_table(job)}

AKS's control plane is free in the free tier; NetApp Files is paid for as long as its pool stands. Nothing here stops by
itself but the GPU machines, which the autoscaler lets go some ten minutes after the last pod: see [Clean
up](#clean-up).

{machines_table(["azure"])}

{prices_note()} InfiniBand is {per_gpu:,.0f} Gbit/s for each GPU, {job.machine.fabric_gbit_per_s or 0:,.0f} for a
machine.

## Before you begin

1. **Tools.** [Azure CLI](https://learn.microsoft.com/cli/azure/install-azure-cli),
   [kubectl](https://kubernetes.io/docs/tasks/tools/), [Helm](https://helm.sh/docs/intro/install/), Docker or another
   builder of images, and Embark:

   ```bash
   pip install 'embark-rec[cloud,columns]'
   ```

2. **Login.** You must be allowed to make resources and to give roles (Owner of the subscription, or Contributor with
   User Access Administrator):

   ```bash
   az login
   az account set --subscription YOUR-SUBSCRIPTION
   az account show --output table
   ```

3. **Quota.** This run needs {needed_units(job)} vCPUs of "{quota.on_demand if quota else ""}" in {site.region}; spot
   counts against "{quota.spot if quota else ""}". A new subscription has none of either. Ask in the portal under
   Quotas, Compute; ND machines often need a support request:

   ```bash
   ./money.sh quota
   az vm list-usage --location {site.region} --output table
   ```

4. **Where the machine is.** Not every zone has it:

   ```bash
   az vm list-skus --location {site.region} --size {site.machine_type} --zone --output table
   ```

5. **A limit on the bill.** A mail at half, four fifths and all of ${budget_usd(job)}:

   ```bash
   az group create --name {site.cluster} --location {site.region}
   EMAIL=you@example.com ./money.sh budget
   ```

## Step 1: your names

A storage account's name is the world's, so take your own: 3 to 24 small letters and digits. Everything else follows
from `run.toml`:

```bash
embark render run.toml --out . \\
  --set place.storage_account=youraccount \\
  --set place.image=yourregistry.azurecr.io/embark:1
embark lint .
```

## Step 2: the image

It holds torch, TorchRec and FBGEMM in versions that go together, and InfiniBand's libraries, without which NCCL falls
back to TCP without a word.

```bash
az group create --name {site.cluster} --location {site.region}
az acr create --name yourregistry --resource-group {site.cluster} --sku Premium
az acr login --name yourregistry
docker build --tag yourregistry.azurecr.io/embark:1 .
docker push yourregistry.azurecr.io/embark:1
```

Docker prints the digest when it has pushed; `--set place.image=…/embark@sha256:…` pins it, so that a restart in a week
runs the same image.

## Step 3: the cluster

```bash
./aks_cluster.sh      # DRY_RUN=1 in front only says what it would do
```

There is no file that is an AKS cluster, so [aks_cluster.sh](aks_cluster.sh) runs the commands, and
[aks_cluster.yaml](aks_cluster.yaml) is what it then applies. In order:

1. the feature `AKSInfinibandSupport`, without which machines of a pool share no InfiniBand fabric (once, some minutes);
2. a proximity placement group in zone {site.zone}, so that the machines stand near each other;
3. the cluster, with two small machines for its own pods, OIDC and workload identity;
4. a pool `{pool_name(job)}` of up to {job.num_nodes} x `{site.machine_type}`, with the taint `nvidia.com/gpu`. GPUs
   in the first pool would run the cluster's own pods and could never scale to zero;
5. NVIDIA's network operator {NETWORK_OPERATOR_VERSION} and a `NicClusterPolicy`: InfiniBand's driver, and a plugin that
   offers `{job.machine.fabric.kubernetes_resource}`;
6. NVIDIA's GPU operator {GPU_OPERATOR_VERSION}: driver, device plugin, GPUDirect RDMA. The pool is made with
   `--gpu-driver None`, so there is one driver and not two;
7. an identity for the pods that may use this run's containers, by workload identity: no key, no secret.

Let the registry be read, and look at what the machines offer:

```bash
az aks update --resource-group {site.cluster} --name {site.cluster} --attach-acr yourregistry
COLUMNS='NAME:.metadata.name,GPUS:.status.allocatable.nvidia\\.com/gpu'
kubectl get nodes --output custom-columns="$COLUMNS,IB:.status.allocatable.rdma/ib"
kubectl get nicclusterpolicy nic-cluster-policy --output jsonpath='{{.status.state}}'
```

Each GPU machine must show {job.num_processes} GPUs and {num} InfiniBand devices, and the policy `ready`. Drivers take
about ten minutes on a new machine.

## Step 4: data

Criteo's terabyte is [on Hugging Face](https://huggingface.co/datasets/criteo/CriteoClickLogs): 24 files, a day each.
The same `run.toml` says what the tables are, so preparing needs only where the files lie and which day is held out:

```bash
./storage.sh
export AZURE_STORAGE_ACCOUNT_NAME=youraccount
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

Without Kubernetes at all: `embark render run.toml --set place.target=vm --set place.volume="" --set data.path=az://…
--out vm` writes `vm.sh`, which starts the machines themselves in one availability set, where they share InfiniBand too.

{watch_section(job, script)} The GPUs' own metrics go to Azure's managed Prometheus:
[dcgm_pod_monitor.yaml](dcgm_pod_monitor.yaml), [alert_rules.json](alert_rules.json).

{spot_section(job)}

Azure tells thirty seconds ahead at least. The pool is made with `--priority Spot --eviction-policy Delete
--spot-max-price -1`: never taken away for its price alone. Its machines carry a taint of their own,
`kubernetes.azure.com/scalesetpriority=spot`, which the pods and both operators then tolerate.

## What the pods are told

{settings_table(job)}

To see that InfiniBand is used, run once with `NCCL_DEBUG=INFO` and look for `NET/IB : Using [0]mlx5_…`; `NET/Socket`
means that it is not.

## Clean up

```bash
./{script} clean      # the job and the GPU machines, which are nearly all of the bill
./{script} destroy    # and the cluster
az netappfiles pool list --resource-group {site.cluster} --account-name embark --output table
```

Storage stays, and is paid for, until you delete it. When nothing of it is wanted any more: `az group delete --name
{site.cluster}` deletes all of it, data and checkpoints included.

## When something is wrong

{trouble_table([
    ["Nodes show no `rdma/ib`", "The network operator is not ready there",
     "`kubectl get pods -n nvidia-network-operator`; the driver's pod is named `mofed-…`"],
    ["Nodes show no `nvidia.com/gpu`", "The GPU operator waits for the InfiniBand driver, or failed",
     "`kubectl get pods -n gpu-operator`"],
    ["`AllocationFailed`, `ZonalAllocationFailed`", "Azure has none free there now",
     "Another `place.zone` or region, or wait; it is not your quota"],
    ["`OperationNotAllowed … quota`", "It is your quota", "`./money.sh quota`"],
    ["`AuthorizationPermissionMismatch` from storage", "The identity has no role on the container yet",
     "Roles take some minutes; then `./aks_cluster.sh` again"],
    ["`ImagePullBackOff`", "The cluster may not read the registry", "`az aks update --attach-acr`"],
])}

## Files

| File | What |
|---|---|
| [run.toml](run.toml) | the run: the one file to edit |
| [{script}]({script}) | from nothing to a trained model |
| [aks_cluster.sh](aks_cluster.sh), [aks_cluster.yaml](aks_cluster.yaml) | the cluster and what it is given |
| [gpu_operator_values.yaml](gpu_operator_values.yaml) | how the GPU operator is installed |
| [network_operator_values.yaml](network_operator_values.yaml) | how the network operator is |
| [storage.sh](storage.sh), [volume.yaml](volume.yaml), [claim.yaml](claim.yaml) | containers and the file system |
| [data_copy_job.yaml](data_copy_job.yaml) | fills the file system from the container |
| [money.sh](money.sh), [budget.json](budget.json), [monitoring.sh](monitoring.sh) | quota, budget, alarms |
| [Dockerfile](Dockerfile) | the image |

Read on: [InfiniBand on AKS](https://learn.microsoft.com/azure/aks/use-infiniband),
[workload identity](https://learn.microsoft.com/azure/aks/workload-identity-overview),
[NetApp Files service levels](https://learn.microsoft.com/azure/azure-netapp-files/azure-netapp-files-service-levels).
"""


def _storage_text(job: Job) -> str:
    volume = volume_of(job)
    if volume is None:
        return "The pods read the container itself, and keep what they have read on the machines' own disks."
    return f"""\
[storage.sh](storage.sh) makes the storage account and its containers, lets you write to them, and makes
{volume.title} in a subnet of its own beside the machines, mounted as a volume. The launch script then copies
`{data_source(job)}` to `{data_target(job)}` once, by
 [data_copy_job.yaml](data_copy_job.yaml). How fast it reads follows from the service level
and from how much is bought: `CAPACITY_GIB=8192 ./storage.sh` buys more of both.

A file system is not a must: with `data.path = "az://…"` and no `place.volume` the pods read the container itself and
keep what they have read on the machines' own NVMe disks, which is as fast from the second epoch on."""
