"""What a spec says of serving and of following a stream: the artifact, a replica's memory, the broker, and what cannot
be deployed."""

import math
from typing import get_args

from embark.catalog import Catalog
from embark.errors import Mistake, Mistakes, nearest
from embark.spec import RunSpec
from embark.spec.place import ServeTarget
from embark.store.checkpoint_interval import MAX_EVERY_S

SERVE_TARGETS: tuple[str, ...] = get_args(ServeTarget)
GIB = 2**30
_CLOUDS = {"s3": "aws", "az": "azure", "gs": "gcp"}
ENDPOINTS = {"cloud-run": "gcp", "vertex-endpoint": "gcp", "sagemaker": "aws", "azureml": "azure"}
"""Managed endpoints, and whose they are."""
MAX_CLOUD_RUN_GIB = 32
IMAGE_GIB = 20  # Disk for the image and the system's own pods.
EXPORT_GIB = 4  # Memory of an export whose id maps are not known.
NATS_PORT = 4222
AWAY_S = 3600.0  # Seconds until a lost trainer runs again, on a machine that is bought for it.
MIN_RETENTION_S = MAX_EVERY_S + AWAY_S
"""The least retention of records: `store.checkpoint_every = "auto"` saves at least once in `MAX_EVERY_S`."""


def artifact_of(spec: RunSpec) -> str:
    if spec.serve.artifact:
        return spec.serve.artifact
    return published_uri(spec) if spec.stream.is_on else f"{spec.store.root}/{spec.name}/export"


def published_uri(spec: RunSpec) -> str:
    """Return where `embark publish` writes versions of the run."""
    return spec.publish.to.rstrip("/") or f"{spec.store.root.rstrip('/')}/{spec.name}/export"


def server_name(name: str) -> str:
    """Return the name of what serves a run's model: on Kubernetes, on an endpoint, in the registry of launches."""
    return f"{name}-serve"


def token_secret(spec: RunSpec, name: str) -> str:
    """Return the name of the Secret with the token of requests; empty if the servers ask for none."""
    return f"{server_name(name)}-token" if spec.serve.auth == "token" else ""


def secret_commands(spec: RunSpec, name: str) -> dict[str, str]:
    """Return the Secrets that the pods of a deployment read, each with the command that creates it."""
    place, stream, token = spec.place, spec.stream, '--from-literal=token="$TOKEN"'
    options = {token_secret(spec, name): token}
    if place.target == "follow":
        options[stream.secret] = f'{token} --from-literal=options.toml="token = \\"$TOKEN\\""' \
            if has_own_broker(spec, name) else "--from-file=options.toml"
    commands = {secret: f'TOKEN="$(openssl rand -hex 32)"; kubectl create secret generic {secret} --namespace '
                f"{place.namespace} {words}" for secret, words in options.items() if secret}
    if has_tls(spec):
        commands[spec.serve.tls_secret] = f"kubectl create secret tls {spec.serve.tls_secret} --namespace " \
            f"{place.namespace} --cert=server.pem --key=server.key"
    return commands


def has_tls(spec: RunSpec) -> bool:
    """Return whether the servers speak HTTPS. On Knative and on managed endpoints something before them does."""
    return bool(spec.serve.tls_secret) and spec.place.target in ("serve", "follow")


def serve_mistakes(spec: RunSpec, catalog: Catalog, cloud: str) -> Mistakes:
    """Yield the mistakes that keep a server from being deployed."""
    artifact, serve = artifact_of(spec), spec.serve
    if serve.expose and (not has_tls(spec) or serve.auth != "token"):
        yield Mistake("", "serve.expose", serve.expose, "requests and their token would pass in plain text, or anyone "
                      "might ask", 'set serve.tls_secret and leave serve.auth = "token"; place.target "serve" or '
                      '"follow" has it')
    if serve.expose == "internal" and not cloud:
        yield Mistake("", "serve.expose", serve.expose, "which cloud's load balancer it is, is not known",
                      'set place.cloud, or "public" where the cluster decides')
    if "://" not in artifact:
        yield Mistake("", "serve.artifact", artifact, "is on this machine; pods do not see it",
                      "embark export RUN --to s3://BUCKET/NAME, and set it to that place; embark serve serves it here")
    if spec.serve.memory_gib is None and not knows_tables(spec):
        yield Mistake("", "serve.memory_gib", "", f"{spec.data.path} cannot be read from here, so the tables' size is "
                      "not known", "set it, or render where the data is")
    if spec.serve.machine and spec.serve.machine not in catalog.cpu_machines:
        yield Mistake("", "serve.machine", spec.serve.machine, "the catalog has no such machine without accelerators",
                      nearest(spec.serve.machine, catalog.cpu_machines))
    elif spec.serve.machine and spec.place.target != "cloud-run":
        room = catalog.cpu_machines[spec.serve.machine].allocatable_gib
        if memory_gib(spec) > room:
            yield Mistake("", "serve.machine", spec.serve.machine,
                          f"a replica needs {memory_gib(spec)} GiB, and pods have {room:,.1f} of it",
                          "embark plan SPEC --serve shows machines with room")


