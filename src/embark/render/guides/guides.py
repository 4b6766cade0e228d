"""The guides of examples/cloud_deployment. What is a number or a name in them comes from the job and the catalog."""

from __future__ import annotations

from collections.abc import Mapping

from embark.render.clouds.aws.guide import aws_guide
from embark.render.clouds.azure.guide import azure_guide
from embark.render.clouds.gcp.guide import gcp_guide
from embark.render.file import File
from embark.render.guides.parts import machines_table, prices_note, table
from embark.render.guides.quickstart import quickstart_guide
from embark.render.job import Job
from embark.render.location import site_of, usd_per_hour
from embark.render.volumes import volume_of


def render_guides(jobs: Mapping[str, Job], quickstart: Job) -> list[File]:
    """`README.md` at the root, of the quickstart, and of each cloud. `jobs` are by cloud."""
    return [
        File("README.md", root_guide(jobs)),
        File("quickstart/README.md", quickstart_guide(quickstart)),
        File("aws/README.md", aws_guide(jobs["aws"])),
        File("azure/README.md", azure_guide(jobs["azure"])),
        File("gcp/README.md", gcp_guide(jobs["gcp"])),
    ]


def root_guide(jobs: Mapping[str, Job]) -> str:
    titles = {"aws": "AWS", "azure": "Azure", "gcp": "Google Cloud"}
    clusters = {"aws": "EKS", "azure": "AKS", "gcp": "GKE"}
    rows = []
    for cloud, job in jobs.items():
        rate, volume = usd_per_hour(job), volume_of(job)
        rows.append([f"[{titles[cloud]}]({cloud}/README.md)", clusters[cloud],
                     f"{job.num_nodes} x `{job.machine.name}`, {job.world_size} GPUs", job.machine.fabric.title,
                     volume.title if volume else "object store",
                     "?" if rate is None else f"${rate:,.2f} ({site_of(job).region})"])
    return f"""\
# TorchRec in the cloud

Recommendation models on TorchRec, on AWS, Azure and Google Cloud: from one machine to many, on Kubernetes, Kubeflow,
Ray, TorchX, Vertex AI, plain machines and TPUs. Everything in these folders but the guides' prose is written by
`embark render` from one small file, `run.toml`, and compared with a fresh render whenever the project is tested.

**New here?** [The quickstart](quickstart/README.md) trains in minutes, on a laptop too.

```bash
pip install -r quickstart/requirements.txt && python quickstart/train_torchrec_quickstart.py
```

## Choose a cloud

{table(["Guide", "Cluster", "Machines", "Between them", "Data", "On demand an hour"], rows)}

Each guide starts from an empty account and ends with what to delete. They train the same model from the same spec; what
differs between the folders is what differs between the clouds.

{machines_table(["aws", "azure", "gcp"])}

{prices_note()}

How to choose: the tables must fit into all GPUs' memory together, with room for activations; then what counts is how
fast the machines reach each other, for every step exchanges rows between all of them. `embark plan run.toml` says for
each machine of the catalog what fits, how long it takes and what it costs.

## How it goes

```text
 1. spec        run.toml: model, data, machines                        you write this
 2. render      manifests, cluster, storage, image, scripts            embark render run.toml --out .
 3. lint        mistakes that validate and yet hang or train nothing   embark lint .
 4. launch      tools, quota, cluster, storage, job, logs              ./train_dlrm_….sh
 5. watch       curves, alarms, a bill that does not surprise          tensorboard, monitoring.sh, money.sh
 6. clean up    the machines first                                     ./train_dlrm_….sh clean
```

## What is where

```text
cloud_deployment/
├── README.md
├── quickstart/   one script, one image, one manifest
├── aws/          EKS, EFA, FSx for Lustre, EC2
├── azure/        AKS, InfiniBand, NetApp Files, virtual machines
└── gcp/          GKE, Filestore and Lustre, Vertex AI, Compute Engine, TPUs
```

In each cloud's folder:

| File | What |
|---|---|
| `run.toml` | the run: the one file to edit |
| `train_dlrm_….sh` | from nothing to a trained model, and back |
| `…_cluster.yaml`, `…_cluster.sh` | the cluster |
| `kubernetes_job.yaml`, `jobset.yaml`, `trainjob.yaml`, `pytorchjob.yaml` | the same job for each way to start it |
| `rayjob.yaml`, `cloud_component.py` | and for Ray and TorchX |
| `storage.sh`, `volume.yaml`, `claim.yaml`, `data_copy_job.yaml` | where the data lies and how it comes there |
| `money.sh`, `monitoring.sh` | quotas, budget alerts, alarms |
| `Dockerfile` | the image |

## Where data and checkpoints lie

| | raw and prepared data | for reading at full speed | checkpoints and curves |
|---|---|---|---|
| AWS | S3 | S3 with the machines' own disks as cache, or FSx for Lustre | S3 |
| Azure | Blob Storage | Blob Storage with the machines' own disks as cache, or NetApp Files | Blob Storage |
| Google Cloud | Cloud Storage | Cloud Storage with the machines' own disks as cache, Filestore or Managed Lustre | \
Cloud Storage |

A file system reads as fast as the TiB that are paid for: `embark catalog volumes --tib 10` says how fast that is.
Embark reads object stores itself and keeps what it has read on local disks, so a file system is a choice and not a
need.

## What makes a run survive

- **Checkpoints are whole or not there.** Each rank writes its shards; the file that names them all comes last. A run
  that is killed at any moment goes on from the last one, at another number of machines too.
- **A notice is used.** On spot machines Embark hears that one will be taken back, saves, and exits with 75; the failure
  policy starts it again without counting a failure. A wrong spec exits with 64 and is not tried again.
- **One number of machines.** `place.nodes` is the only place where it stands.
"""
