"""An exported model behind `embark serve` on a managed endpoint: Cloud Run, Vertex AI, SageMaker or Azure ML.

The image starts the server by its environment, since SageMaker and Azure ML take no command for a container.
"""

import hashlib
import json
import math
from typing import Any

from embark.catalog import load_catalog
from embark.render.folder import File
from embark.render.job import Job
from embark.render.pod import storage_settings
from embark.render.serving import artifact_of, cloud_run_gib, endpoint_machine, knows_tables, server_name
from embark.render.shell_text import script_file
from embark.render.targets.serve import TABLE_BYTES, artifact_bytes, disk_gib, start_s
from embark.render.yaml_text import note, yaml_text
from embark.spec.serve import DRAIN_S
from embark.spec.user_code import file_of

PORT = 8080  # The only one on which SageMaker and, by default, Vertex AI and Cloud Run look for a server.
ARTIFACT = "EMBARK_SERVE_ARTIFACT"
READY, LIVE, SCORE = "/v2/health/ready", "/v2/health/live", "/score"
MAX_START_S = 3600  # Of SageMaker, Vertex AI and Azure ML; Cloud Run waits for 240.
_CLOUD_RUN_CPUS = ((4, 1), (8, 2), (16, 4), (24, 6), (32, 8))  # GiB at most, and the CPUs that these need at least.
_AZUREML_SIZES = (("Standard_D", "s_v5", "as_v4"), ("Standard_E", "s_v5", "s_v3"))
"""Of the catalog's machines that managed online endpoints do not have, those of equal size that they have:
https://learn.microsoft.com/azure/machine-learning/reference-managed-online-endpoints-vm-sku-list"""


def render_cloud_run(job: Job) -> list[File]:
    from embark.plan.serving import VCPUS

    spec, gib, num_bytes = job.spec, cloud_run_gib(job.spec), artifact_bytes(job.spec)
    name, where = endpoint_name(job), f"--project={job.place.account} --region={job.location.region}"
    probe = {"httpGet": {"path": READY, "port": PORT}}
    cpus = max(VCPUS, next((least for most, least in _CLOUD_RUN_CPUS if gib <= most), 8))
    revision: dict[str, Any] = {
        "containerConcurrency": note(4 * spec.serve.requests_in_flight,
                                     "requests at once of an instance, at most; from about 60 % of it on, more come"),
        "timeoutSeconds": DRAIN_S,
        **({"serviceAccountName": spec.place.identity} if spec.place.identity else {}),
        "containers": [{
            "image": job.image,
            "ports": [{"name": "http1", "containerPort": PORT}],
            "env": [{"name": key, "value": value} for key, value in environment(job, cpus).items()],
            "resources": {"limits": {"cpu": str(cpus), "memory": note(
                f"{gib}Gi", "the artifact's files count too, and those of a new version beside it")}},
            "startupProbe": note({**probe, "periodSeconds": 10, "timeoutSeconds": 3,
                                  "failureThreshold": min(24, math.ceil(start_s(num_bytes) / 10))},
                                 "it listens once the artifact is fetched and verified and a row was scored"),
            "livenessProbe": {"httpGet": {"path": LIVE, "port": PORT}, "periodSeconds": 10, "timeoutSeconds": 5,
                              "failureThreshold": 6},
        }],
    }
    service = {
        "apiVersion": "serving.knative.dev/v1", "kind": "Service",
        "metadata": {"name": name, "labels": {"embark-run": job.name}, "annotations": {
            "run.googleapis.com/ingress": note("internal", "from your VPC alone; all: from anywhere, with a token")}},
        "spec": {"template": {"metadata": {"annotations": {
            "autoscaling.knative.dev/minScale": note(str(spec.serve.min_replicas), "a first one fetches the tables"),
            "autoscaling.knative.dev/maxScale": str(spec.serve.max_replicas),
            "run.googleapis.com/cpu-throttling": note("false", "it looks for new versions between requests too"),
            "run.googleapis.com/startup-cpu-boost": "true",
            **({TABLE_BYTES: str(round(num_bytes))} if knows_tables(spec) else {}),
        }}, "spec": revision}},
    }
    about = (f"Serves {artifact_of(spec)} on Cloud Run. gcloud run services replace cloud_run.yaml {where}; back to an "
             f"earlier revision: gcloud run services update-traffic {name} --to-revisions=REVISION=100 {where}")
    return [File("cloud_run.yaml", yaml_text([service], about=about))]


def render_vertex_endpoint(job: Job) -> list[File]:
    env = environment(job, machine_vcpus(job))
    return [script_file("vertex_endpoint.sh", "gcp/vertex_endpoint.sh.j2", job, **_values(job, env), ready=READY,
                        score=SCORE, port=PORT, variables="^;^" + ";".join(f"{k}={v}" for k, v in env.items()))]


