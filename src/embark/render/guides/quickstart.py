"""The guide of examples/cloud_deployment/quickstart."""

from __future__ import annotations

from embark.render.guides.parts import table
from embark.render.job import Job

FIRST_NUMBERS = (
    ["one H200", "39 million samples/s at batch 65,536, 12 million at 2,048"],
    ["two cores of a Xeon", "1.8 times TorchRec at its best on the same cores"],
)
"""Measured; docs/engines.md and bench/RESULTS.md of the project say how."""


def quickstart_guide(job: Job) -> str:
    return f"""\
# Quickstart: from nothing to an AUC

A DLRM with the shape of Criteo's click logs (13 dense features, 26 tables of 100,000 rows), on samples that are drawn
from a hidden model: nothing to download, and something to learn. The same on a laptop, on one GPU, on many, and in a
cluster.

| File | What |
|---|---|
| [train_torchrec_quickstart.py](train_torchrec_quickstart.py) | a script with the flags of TorchRec's own |
| [requirements.txt](requirements.txt) | versions that go together |
| [Dockerfile](Dockerfile), [entrypoint.sh](entrypoint.sh) | the image |
| [kubernetes_job.yaml](kubernetes_job.yaml) | {job.num_nodes} x {job.num_processes} GPUs, on EKS; others below |

## 1. Here

torch, torchrec and fbgemm go in matched threes; any other mix fails at import with an error that names none of them.

```bash
python3 -m venv .venv && . .venv/bin/activate
pip install -r requirements.txt                      # with an NVIDIA GPU
python train_torchrec_quickstart.py
```

Without a GPU, TorchRec goes in by itself, for it asks for the CUDA build of FBGEMM by name:

```bash
grep -v '^torchrec\\|^fbgemm' requirements.txt >cpu.txt
pip install -r cpu.txt fbgemm-gpu-cpu==1.8.0 && pip install --no-deps torchrec==1.8.0
python train_torchrec_quickstart.py --num_batches_per_epoch 100
```

On Windows and macOS, use the container: FBGEMM has no wheels for them.

## 2. On all GPUs of this machine

```bash
torchrun --nproc_per_node=4 train_torchrec_quickstart.py
```

`--batch_size` is that of all ranks together, so the losses do not depend on how many there are. It saves into
`--checkpoint_path`, at the end or every `--checkpoint_interval` steps, and a run that was stopped goes on from there,
at any number of ranks.

## 3. In a container

```bash
docker build --tag embark-quickstart .
docker run --rm --gpus all --shm-size 8g embark-quickstart                                    # embark train quickstart
docker run --rm --gpus all --shm-size 8g embark-quickstart train_torchrec_quickstart.py       # the script
docker run --rm --gpus all --shm-size 8g embark-quickstart \\
  torchrun --nproc_per_node=4 train_torchrec_quickstart.py --batch_size 8192
```

The container's user is not root. Without a GPU:
`docker build --build-arg BASE=python:3.12-slim --build-arg VARIANT=cpu …`.

## 4. On Kubernetes

The manifest is for one kind of machine, since what a pod must ask for differs between clouds: the fabric, the taints,
the labels, what is left of the memory. Write the one for yours from the same spec:

```bash
embark init quickstart
embark render quickstart.toml --set place.cloud=aws   --set place.nodes=2 --set store.root=s3://YOUR-BUCKET/runs \\
  --set place.image=registry.example.com/embark:1 --out .
embark render quickstart.toml --set place.cloud=azure --set place.nodes=2 --set store.root=az://CONTAINER/runs \\
  --set place.storage_account=youraccount --set place.image=registry.example.com/embark:1 --out .
embark render quickstart.toml --set place.cloud=gcp   --set place.nodes=2 --set store.root=gs://YOUR-BUCKET/runs \\
  --set place.image=registry.example.com/embark:1 --out .
embark lint kubernetes_job.yaml
kubectl apply -f kubernetes_job.yaml
kubectl logs --namespace {job.namespace} --selector app.kubernetes.io/instance={job.name} \\
  --follow --prefix --max-log-requests 20
```

To have four machines, set `place.nodes=4` and render again: `parallelism`, `completions`, `--nnodes` and the rest are
one number. A cluster, step by step: [AWS](../aws/README.md), [Azure](../azure/README.md), [Google
Cloud](../gcp/README.md).

## Change it

```bash
python train_torchrec_quickstart.py --batch_size 4096 --embedding_dim 256 --num_epochs 10 --learning_rate 0.02
```

The bottom network's last layer follows `--embedding_dim`; the learning rate reaches the tables and the dense layers
alike. Your own data: `--dataset_path clicks.parquet` with columns `label`, `dense_0` … and `cat_0` …; or let
`embark data prepare` turn CSV, Parquet and Criteo's files, words and all, into what Embark trains from.

## How fast

The script is stock TorchRec. `embark train quickstart` trains the same model:

{table(["On", "Embark"], FIRST_NUMBERS)}

`embark bench quickstart` measures both side by side on the machine you have.

## When something is wrong

{table(["What you see", "Why", "What to do"], [
    ["`undefined symbol` when fbgemm is imported", "torch and fbgemm do not match",
     "`pip install -r requirements.txt` in a fresh environment; `embark doctor` names what differs"],
    ["`CUDA out of memory`", "The batch or the tables are too large",
     "`--batch_size 512`, or a smaller `--embedding_dim`"],
    ["It hangs at the start", "A rank is missing", "Start all with one `torchrun`; over machines, one rendezvous "
     "endpoint that all can reach"],
    ["Pods stay `Pending`", "No machine with a free GPU, or its taint is not tolerated",
     f"`kubectl describe pod --namespace {job.namespace} --selector app.kubernetes.io/instance={job.name}`"],
])}
"""
