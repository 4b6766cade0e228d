"""A model that stays fresh, as one deployment: a trainer that follows a stream, its publisher, servers, a broker."""

import math

from embark.kubernetes.names import COMPONENT, IDENTITY_ANNOTATIONS
from embark.render.command import SPEC_PATH
from embark.render.folder import File
from embark.render.job import Job, Setting
from embark.render.pod import CONTAINER, SCRATCH, USER_ID, config_data, env_rows, pod_values, storage_settings
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
from embark.render.targets.serve import render_serve
from embark.render.yaml_text import note, plain
from embark.spec.user_code import file_of

FILE, BROKER_FILE, TOPICS_FILE = "follow.yaml", "nats.yaml", "kafka_topics.yaml"
TRAINER, PUBLISHER, BROKER = ({COMPONENT: name} for name in ("trainer", "publisher", "broker"))
NATS_IMAGE = "nats:2.14.0-alpine"
OPTIONS_FOLDER = "/etc/embark-stream"
PUBLISHER_SPARE_GIB = 2


def render_follow(job: Job) -> list[File]:
    """Write the trainer and its publisher, the servers, and the broker or the settings of Kafka's topics."""
    spec, stream = job.spec, job.spec.stream
    run = f"{spec.store.root.rstrip('/')}/{spec.name}"
    config = config_data(job) | ({file_of(spec.model.kind): spec.model.code} if spec.model.is_custom else {})
    values = pod_values(job)
    if stream.secret:
        values["env"].append(note({"name": "EMBARK_STREAM_OPTIONS", "value": f"{OPTIONS_FOLDER}/options.toml"},
                                  "the broker's credentials and other options of its client"))
    follow = ["embark", "follow", SPEC_PATH, *(["--make-streams"] if stream.source == "nats" else [])]
    text = job_text(
        f"kubernetes/{FILE}.j2", job, **values, config=config, command=follow, container=CONTAINER,
        pod_labels={**job.labels, **TRAINER}, publisher_labels={**job.labels, **PUBLISHER},
        publisher_command=["embark", "publish", run, "--watch"], publisher_gib=publisher_memory_gib(job),
        publisher_disk_gib=disk_gib(spec),
        publisher_env=[*env_rows([Setting("OMP_NUM_THREADS", "1", "the gate scores with one thread"),
                                  Setting("HOME", SCRATCH, "versions are fetched to the pod's own disk")]),
                       *plain(env_rows(storage_settings(job)))],
        identity_annotation=IDENTITY_ANNOTATIONS[job.cloud], has_subdomain=False, has_restart_policy=False,
        options_folder=OPTIONS_FOLDER, published=published_uri(spec))
    files = [File(FILE, text), *render_serve(job.with_target("serve"))]
    if has_own_broker(job.spec, job.name):
        files.append(File(BROKER_FILE, job_text(
            f"kubernetes/{BROKER_FILE}.j2", job, broker=broker_name(job.name), labels={**job.labels, **BROKER},
            port=NATS_PORT, image=NATS_IMAGE, user=USER_ID, size_gib=stream.broker_gib)))
    if stream.source == "kafka":
        retention_ms = round(3_600_000 * stream.retention_hours)
        files.append(File(TOPICS_FILE, job_text(
            f"kubernetes/{TOPICS_FILE}.j2", job, topics=stream.topics, retention_ms=retention_ms,
            servers=",".join(stream.servers))))
    return files


def publisher_memory_gib(job: Job) -> int:
    """Memory to read a checkpoint in float32 and to hold the published version and the next."""
    from embark.plan.serving import table_bytes

    spec = job.spec
    if not knows_tables(spec):
        return 2 * memory_gib(spec) + PUBLISHER_SPARE_GIB
    return math.ceil((table_bytes(spec, "fp32") + 2 * artifact_bytes(spec)) / GIB) + PUBLISHER_SPARE_GIB
