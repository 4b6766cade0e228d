"""Parts that the guides of all clouds share: tables made of the catalog, and what is the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from embark.catalog import Machine, cheapest, load_catalog
from embark.render.job import Job
from embark.render.location import price_of, site_of
from embark.render.run_metrics import DASHBOARD, OBJECTS, is_scraped
from embark.render.settings import grace_s, settings_of

SHOWN = {
    "aws": ("g6.12xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge"),
    "azure": ("Standard_NC24ads_A100_v4", "Standard_ND96asr_v4", "Standard_ND96amsr_A100_v4",
              "Standard_ND96isr_H100_v5", "Standard_ND96isr_H200_v5"),
    "gcp": ("g2-standard-48", "a2-highgpu-8g", "a2-ultragpu-8g", "a3-highgpu-8g", "a3-megagpu-8g", "a3-ultragpu-8g"),
}
"""Machines for the guides' tables; the catalog has more."""
TARGET_ROWS = (
    ("kubernetes_job.yaml", "An indexed Job with a headless Service: Kubernetes alone",
     "kubectl apply -f kubernetes_job.yaml"),
    ("jobset.yaml", "JobSet: the same, and the whole set starts again together", "kubectl apply -f jobset.yaml"),
    ("trainjob.yaml", "Kubeflow Trainer v2", "kubectl apply -f trainjob.yaml"),
    ("pytorchjob.yaml", "Kubeflow's training operator v1", "kubectl apply -f pytorchjob.yaml"),
    ("rayjob.yaml", "KubeRay: a Ray cluster for this run alone", "kubectl apply -f rayjob.yaml"),
    ("cloud_component.py", "TorchX, on a cluster with Volcano",
     "torchx run --workspace '' -s kubernetes -cfg queue=default,namespace=embark cloud_component.py:train"),
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def dollars(value: float | None) -> str:
    return "?" if value is None else f"${value:,.2f}"


def machine_row(machine: Machine) -> list[str]:
    price = cheapest(load_catalog().prices_of(machine))
    speed = "" if machine.fabric_gbit_per_s is None else f"{machine.fabric_gbit_per_s:,.0f} Gbit/s "
    cost = "?" if price is None else (f"{dollars(price.on_demand_usd_per_hour)} / {dollars(price.spot_usd_per_hour)} "
                                     f"({price.region})")
    return [f"`{machine.name}`", f"{machine.num_gpus} x {machine.gpu.name}", f"{machine.gpu.memory_gib:.0f} GiB",
            f"{machine.vcpus or 0:.0f}", f"{machine.memory_gib or 0:,.0f} GiB", f"{speed}{machine.fabric.title}", cost]


def machines_table(clouds: Sequence[str]) -> str:
    machines = load_catalog().machines
    rows = [machine_row(machines[name]) for cloud in clouds for name in SHOWN[cloud] if name in machines]
    head = ["Machine", "GPUs", "Memory each", "vCPUs", "RAM", "Between machines", "On demand / spot an hour"]
    return table(head, rows)


def prices_note() -> str:
    dates = sorted({price.origin.date for price in load_catalog().prices.values()})
    return (f"Prices are of the catalog that comes with Embark ({dates[0]}), each in the region where the machine is\n"
            "cheapest. They move: `embark catalog show MACHINE` lists every region, `embark catalog refresh FILE`\n"
            "takes newer ones in.")


def cost_table(job: Job) -> str:
    """What so many machines cost, in the job's region."""
    price = price_of(job)
    if price is None:
        return "The catalog has no price of this machine."
    rows = []
    for num in sorted({1, 2, 4, job.num_nodes}):
        on_demand, spot = price.on_demand_usd_per_hour, price.spot_usd_per_hour
        costs = [dollars(None if each is None else num * each) for each in (on_demand, spot)]
        rows.append([str(num), str(num * job.num_processes), *costs])
    saving = f" Spot takes off {price.spot_saving:.0%} here." if price.spot_saving is not None else ""
    return (table([f"{job.machine.name} in {site_of(job).region}", "GPUs", "on demand an hour", "spot an hour"], rows)
            + f"\n\nAs of {price.origin.date}.{saving}")


def settings_table(job: Job) -> str:
    rows = [[f"`{s.name}={s.value}`", s.why] for s in settings_of(job)]
    return table(["Setting", "Why"], rows)


def targets_section(job: Job) -> str:
    return f"""\
The launch script uses a plain Kubernetes Job{_queue_words(job)}.
The same run for other ways to start it lies beside it. Each of them runs {job.num_processes} processes on each of
{job.num_nodes} machines and ends with the same exit codes: 0 done, 64 the spec or the data is wrong, 75 preempted and
saved, 70 a fault that a retry may cure.

{table(["File", "What it is", "Start it"], [[f"[{f}]({f})", what, f"`{start}`"] for f, what, start in TARGET_ROWS])}

What each of them needs in the cluster is installed by `{_cluster_script(job)}` when `place.target` names it in
`run.toml`. Change a number in one place only: `embark render run.toml --set place.nodes=4 --out .` changes all that
depend on it, in every file; a job that is told 4 in one line and 2 in another waits for ever."""


def spot_section(job: Job) -> str:
    return f"""\
## Spot machines

```bash
embark render run.toml --set place.spot=true --out .
```

Spot machines are the same machines at a lower price, and can be taken back. Embark is told, saves what it has, exits
with 75 and is started again: the Job's failure policy does not count that as a failure, and the new pods go on from
the last checkpoint. Here a pod has {grace_s(job)} seconds on demand to save; on spot, what the cloud gives. If a
checkpoint takes longer, the last one that was committed counts: never more than `store.checkpoint_every` steps are
trained again."""


def watch_section(job: Job, script: str) -> str:
    return f"""\
## Watch it

```bash
./{script} status   # the job, its pods, and what the cluster warns of
./{script} logs     # every pod's log, each line with its pod's name
embark data copy {job.spec.store.root}/{job.spec.name}/tensorboard curves && tensorboard --logdir curves
```

`kubectl logs job/{job.name}` alone follows one pod of {job.num_nodes}. A pod that stays `Pending` says why in
`status`: most often no machine could be had, or a taint is not tolerated.

`EMAIL=you@example.com ./monitoring.sh` sets up the cloud's own alarms: GPUs that stand idle for half an hour, and
machines that are dead.{_metrics_words(job)}"""


def _metrics_words(job: Job) -> str:
    if not is_scraped(job):
        return ""
    return f"""

It also hands the cluster's Prometheus [{OBJECTS}]({OBJECTS}): rank 0 answers on port
{job.spec.watch.prometheus_port} with loss, AUC, rate, every rank's step time, where a step's time goes, GPUs, memory,
network, disks and checkpoints, and rules say when someone should look. [{DASHBOARD}]({DASHBOARD})
shows all of it in Grafana."""


def trouble_table(rows: Sequence[Sequence[str]]) -> str:
    everywhere = [
        ["Every pod ends at once with code 64", "The spec or the data is wrong; the log's last lines name the field",
         "Correct `run.toml`, render, start again. Retrying changes nothing"],
        ["Pods wait for each other and nothing happens", "One of them is not scheduled, or has another idea of how "
         "many there are", "`status` shows the one that waits; render all files from one spec"],
        ["`CUDA out of memory`", "Tables, activations or both do not fit", "`embark plan run.toml` says what fits: "
         "more machines, `train.table_dtype = \"fp16\"`, or a smaller batch. Gradient checkpointing does not help "
         "tables"],
        ["A collective timed out", "A rank died, or the fabric is not what NCCL thinks", "Look for the first rank that "
         "stopped; `NCCL_DEBUG=INFO` says which network was chosen"],
        ["Slow steps, idle GPUs", "The data does not come fast enough", "`embark data check`; read from a bucket in "
         "the same region, or give the run a volume"],
    ]
    return table(["What you see", "Why", "What to do"], [*rows, *everywhere])


def _queue_words(job: Job) -> str:
    is_queued = bool(job.spec.place.queue)
    return ", which Kueue lets start when there is room for all of its pods and not before" if is_queued else ""


def _cluster_script(job: Job) -> str:
    from embark.render.launch_script import CLUSTER_SCRIPTS

    return CLUSTER_SCRIPTS[job.cloud]
