"""A model that stays fresh, as one deployment: a trainer that follows a stream, its publisher, servers, a broker."""

import math

from embark.events.heartbeat import HEARTBEAT
from embark.kubernetes.names import COMPONENT, IDENTITY_ANNOTATIONS
from embark.render.command import SPEC_PATH
from embark.render.folder import File, Files
from embark.render.job import SCRATCH, Job, Setting
from embark.render.pod import (
    CONTAINER,
    config_checksum,
    config_data,
    env_rows,
    pod_values,
    secret_variable,
    storage_settings,
)
from embark.render.serving import (
    GIB,
    NATS_PORT,
    artifact_bytes,
    broker_name,
    disk_gib,
    has_own_broker,
    knows_tables,
    memory_gib,
    published_uri,
)
from embark.render.shell_text import job_text
from embark.render.yaml_text import note, plain
from embark.spec import file_of
from .serve import PROMETHEUS_NAMESPACES, peers, render_serve

FILE, BROKER_FILE, TOPICS_FILE = "follow.yaml", "nats.yaml", "kafka_topics.yaml"
TRAINER, PUBLISHER, BROKER = ({COMPONENT: name} for name in ("trainer", "publisher", "broker"))
NATS_FOLDER, NATS_HEALTH_PORT = "/etc/nats", 8222
NATS_CONFIG = """# beyond these, records are refused, and not dropped before they were trained on
jetstream {{ max_memory_store: 268435456, max_file_store: {max_bytes} }}
authorization {{ token: $NATS_TOKEN }}
"""
STORAGE_CLASSES = {"aws": "embark-gp3", "azure": "managed-csi", "gcp": "standard-rwo"}
"""The StorageClass of the broker's disk in a cluster that the scripts make."""
OPTIONS_FOLDER = "/etc/embark-stream"
PUBLISHER_SPARE_GIB = 2
SILENT_MINUTES = 60  # A trainer or publisher that shows no sign of life for so long hangs; an export may take long.
_ALIVE = f'[ ! -e "${HEARTBEAT}" ] || [ -n "$(find "${HEARTBEAT}" -mmin -{SILENT_MINUTES})" ]'
LIVENESS = {"exec": {"command": ["sh", "-c", _ALIVE]}, "initialDelaySeconds": 300, "periodSeconds": 60,
            "timeoutSeconds": 10, "failureThreshold": 3}


def render_follow(job: Job) -> Files:
    """Write the trainer and its publisher, the servers, and the broker or the settings of Kafka's topics."""
    spec, stream = job.spec, job.spec.stream
    run = f"{spec.store.root.rstrip('/')}/{spec.name}"
    config = config_data(job) | ({file_of(spec.model.kind): spec.model.code} if spec.model.is_custom else {})
    values = pod_values(job)
    if stream.secret:
        values["env"].append(note({"name": "EMBARK_STREAM_OPTIONS", "value": f"{OPTIONS_FOLDER}/options.toml"},
                                  "the broker's credentials and other options of its client"))
    alive = Setting(HEARTBEAT, f"{SCRATCH}/heartbeat", "touched as long as it works; the kubelet looks at its time")
    values["env"] += env_rows([alive])
    follow = ["embark", "follow", SPEC_PATH, *(["--make-streams"] if stream.source == "nats" else [])]
    text = job_text(
        f"kubernetes/{FILE}.j2", job, **values, config=config, command=follow, container=CONTAINER,
        pod_labels={**job.labels, **TRAINER}, publisher_labels={**job.labels, **PUBLISHER},
        publisher_command=["embark", "publish", run, "--watch"], publisher_gib=publisher_memory_gib(job),
        publisher_disk_gib=disk_gib(spec),
        publisher_env=[*env_rows([Setting("OMP_NUM_THREADS", "1", "the gate scores with one thread"),
                                  Setting("HOME", SCRATCH, "versions are fetched to the pod's own disk"), alive]),
                       *plain(env_rows(storage_settings(job)))],
        identity_annotation=IDENTITY_ANNOTATIONS[job.cloud], has_subdomain=False, has_restart_policy=False,
        pod_annotations=config_checksum(config), liveness=LIVENESS, prometheus=list(PROMETHEUS_NAMESPACES[job.cloud]),
        options_folder=OPTIONS_FOLDER, published=published_uri(spec))
    files = [File(FILE, text), *render_serve(job.with_target("serve"))]
    if has_own_broker(job.spec, job.name):
        nats = {"nats.conf": NATS_CONFIG.format(max_bytes=round(0.9 * stream.broker_gib * GIB))}
        files.append(File(BROKER_FILE, job_text(
            f"kubernetes/{BROKER_FILE}.j2", job, broker=broker_name(job.name), labels={**job.labels, **BROKER},
            port=NATS_PORT, health_port=NATS_HEALTH_PORT, size_gib=stream.broker_gib,
            config=nats, config_folder=NATS_FOLDER, pod_annotations=config_checksum(nats), serve=spec.serve,
            env=[secret_variable("NATS_TOKEN", stream.secret, "nats.conf has it; who connects must give it")],
            peers=peers(job), storage_class=storage_class(job))))
    if stream.source == "kafka":
        retention_ms = round(3_600_000 * stream.retention_hours)
        files.append(File(TOPICS_FILE, job_text(
            f"kubernetes/{TOPICS_FILE}.j2", job, topics=stream.topics, retention_ms=retention_ms,
            servers=",".join(stream.servers))))
    return files


def storage_class(job: Job) -> str:
    """Return the StorageClass of the broker's disk; empty: the cluster's default."""
    return job.place.storage_class if job.place.is_existing else STORAGE_CLASSES[job.cloud]


def publisher_memory_gib(job: Job) -> int:
    """Memory to read a checkpoint in float32 and to hold the published version and the next."""
    from embark.plan.serving import table_bytes

    spec = job.spec
    if not knows_tables(spec):
        return 2 * memory_gib(spec) + PUBLISHER_SPARE_GIB
    return math.ceil((table_bytes(spec, "fp32") + 2 * artifact_bytes(spec)) / GIB) + PUBLISHER_SPARE_GIB
