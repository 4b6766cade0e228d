"""Writes examples/cloud_deployment: one rendered run for each cloud, the quickstart, and their guides.

`make examples` runs it; the guides are the templates beside it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from embark import __version__
from embark.catalog import Machine, load_catalog, lowest_price
from embark.formatting import format_usd
from embark.lint.rendered import render_folder
from embark.render.clouds.azure import pool_name
from embark.render.folder import SPEC, File
from embark.render.folder_spec import spec_text
from embark.render.job import POD_TARGETS, Job, default_image, make_job
from embark.render.monitoring import DASHBOARD, OBJECTS, budget_usd, needed_units, quota_of
from embark.render.serving import artifact_bytes, disk_gib, export_bytes, memory_gib, node_disk_gib
from embark.render.settings import grace_s, settings_of
from embark.render.shell_text import LOGINS
from embark.render.targets.kubernetes import CLUSTER_SCRIPTS, NAMES, PLACEHOLDER_REGISTRY
from embark.render.targets.serve import start_s
from embark.render.targets.tpu_vm import RUNTIME_VERSIONS
from embark.render.volumes import data_target, volume_text
from embark.render.wheel import FOLDER as WHEEL_FOLDER
from embark.render.yaml_text import header
from embark.spec import PRESETS, RunSpec
from embark.stack.versions import default_triple
from embark.store import write_atomic

TEMPLATES = Path(__file__).parent / "templates"
TREE = Path(__file__).parent / "cloud_deployment"
SCRIPT = "train_torchrec_quickstart.py"
PLACES = {
    "aws": {"machine": "p4d.24xlarge", "region": "us-west-2", "zone": "us-west-2b", "volume": "fsx-lustre-1000"},
    "azure": {"machine": "Standard_ND96asr_v4", "region": "eastus", "zone": "1", "volume": "azure-netapp-ultra",
              "storage_account": "embarkexample"},
    "gcp": {"machine": "a2-highgpu-8g", "region": "us-central1", "zone": "us-central1-a", "volume": "filestore-zonal"},
}
ROOTS = {"aws": "s3://embark-example/runs", "azure": "az://embark-example/runs", "gcp": "gs://embark-example/runs"}
TITLES = {"aws": ("AWS", "EKS"), "azure": ("Azure", "AKS"), "gcp": ("Google Cloud", "GKE")}
SERVERS = {"aws": "r7i.2xlarge", "azure": "Standard_E8s_v5", "gcp": "n2-highmem-8"}
LARGER_GIB = {"aws": 4800, "azure": 20480, "gcp": 10240}
"""Capacities of file systems above those that are rendered."""
METRICS_PORT = 9464
"""The default of OpenTelemetry's exporters for Prometheus."""
SHOWN = {
    "aws": ("g6.12xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge"),
    "azure": ("Standard_NC24ads_A100_v4", "Standard_ND96asr_v4", "Standard_ND96amsr_A100_v4",
              "Standard_ND96isr_H100_v5", "Standard_ND96isr_H200_v5"),
    "gcp": ("g2-standard-48", "a2-highgpu-8g", "a2-ultragpu-8g", "a3-highgpu-8g", "a3-megagpu-8g", "a3-ultragpu-8g"),
}
"""Machines of the guides' tables; the catalog has more."""


def example_tree() -> list[File]:
    """Every file that is committed, by its path below `examples/cloud_deployment`: not Embark's wheel."""
    with tempfile.TemporaryDirectory() as folder:
        write_examples(Path(folder))
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.suffix != ".whl")
        return [File(path.relative_to(folder).as_posix(), path.read_text(), is_executable=os.access(path, os.X_OK))
                for path in paths]


def write_examples(tree: Path) -> None:
    """Guides, specs, and what `embark render run.toml` makes of each of them."""
    jobs = {cloud: cloud_job(cloud) for cloud in PLACES}
    write_atomic(tree / "README.md", guide("root", cloud_rows="\n".join(cloud_row(*pair) for pair in jobs.items())))
    for cloud, job in jobs.items():
        write_atomic(tree / cloud / "README.md", cloud_guide(job))
        _render(tree / cloud, job.spec)
    quickstart = tree / "quickstart"
    write_atomic(quickstart / "README.md", guide("quickstart", job=quickstart_job()))
    write_atomic(quickstart / SCRIPT, quickstart_script())
    write_atomic(quickstart / "requirements.txt", requirements())
    _render(quickstart, quickstart_job().spec)


def _render(folder: Path, spec: RunSpec) -> None:
    write_atomic(folder / SPEC, spec_text(spec))
    render_folder(str(folder / SPEC), out=folder, force=True)


