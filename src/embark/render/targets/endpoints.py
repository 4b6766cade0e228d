"""An exported model behind `embark serve` on a managed endpoint: Cloud Run, Vertex AI, SageMaker or Azure ML.

The image starts the server by its environment, since SageMaker and Azure ML take no command for a container.
"""

import hashlib
import json
from collections.abc import Sequence

from embark.catalog import load_catalog
from embark.kubernetes.names import MAX_LABEL
from embark.render.folder import File, Files
from embark.render.job import Job
from embark.render.pod import storage_settings
from embark.render.serving import (
    artifact_bytes,
    artifact_of,
    cloud_run_gib,
    disk_gib,
    endpoint_machine,
    knows_tables,
    server_name,
)
from embark.render.shell_text import job_text
from embark.spec import DRAIN_S, file_of
from embark.values import JsonDict
from .serve import TABLE_BYTES, start_s
from .vm_node import acr_name

PORT = 8080  # SageMaker and, by default, Vertex AI and Cloud Run look for a server on this port only.
ARTIFACT = "EMBARK_SERVE_ARTIFACT"
READY, LIVE, SCORE = "/v2/health/ready", "/v2/health/live", "/score"
MAX_START_S = 3600  # The most that SageMaker, Vertex AI and Azure ML wait; Cloud Run waits for 240.
_CLOUD_RUN_CPUS = ((4, 1), (8, 2), (16, 4), (24, 6), (32, 8))  # Memory in GiB, and the least CPUs for it.
_AZUREML_SIZES = (("Standard_D", "s_v5", "as_v4"), ("Standard_E", "s_v5", "s_v3"))
"""Machines of the catalog that managed online endpoints lack, and those of equal size that they have:
https://learn.microsoft.com/azure/machine-learning/reference-managed-online-endpoints-vm-sku-list"""


def render_cloud_run(job: Job) -> Files:
    from embark.plan.serving import VCPUS

    gib = cloud_run_gib(job.spec)
    cpus = max(VCPUS, next((least for most, least in _CLOUD_RUN_CPUS if gib <= most), 8))
    return _files(job, "gcp", ["cloud_run.yaml"], {**_values(job, cpus), "gib": gib, "cpus": cpus})


def render_vertex_endpoint(job: Job) -> Files:
    values = _values(job, machine_vcpus(job))
    variables = ";".join(f"{name}={value}" for name, value in values["env"].items())
    return _files(job, "gcp", ["vertex_endpoint.sh"], {**values, "variables": f"^;^{variables}"})


def render_sagemaker(job: Job) -> Files:
    names = ("sagemaker_model.json", "sagemaker_endpoint_config.json", "sagemaker_scaling.json", "sagemaker.sh")
    return _files(job, "aws", names, _values(job, machine_vcpus(job)))


def render_azureml(job: Job) -> Files:
    values = _values(job, machine_vcpus(job), max_name=32)
    values |= {"version": f"v{values['version'][-8:]}", "registry": acr_name(job.image)}
    return _files(job, "azure", ("azureml_endpoint.yaml", "azureml_deployment.yaml", "azureml.sh"), values)


def _files(job: Job, folder: str, names: Sequence[str], values: JsonDict) -> Files:
    return [File(name, job_text(f"{folder}/{name}.j2", job, **values), is_executable=name.endswith(".sh"))
            for name in names]


def machine_vcpus(job: Job) -> int:
    """Return the processors of the machine that one replica has for itself."""
    return int(load_catalog().cpu_machines[endpoint_machine(job.spec, job.cloud)].vcpus)


def _price(job: Job, machine: str, listed: str) -> str:
    """Say what an hour of the machines costs; `listed` is the machine of equal size in the catalog."""
    serve = job.spec.serve
    price = load_catalog().prices.get((listed, job.location.region))
    each = "which the catalog has no price for there" if price is None or price.on_demand_usd_per_hour is None else \
        f"{price.on_demand_usd_per_hour:,.2f} USD an hour each as a plain {listed} ({price.origin.date})"
    return f"{serve.min_replicas} to {serve.max_replicas} x {machine} in {job.location.region}, {each}. " \
           "What the service itself charges is extra. They are paid until they are deleted."


def environment(job: Job, num_workers: int) -> dict[str, str]:
    """Return variables by which the image's server starts, and finds what it serves."""
    model = job.spec.model
    own = {"EMBARK_SERVE_MODEL_FILE": file_of(model.kind)} if model.is_custom else {}
    return {ARTIFACT: artifact_of(job.spec), "EMBARK_SERVE_HOST": "0.0.0.0",
            "EMBARK_SERVE_PORT": str(PORT), "EMBARK_SERVE_WORKERS": str(num_workers), "OMP_NUM_THREADS": "1", **own,
            **{name: value for name, value, _ in storage_settings(job)}}


def _values(job: Job, num_workers: int, *, max_name: int = MAX_LABEL) -> JsonDict:
    """Return values that the files share. A version cannot be changed in place, so its name changes with its
    content."""
    from embark.plan.serving import VCPU_TARGET

    spec, env, num_bytes = job.spec, environment(job, num_workers), artifact_bytes(job.spec)
    server = server_name(job.name[:max_name - len(server_name(""))].rstrip("-"))
    machine = listed = "" if job.target == "cloud-run" else endpoint_machine(spec, job.cloud)
    if job.cloud == "azure":
        for begins, ends, known in _AZUREML_SIZES:
            if machine.startswith(begins) and machine.endswith(ends):
                machine = machine.removesuffix(ends) + known
    content = json.dumps([job.image, env, machine, spec.serve.model_dump(mode="json"), spec.place.identity])
    return {
        "server": server, "version": f"{server}-{hashlib.sha256(content.encode()).hexdigest()[:8]}", "env": env,
        "artifact": artifact_of(spec), "machine": machine, "serve": spec.serve, "port": PORT, "ready": READY,
        "live": LIVE, "score": SCORE, "drain_s": DRAIN_S, "start_s": min(MAX_START_S, start_s(num_bytes)),
        "disk_gib": disk_gib(spec), "price": _price(job, machine, listed), "cpu_percent": round(100 * VCPU_TARGET),
        "annotations": {TABLE_BYTES: str(round(num_bytes))} if knows_tables(spec) else {}
    }