def endpoint_mistakes(spec: RunSpec, cloud: str) -> Mistakes:
    """Yield the settings that a managed endpoint lacks; `cloud` is the one that the spec is for."""
    target, place = spec.place.target, spec.place
    if target not in ENDPOINTS:
        return
    if cloud != ENDPOINTS[target]:
        yield Mistake("", "place.target", target, f"belongs to {ENDPOINTS[target]}, and the spec is for {cloud}",
                      f'set place.cloud = "{ENDPOINTS[target]}" and serve.artifact to an object store of it')
    if target == "sagemaker" and not place.identity:
        yield Mistake("", "place.identity", "", "SageMaker starts the server as a role, which reads the artifact",
                      "set it to the role's ARN; SageMaker must be allowed to assume it")
    if ENDPOINTS[target] == "gcp" and not place.account:
        yield Mistake("", "place.account", "", "the endpoint needs a Google Cloud project",
                      "set it to the project's id")
    if knows_tables(spec) or spec.serve.memory_gib is not None:
        if target == "cloud-run" and cloud_run_gib(spec) > MAX_CLOUD_RUN_GIB:
            yield Mistake("", "place.target", target, f"an instance needs {cloud_run_gib(spec)} GiB, and has at most "
                          f"{MAX_CLOUD_RUN_GIB}: the artifact's files count as its memory, those of a new version too",
                          'serve.tables = "int8" is smaller; vertex-endpoint and serve have no such limit')
        elif target != "cloud-run" and cloud == ENDPOINTS[target] and not endpoint_machine(spec, cloud):
            yield Mistake("", "serve.machine", "", f"no machine of {cloud} has {memory_gib(spec)} GiB for a replica",
                          'serve.tables = "int8" is smaller')


def endpoint_machine(spec: RunSpec, cloud: str) -> str:
    """Return the machine of a managed endpoint: the named one, or the cheapest with the memory; empty if none has
    it."""
    from embark.plan.serving import ServeRequest, offers_for

    if spec.serve.machine:
        return spec.serve.machine
    offers = offers_for(1, memory_gib(spec) * GIB, ServeRequest(qps=1, p99_ms=10, cloud=cloud))
    return next((offer.machine for offer in offers if offer.replicas_per_machine), "")


def cloud_run_gib(spec: RunSpec) -> int:
    """Memory of an instance of Cloud Run, whose disk is memory: the files of all versions, which are mapped from
    there."""
    from embark.plan.serving import measured_cost, versions_bytes

    if spec.serve.memory_gib is not None:
        return math.ceil(spec.serve.memory_gib)
    return math.ceil((versions_bytes(artifact_bytes(spec)) + measured_cost().process_bytes) / GIB)


def artifact_bytes(spec: RunSpec) -> float:
    """Return the size of a full version; where the tables are not known, the memory that the spec gives a replica."""
    from embark.plan.serving import version_bytes

    return version_bytes(spec, spec.serve.tables) if knows_tables(spec) else memory_gib(spec) * GIB


def disk_gib(spec: RunSpec) -> int:
    """Disk for the versions that a server or a publisher has at the same moment."""
    return versions_gib(artifact_bytes(spec))


def versions_gib(num_bytes: float) -> int:
    """Disk for them, of the bytes of one version."""
    from embark.plan.serving import versions_bytes

    return math.ceil(versions_bytes(num_bytes) / GIB)


def node_disk_gib(spec: RunSpec) -> int:
    """Disk of a machine for one replica. GKE, which keeps most for itself, leaves pods 55 % of a disk; the image lies
    there too."""
    return 10 * math.ceil((disk_gib(spec) + IMAGE_GIB) / 0.55 / 10)


def export_bytes(spec: RunSpec) -> float:
    """Return what an export reads and writes: the tables in a checkpoint, in float32, and the version."""
    from embark.plan.serving import version_bytes

    return version_bytes(spec, "fp32") + artifact_bytes(spec) if knows_tables(spec) else 0.0