def cloud_job(cloud: str) -> Job:
    """DLRM with Criteo's terabyte tables on two machines with eight GPUs each."""
    place = {"nodes": 2, "queue": "embark", "image": f"{PLACEHOLDER_REGISTRY}{default_image()}", **PLACES[cloud],
             "render_targets": POD_TARGETS}
    data = {"kind": "prepared", "path": "/mnt/data/criteo-1tb", "num_train_samples": 4_195_197_692,
            "num_eval_samples": 178_274_637}  # Criteo's days 0 to 22, and day 23.
    return _job("criteo-1tb", name="dlrm", place=place, data=data, store={"root": ROOTS[cloud]},
                serve={"tables": "int8"}, watch={"prometheus_port": METRICS_PORT})


def quickstart_job() -> Job:
    """For a cluster that exists; the other clouds differ in `place.cloud` and `store.root` only."""
    place = {"cloud": "aws", "nodes": 2, "image": f"{PLACEHOLDER_REGISTRY}{default_image()}", "image_files": [SCRIPT],
             "cluster": "existing"}
    return _job("quickstart", name="torchrec-quickstart", place=place, store={"root": ROOTS["aws"]})


def requirements() -> str:
    """The matched versions, for pip."""
    words = [word for words in default_triple().pip_arguments("cuda") for word in words if word != "install"]
    about = "Matching versions of torch, torchrec and fbgemm; other combinations do not work."
    wheel = ["# embark render packs Embark's own wheel.", f"--find-links {WHEEL_FOLDER}", f"embark-rec=={__version__}"]
    return header(about) + "\n".join([*words, *wheel]) + "\n"


def quickstart_script() -> str:
    return (TEMPLATES / SCRIPT).read_text(encoding="utf-8")


def cloud_guide(job: Job) -> str:
    location, num_devices = job.location, job.machine.num_fabric_devices or 0
    registries = {"aws": f"123456789012.dkr.ecr.{location.region}.amazonaws.com", "azure": "yourregistry.azurecr.io",
                  "gcp": f"{location.region}-docker.pkg.dev/your-project/embark"}
    bucket = {"aws": "s3://$BUCKET", "gcp": "gs://$BUCKET"}.get(job.cloud)
    return guide(
        job.cloud, job=job, location=location, volume=job.volume, volume_text=volume_text(job),
        script=NAMES[job.cloud], quota=quota_of(job),
        cluster_script=CLUSTER_SCRIPTS[job.cloud], registry=registries[job.cloud], num=num_devices,
        per_gpu=(job.machine.fabric_gbit_per_s or 0) / max(1, num_devices), needed_units=needed_units(job),
        budget_usd=budget_usd(job), data_source=job.data_source, data_target=data_target(job), grace_s=grace_s(job),
        cost_table=cost_table(job), pool_name=pool_name(job), runtime_versions=RUNTIME_VERSIONS,
        versions=load_catalog().versions,
        metrics_file=OBJECTS, dashboard_file=DASHBOARD, **serving(job),
        runs=f"{bucket}/runs" if bucket else job.spec.store.root,
        bucket_data=f"{bucket}/data/criteo-1tb" if bucket else job.data_source,
        login=LOGINS[job.cloud]["fix"].partition(",")[0], larger_gib=LARGER_GIB[job.cloud],
        settings_table=table(["Setting", "Why"], [[f"`{s.name}={s.value}`", s.why] for s in settings_of(job)]))


def serving(job: Job) -> dict[str, Any]:
    """Of the chapter on serving: machines without accelerators with room for a replica, as a pool of the cluster."""
    location, machine, disk = job.location, SERVERS[job.cloud], node_disk_gib(job.spec)
    where = {"aws": f"--cluster {location.cluster} --region {location.region} --name serve",
             "azure": f"--resource-group {location.cluster} --cluster-name {location.cluster} --name serve",
             "gcp": f"serve --cluster={location.cluster} --location={location.region}"}[job.cloud]
    create, delete = {
        "aws": (f"eksctl create nodegroup {where} \\\n  --node-type {machine} --nodes 2 --node-volume-size {disk} "
                "--node-private-networking",
                f"eksctl delete nodegroup {where} --wait"),
        "azure": (f"az aks nodepool add {where} \\\n  --node-vm-size {machine} --node-osdisk-size {disk} "
                  "--node-count 2",
                  f"az aks nodepool delete {where}"),
        "gcp": (f"gcloud container node-pools create {where} \\\n  --node-locations={location.zone} "
                f"--machine-type={machine} --disk-size={disk} --num-nodes=2 --workload-metadata=GKE_METADATA",
                f"gcloud container node-pools delete {where} --quiet"),
    }[job.cloud]
    # Room for every replica, and for one more while a rollout replaces them.
    most = job.spec.serve.max_replicas + 1
    create += {"aws": f" \\\n  --nodes-min 2 --nodes-max {most}",
               "azure": f" \\\n  --enable-cluster-autoscaler --min-count 2 --max-count {most}",
               "gcp": f" \\\n  --enable-autoscaling --total-min-nodes=2 --total-max-nodes={most} "
                      "--location-policy=ANY"}[job.cloud]
    image = {"azure": "$REGISTRY.azurecr.io/embark:serve", "aws": "$REGISTRY/embark:serve",
             "gcp": '"$REGISTRY/embark:serve"'}[job.cloud]
    return {"serve_machine": machine, "serve_gib": memory_gib(job.spec), "serve_image": image, "serve_pool": create,
            "serve_pool_deletion": delete, "serve_max_nodes": most, "serve_disk_gib": disk_gib(job.spec),
            "node_disk_gib": disk, "version_gb": round(artifact_bytes(job.spec) / 1e9),
            "export_gb": round(export_bytes(job.spec) / 1e9), "export_wait_s": 2 * start_s(export_bytes(job.spec))}


