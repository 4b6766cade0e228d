"""An exported model behind `embark serve`: a Deployment, its Service and autoscaler, or KServe's InferenceService."""

import math

from embark.kubernetes.names import COMPONENT, IDENTITY_ANNOTATIONS
from embark.render.folder import File
from embark.render.job import Job, Setting
from embark.render.pod import IDENTITY_LABEL, SCRATCH, USER_ID, env_rows, has_identity_label, storage_settings
from embark.render.serving import artifact_bytes, artifact_of, disk_gib, knows_tables, memory_gib, server_name
from embark.render.shell_text import job_text
from embark.render.yaml_text import note
from embark.spec.serve import DRAIN_S
from embark.spec.user_code import file_of

FILES = {"serve": "serve.yaml", "kserve": "inference_service.yaml"}
PORT = 8000
SERVER = {COMPONENT: "serve"}  # A label of the servers alone; pods that train have the others too.
CONTAINER = {"serve": "server", "kserve": "kserve-container"}  # KServe takes its container by that name.
MODEL_FOLDER = "/etc/embark"
PRE_STOP_S = 10  # Seconds until every proxy and load balancer has dropped the pod's address.
SPARE_S = 5
FRESH_POLL_S = 2  # Seconds between polls for a new version of a model that follows a stream.
GRACE_S = PRE_STOP_S + DRAIN_S + SPARE_S
FETCH_BYTES_PER_S = 50e6  # The slowest download from an object store.
TABLE_BYTES = "embark/table-bytes"  # An annotation of the pods; `embark lint` compares the memory limit with it.


def render_serve(job: Job) -> list[File]:
    """Write one file with all objects."""
    from embark.plan.serving import VCPU_TARGET, VCPUS

    spec, target = job.spec, job.target
    artifact, is_known, num_bytes = artifact_of(spec), knows_tables(spec), artifact_bytes(spec)
    command = ["embark", "serve", artifact, "--host", "0.0.0.0", "--port", str(PORT), "--workers", str(VCPUS)]
    if spec.stream.is_on:
        command += ["--poll-s", str(FRESH_POLL_S)]
    config = {}
    if spec.model.is_custom:
        config = {file_of(spec.model.kind): spec.model.code}
        command += ["--model-file", f"{MODEL_FOLDER}/{file_of(spec.model.kind)}"]
    environment = env_rows([
        Setting("OMP_NUM_THREADS", "1",
                "of each process: torch would start one for each of the node's processors, and they spin"),
        Setting("HOME", SCRATCH, "the artifact is fetched to the pod's own disk"), *storage_settings(job)])
    memory = f"{memory_gib(spec)}Gi"
    disk = f"{disk_gib(spec)}Gi"
    resources = {"requests": {"cpu": note(str(VCPUS), "as --workers; a limit would throttle"),
                              "memory": memory, "ephemeral-storage": disk},
                 "limits": {"memory": note(memory, "the tables' pages count, though they are mapped from a file"),
                            "ephemeral-storage": disk}}
    return [File(FILES[target], job_text(
        f"kubernetes/{FILES[target]}.j2", job, server=server_name(job.name), serve=spec.serve, artifact=artifact,
        labels={**job.labels, **SERVER}, command=command, config=config, env=environment,
        resources=resources, port=PORT, container=CONTAINER[target], pre_stop_s=PRE_STOP_S, drain_s=DRAIN_S,
        grace_s=GRACE_S, start_s=start_s(num_bytes),
        cpu_percent=round(100 * VCPU_TARGET),
        annotations={TABLE_BYTES: str(round(num_bytes))} if is_known else {},
        identity_annotation=IDENTITY_ANNOTATIONS[job.cloud],
        identity_label=IDENTITY_LABEL if has_identity_label(job) else {}, user=USER_ID, scratch=SCRATCH,
        model_folder=MODEL_FOLDER))]


def start_s(num_bytes: float) -> int:
    """Return the longest time until a server has fetched its artifact and is ready."""
    return max(120, math.ceil(num_bytes / FETCH_BYTES_PER_S) + 60)