def render_sagemaker(job: Job) -> list[File]:
    spec, env = job.spec, environment(job, machine_vcpus(job))
    values = _values(job, env)
    model = {"ModelName": values["version"], "ExecutionRoleArn": spec.place.identity,
             "PrimaryContainer": {"Image": job.image, "Environment": env | {"EMBARK_CACHE": "/tmp/embark"}}}
    config = {"EndpointConfigName": values["version"], "ProductionVariants": [{
        "VariantName": "all", "ModelName": values["version"], "InstanceType": f"ml.{values['machine']}",
        "InitialInstanceCount": spec.serve.min_replicas, "InitialVariantWeight": 1.0,
        "VolumeSizeInGB": max(30, disk_gib(artifact_bytes(spec))),
        "ContainerStartupHealthCheckTimeoutInSeconds": values["start_s"],
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}}]}
    scaling = {"TargetValue": float(spec.serve.requests_in_flight), "PredefinedMetricSpecification": {
        "PredefinedMetricType": "SageMakerVariantConcurrentRequestsPerModelHighResolution"},
        "ScaleInCooldown": 300, "ScaleOutCooldown": 30}
    texts = {"sagemaker_model.json": model, "sagemaker_endpoint_config.json": config, "sagemaker_scaling.json": scaling}
    return [*(File(path, f"{json.dumps(value, indent=2)}\n") for path, value in texts.items()),
            script_file("sagemaker.sh", "aws/sagemaker.sh.j2", job, **values)]


def render_azureml(job: Job) -> list[File]:
    env = environment(job, machine_vcpus(job))
    values = _values(job, env, max_name=32)
    version = f"v{values['version'][-8:]}"
    probe = {"period": 10, "timeout": 5, "failure_threshold": 6}
    route = {"port": PORT}
    endpoint = {"$schema": "https://azuremlschemas.azureedge.net/latest/managedOnlineEndpoint.schema.json",
                "name": values["server"], "auth_mode": "key"}
    deployment = {
        "$schema": "https://azuremlschemas.azureedge.net/latest/managedOnlineDeployment.schema.json",
        "name": version, "endpoint_name": values["server"],
        "environment": {"image": job.image, "inference_config": {
            "liveness_route": {**route, "path": LIVE}, "readiness_route": {**route, "path": READY},
            "scoring_route": {**route, "path": SCORE}}},
        "environment_variables": env,
        "instance_type": values["machine"], "instance_count": job.spec.serve.min_replicas,
        "request_settings": {
            "request_timeout_ms": 1000 * DRAIN_S,
            "max_concurrent_requests_per_instance": note(
                4 * job.spec.serve.requests_in_flight, "the default is 1, and what comes beside it waits or gets 429")},
        "liveness_probe": {"initial_delay": note(values["start_s"], "until the artifact is fetched"), **probe},
        "readiness_probe": {**probe, "initial_delay": 10, "failure_threshold": math.ceil(values["start_s"] / 10)},
    }
    return [
        File("azureml_endpoint.yaml", yaml_text([endpoint], about="The endpoint: its name and keys. See azureml.sh.")),
        File("azureml_deployment.yaml", yaml_text(
            [deployment], about=f"Serves {artifact_of(job.spec)} on Azure ML. azureml.sh deploy creates it.")),
        script_file("azureml.sh", "azure/azureml.sh.j2", job, **{**values, "version": version},
                    registry=job.image.partition(".azurecr.io/")[0] if ".azurecr.io/" in job.image else ""),
    ]


def machine_vcpus(job: Job) -> int:
    """Of the machine that is a replica's own."""
    return int(load_catalog().cpu_machines[endpoint_machine(job.spec, job.cloud)].vcpus)


def environment(job: Job, num_workers: int) -> dict[str, str]:
    """By which the image's server starts, and finds what it serves."""
    model = job.spec.model
    own = {"EMBARK_SERVE_MODEL_FILE": file_of(model.kind)} if model.is_own else {}
    return {ARTIFACT: artifact_of(job.spec), "EMBARK_SERVE_HOST": "0.0.0.0",
            "EMBARK_SERVE_PORT": str(PORT), "EMBARK_SERVE_WORKERS": str(num_workers), "OMP_NUM_THREADS": "1", **own,
            **{name: value for name, value, _ in storage_settings(job)}}


def endpoint_name(job: Job, max_name: int = 63) -> str:
    return server_name(job.name[:max_name - len(server_name(""))].rstrip("-"))


def _values(job: Job, env: dict[str, str], *, max_name: int = 63) -> dict[str, Any]:
    """What scripts share. What a version is made of cannot be changed in place, so its name changes with it."""
    from embark.plan.serving import VCPU_TARGET

    spec, server = job.spec, endpoint_name(job, max_name)
    machine = endpoint_machine(spec, job.cloud)
    if job.cloud == "azure":
        for begins, ends, known in _AZUREML_SIZES:
            if machine.startswith(begins) and machine.endswith(ends):
                machine = machine.removesuffix(ends) + known
    content = json.dumps([job.image, env, machine, spec.serve.model_dump(mode="json"), spec.place.identity])
    return {
        "server": server, "version": f"{server}-{hashlib.sha256(content.encode()).hexdigest()[:8]}",
        "artifact": artifact_of(spec), "machine": machine, "serve": spec.serve,
        "start_s": min(MAX_START_S, start_s(artifact_bytes(spec))),
        "cpu_percent": round(100 * VCPU_TARGET),
    }