def guide(name: str, **values: Any) -> str:
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, autoescape=False)
    dates = sorted({price.origin.date for price in load_catalog().prices.values()})
    note = (f"Prices are from Embark's catalog ({dates[0]}), each in the region where the machine type is cheapest.\n"
            "They change: `embark catalog show MACHINE` lists every region, `embark catalog refresh FILE` imports\n"
            "newer prices.")
    template = environment.get_template(f"{name}.md.j2")
    return template.render(machines_table=machines_table, prices_note=note, **values) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def machines_table(clouds: Sequence[str]) -> str:
    machines = load_catalog().machines
    rows = [machine_row(machines[name]) for cloud in clouds for name in SHOWN[cloud] if name in machines]
    head = ["Machine", "GPUs", "Memory each", "vCPUs", "RAM", "Between machines", "On demand / spot an hour"]
    return table(head, rows)


def machine_row(machine: Machine) -> list[str]:
    price = lowest_price(load_catalog(), machine, "on_demand")
    speed = "" if machine.fabric_gbit_per_s is None else f"{machine.fabric_gbit_per_s:,.0f} Gbit/s "
    rates = [] if price is None else [price.on_demand_usd_per_hour, price.spot_usd_per_hour]
    cost = "?" if price is None else f"{' / '.join(map(format_usd, rates))} ({price.region})"
    return [f"`{machine.name}`", f"{machine.num_gpus} x {machine.gpu.name}", f"{machine.gpu.memory_gib:.0f} GiB",
            f"{machine.vcpus or 0:.0f}", f"{machine.memory_gib or 0:,.0f} GiB", f"{speed}{machine.fabric.title}", cost]


def cost_table(job: Job) -> str:
    """Prices of several numbers of machines, in the job's region."""
    price = load_catalog().prices.get((job.machine.name, job.price.region))
    if price is None:
        return "The catalog has no price for this machine."
    rows = []
    for num in sorted({1, 2, 4, job.num_nodes}):
        costs = [format_usd(None if each is None else num * each)
                 for each in (price.on_demand_usd_per_hour, price.spot_usd_per_hour)]
        rows.append([str(num), str(num * job.num_processes), *costs])
    saving = f" Spot saves {price.spot_saving:.0%} here." if price.spot_saving is not None else ""
    head = [f"{job.machine.name} in {job.location.region}", "GPUs", "on demand an hour", "spot an hour"]
    return (table(head, rows) + f"\n\nAs of {price.origin.date}.{saving}")


def cloud_row(cloud: str, job: Job) -> str:
    (title, cluster), volume = TITLES[cloud], job.volume
    cells = [f"[{title}]({cloud}/README.md)", cluster,
             f"{job.num_nodes} x `{job.machine.name}`, {job.world_size} GPUs", job.machine.fabric.title,
             volume.title if volume else "object store", f"{format_usd(job.usd_per_hour)} ({job.location.region})"]
    return "| " + " | ".join(cells) + " |"


def _job(preset: str, *, name: str, **sections: Mapping[str, object]) -> Job:
    return make_job(_with(PRESETS[preset]().model_copy(update={"name": name}), **sections), load_catalog())


def _with(spec: RunSpec, **sections: Mapping[str, object]) -> RunSpec:
    """A copy with some fields of some sections set, checked like one that a user wrote."""
    values = spec.model_dump(exclude_unset=True)
    for section, fields in sections.items():
        values[section] = {**values.get(section, {}), **fields}
    return RunSpec.model_validate(values)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TREE
    write_examples(target)