def export_memory_gib(spec: RunSpec) -> int:
    """Memory of an export: its id maps and pieces of the tables. The items of a retrieval model are indexed in
    memory."""
    from embark.plan.serving import replica_bytes, table_bytes, version_bytes

    if not knows_tables(spec):
        return EXPORT_GIB
    if spec.model.retrieved:
        return EXPORT_GIB + math.ceil(replica_bytes(spec, "fp32") / GIB)
    return EXPORT_GIB // 2 + math.ceil(1.2 * (version_bytes(spec, "fp32") - table_bytes(spec, "fp32")) / GIB)


def knows_tables(spec: RunSpec) -> bool:
    """Return whether the tables' sizes are known: not if prepared data that cannot be read from here decides them."""
    return spec.data.kind != "prepared" or spec.model.gives_tables


def memory_gib(spec: RunSpec) -> int:
    """Memory of a replica."""
    from embark.plan.serving import replica_bytes

    return math.ceil(spec.serve.memory_gib or replica_bytes(spec, spec.serve.tables) / GIB)


def with_cloud(spec: RunSpec) -> RunSpec:
    """Give a spec without a machine or cloud the cloud of its endpoint, or of the object store with the artifact."""
    cloud = ENDPOINTS.get(spec.place.target) or _CLOUDS.get(artifact_of(spec).partition("://")[0], "")
    if spec.place.machine or spec.place.cloud or not cloud:
        return spec
    return spec.changed(place=spec.place.changed(cloud=cloud))


def broker_name(name: str) -> str:
    """Return the name of the NATS server of a deployment."""
    return f"{name}-nats"


def broker_url(name: str) -> str:
    return f"nats://{broker_name(name)}:{NATS_PORT}"


def with_broker(spec: RunSpec, name: str) -> RunSpec:
    """Give a spec without servers those of the deployment, and the Secret with their token."""
    stream = spec.stream
    if stream.source != "nats" or stream.servers:
        return spec
    own = {"servers": (broker_url(name),), "secret": stream.secret or broker_name(name)}
    return spec.changed(stream=stream.model_copy(update=own))


def has_own_broker(spec: RunSpec, name: str) -> bool:
    """Return whether the deployment has a NATS server."""
    return spec.stream.source == "nats" and spec.stream.servers == (broker_url(name),)


def follow_mistakes(spec: RunSpec) -> Mistakes:
    """Yield the mistakes that keep a trainer that follows a stream from being deployed."""
    stream, store, serve = spec.stream, spec.store, spec.serve
    if not stream.is_on:
        yield Mistake("", "stream.source", "", 'place.target = "follow" trains on a stream', "set it in [stream]")
    if spec.place.max_nodes > 1:
        yield Mistake("", "place.nodes", str(spec.place.max_nodes), "one process follows a stream", "set it to 1")
    for field, place in (("store.root", store.root), ("publish.to", published_uri(spec))):
        if "://" not in place:
            yield Mistake("", field, place, "is on the pod's own disk, which goes with the pod",
                          "an object store, such as s3://BUCKET/runs")
    if stream.source == "files" and "://" not in stream.path:
        yield Mistake("", "stream.path", stream.path, "is on this machine; pods do not see it",
                      "a prefix of an object store")
    if serve.artifact and serve.artifact.rstrip("/") != published_uri(spec):
        yield Mistake("", "serve.artifact", serve.artifact, f"the trainer publishes to {published_uri(spec)}",
                      "leave it out: servers follow the place that versions are published to")
    if spec.place.identity and not serve.identity:
        yield Mistake("", "serve.identity", "", "the servers would act as the trainer, which may delete checkpoints",
                      f"an identity that may read {published_uri(spec)}, and nothing else")
    if serve.tables != spec.publish.tables:
        yield Mistake("", "serve.tables", serve.tables, f'publish.tables = "{spec.publish.tables}", which is what '
                      "servers load", f'set it to "{spec.publish.tables}"')
    if store.checkpoint_every == 0:
        yield Mistake("", "store.checkpoint_every", "0", "a stream has no end, so that nothing would be saved",
                      'a number of steps, or "auto"')
    if stream.source in ("kafka", "nats") and 3600 * stream.retention_hours < MIN_RETENTION_S:
        yield Mistake("", "stream.retention_hours", f"{stream.retention_hours:g}", "a trainer resumes behind its last "
                      "checkpoint, which may be an hour old, and may be away for an hour", "set it to 2 or more")
