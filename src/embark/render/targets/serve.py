"""An exported model behind `embark serve`: a Deployment, its Service and autoscaler, or KServe's InferenceService."""

import math

from embark.kubernetes.names import COMPONENT, IDENTITY_ANNOTATIONS
from embark.render.folder import File, Files
from embark.render.job import SCRATCH, Job, Setting
from embark.render.monitoring import MONITOR_RESOURCES, PROMETHEUS_RELEASE
from embark.render.pod import (
    config_checksum,
    env_rows,
    identity_label,
    secret_variable,
    storage_settings,
)
from embark.render.serving import (
    artifact_bytes,
    artifact_of,
    disk_gib,
    has_tls,
    knows_tables,
    memory_gib,
    server_name,
    token_secret,
)
from embark.render.shell_text import job_text
from embark.render.yaml_text import note
from embark.spec import DRAIN_S, RunSpec, file_of
from embark.values import JsonDict

FILES = {"serve": "serve.yaml", "kserve": "inference_service.yaml"}
METRICS_FILE = "serve_metrics.yaml"
PORT = 8000
SERVER = {COMPONENT: "serve"}  # A label of the servers alone; pods that train have the others too.
CONTAINER = {"serve": "server", "kserve": "kserve-container"}  # KServe takes its container by that name.
MODEL_FOLDER, TLS_FOLDER = "/etc/embark", "/etc/embark-tls"
TOKEN = "EMBARK_SERVE_TOKEN"
PROMETHEUS_NAMESPACES = {"aws": ("monitoring",), "azure": ("kube-system",), "gcp": ("gmp-system", "gke-gmp-system")}
"""Namespaces of the Prometheus that monitoring.sh installs, or that the cloud runs in its clusters."""
_AWS = "service.beta.kubernetes.io/aws-load-balancer-"
LOAD_BALANCERS: dict[str, dict[str, dict[str, str]]] = {
    "aws": {"internal": {f"{_AWS}type": "nlb", f"{_AWS}internal": "true"}, "public": {f"{_AWS}type": "nlb"}},
    "azure": {"internal": {"service.beta.kubernetes.io/azure-load-balancer-internal": "true"}},
    "gcp": {"internal": {"networking.gke.io/load-balancer-type": "Internal"}}
}
"""Annotations of a Service by which a cloud makes its load balancer, by `serve.expose`."""
PRE_STOP_S = 10  # Seconds until every proxy and load balancer has dropped the pod's address.
SPARE_S = 5
FRESH_POLL_S = 2  # Seconds between polls for a new version of a model that follows a stream.
GRACE_S = PRE_STOP_S + DRAIN_S + SPARE_S
FETCH_BYTES_PER_S = 50e6  # The slowest download from an object store.
TABLE_BYTES = "embark/table-bytes"  # An annotation of the pods; `embark lint` compares the memory limit with it.


def render_serve(job: Job) -> Files:
    """Write one file with all objects, and one for the cluster's Prometheus."""
    from embark.plan.serving import VCPU_TARGET, VCPUS

    spec, serve, target = job.spec, job.spec.serve, job.target
    secret, is_https = token_secret(spec, job.name), has_tls(spec)
    artifact, is_known, num_bytes = artifact_of(spec), knows_tables(spec), artifact_bytes(spec)
    command = ["embark", "serve", artifact, "--host", "0.0.0.0", "--port", str(PORT), "--workers", str(VCPUS)]
    if spec.stream.is_on:
        command += ["--poll-s", str(FRESH_POLL_S)]
    config = {}
    if spec.model.is_custom:
        config = {file_of(spec.model.kind): spec.model.code}
        command += ["--model-file", f"{MODEL_FOLDER}/{file_of(spec.model.kind)}"]
    if is_https:
        command += ["--tls-cert", f"{TLS_FOLDER}/tls.crt", "--tls-key", f"{TLS_FOLDER}/tls.key"]
    environment = env_rows([
        Setting("OMP_NUM_THREADS", "1",
                "of each process: torch would start one for each of the node's processors, and they spin"),
        Setting("HOME", SCRATCH, "the artifact is fetched to the pod's own disk"), *storage_settings(job)])
    if secret:
        environment.append(secret_variable(TOKEN, secret, "requests need it; the probes do not"))
    labels = {**job.labels, **SERVER}
    values = {
        "server": server_name(job.name), "serve": serve, "artifact": artifact, "labels": labels, "command": command,
        "config": config, "env": environment, "resources": resources(spec), "port": PORT,
        "container": CONTAINER[target], "pre_stop_s": PRE_STOP_S, "drain_s": DRAIN_S, "grace_s": GRACE_S,
        "start_s": start_s(num_bytes), "cpu_percent": round(100 * VCPU_TARGET),
        "identity_annotation": IDENTITY_ANNOTATIONS[job.cloud],
        "annotations": ({TABLE_BYTES: str(round(num_bytes))} if is_known else {}) | config_checksum(config),
        "identity": serve.identity or job.place.identity, "identity_label": identity_label(job, serve.identity),
        "model_folder": MODEL_FOLDER, "tls_folder": TLS_FOLDER, "has_tls": is_https, "token_secret": secret,
        "scheme": "https" if is_https else "http", "surge": surge_of(spec), "peers": peers(job),
        "balancer": LOAD_BALANCERS.get(job.cloud, {}).get(serve.expose, {}),
        "monitor_api": MONITOR_RESOURCES[job.cloud].partition(".")[2] + "/v1",
        "monitor_labels": labels | ({"release": PROMETHEUS_RELEASE} if job.cloud == "aws" else {})
    }
    paths = [FILES[target], *([METRICS_FILE] if target == "serve" else [])]
    return [File(path, job_text(f"kubernetes/{path}.j2", job, **values)) for path in paths]


def resources(spec: RunSpec) -> JsonDict:
    """Return what a replica requests, and its limits."""
    from embark.plan.serving import VCPUS

    memory, disk = f"{memory_gib(spec)}Gi", f"{disk_gib(spec)}Gi"
    return {"requests": {"cpu": note(str(VCPUS), "as --workers; a limit would throttle"),
                         "memory": memory, "ephemeral-storage": disk},
            "limits": {"memory": note(memory, "the tables' pages count, though they are mapped from a file"),
                       "ephemeral-storage": disk}}


def peers(job: Job) -> list[str]:
    """Namespaces, beside its own, whose pods may connect to the servers."""
    return [*job.spec.serve.clients, *PROMETHEUS_NAMESPACES.get(job.cloud, ("monitoring",))]


def surge_of(spec: RunSpec) -> int:
    """Replicas that a rollout starts before it ends an old one."""
    surge = spec.serve.max_surge
    return int(spec.serve.min_replicas == 1) if surge is None else surge


def start_s(num_bytes: float) -> int:
    """Return the longest time until a server has fetched its artifact and is ready."""
    return max(120, math.ceil(num_bytes / FETCH_BYTES_PER_S) + 60)
