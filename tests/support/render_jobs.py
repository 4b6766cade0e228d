"""Jobs for the tests of rendering, by a machine and a few words."""

from __future__ import annotations

from typing import Any

import yaml

from embark.catalog import load_catalog
from embark.render.job import Job, make_job
from embark.spec import RunSpec
from embark.spec.data import DataSpec
from embark.spec.place import PlaceSpec
from embark.spec.run import StoreSpec
from embark.spec.train import TrainSpec

ROOTS = {"aws": "s3://training/runs", "azure": "az://training/runs", "gcp": "gs://training/runs"}
MACHINES = (
    "p4d.24xlarge", "p5.48xlarge", "g5.xlarge", "Standard_ND96asr_v4", "Standard_NC24ads_A100_v4", "a2-highgpu-8g",
    "a3-highgpu-8g", "a3-megagpu-8g", "a3-ultragpu-8g", "n1-standard-8+1xT4",
)
VOLUMES = {
    "aws": ("fsx-lustre-250", "fsx-lustre-scratch-2"),
    "azure": ("azure-netapp-premium", "azure-managed-lustre-250"),
    "gcp": ("filestore-zonal", "filestore-regional", "managed-lustre-500"),
}


def documents_of(text: str) -> list[Any]:
    """By the loader in C: the one in Python took as long as all of the rendering."""
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))


def job_of(machine: str, *, nodes: int | dict[str, int] = 2, root: str = "", data: str = "", name: str = "dlrm",
           **place: Any) -> Job:
    catalog = load_catalog()
    cloud = next(m.cloud for m in catalog.machines.values() if machine in (m.name, *m.also))
    if cloud == "azure":
        place.setdefault("storage_account", "trainingaccount")
    if place.get("volume"):
        data = data or "/mnt/data/criteo"
    spec = RunSpec(
        name=name,
        data=DataSpec(kind="prepared", path=data) if data else DataSpec(),
        train=TrainSpec(batch_size=13_440),
        place=PlaceSpec(machine=machine, nodes=nodes, **place),
        store=StoreSpec(root=root or ROOTS[cloud]),
    )
    return make_job(spec, catalog)
