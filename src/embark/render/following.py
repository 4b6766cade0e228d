"""What a spec says of a deployment that follows a stream: its broker, where it publishes to, and what cannot be."""

from collections.abc import Iterator

from embark.errors import Mistake
from embark.render.serving import published_place
from embark.spec import RunSpec
from embark.store.checkpoint_interval import MAX_EVERY_S

NATS_PORT = 4222
AWAY_S = 3600.0  # Until a trainer that was lost runs again, with a machine that is bought for it.
MIN_RETENTION_S = MAX_EVERY_S + AWAY_S
"""Of records: `store.checkpoint_every = "auto"` saves at least once in `MAX_EVERY_S`."""


def broker_name(name: str) -> str:
    """Of the NATS server of a deployment."""
    return f"{name}-nats"


def broker_url(name: str) -> str:
    return f"nats://{broker_name(name)}:{NATS_PORT}"


def with_broker(spec: RunSpec, name: str) -> RunSpec:
    """Without servers of its own, those of the deployment."""
    if spec.stream.source != "nats" or spec.stream.servers:
        return spec
    return spec.model_copy(update={"stream": spec.stream.model_copy(update={"servers": (broker_url(name),)})})


def has_own_broker(spec: RunSpec, name: str) -> bool:
    """Whether the deployment has a NATS server."""
    return spec.stream.source == "nats" and spec.stream.servers == (broker_url(name),)


def follow_mistakes(spec: RunSpec) -> Iterator[Mistake]:
    """What cannot be deployed."""
    stream, store, serve = spec.stream, spec.store, spec.serve
    if not stream.is_on:
        yield Mistake("", "stream.source", "", 'place.target = "follow" trains on a stream', "set it in [stream]")
    if spec.place.max_nodes > 1:
        yield Mistake("", "place.nodes", str(spec.place.max_nodes), "one process follows a stream", "set it to 1")
    for field, place in (("store.root", store.root), ("publish.to", published_place(spec))):
        if "://" not in place:
            yield Mistake("", field, place, "is on the pod's own disk, which goes with the pod",
                          "an object store, such as s3://BUCKET/runs")
    if stream.source == "files" and "://" not in stream.path:
        yield Mistake("", "stream.path", stream.path, "is on this machine; pods do not see it",
                      "a prefix of an object store")
    if serve.artifact and serve.artifact.rstrip("/") != published_place(spec):
        yield Mistake("", "serve.artifact", serve.artifact, f"the trainer publishes to {published_place(spec)}",
                      "leave it out: servers follow the place that versions are published to")
    if serve.tables != spec.publish.tables:
        yield Mistake("", "serve.tables", serve.tables, f'publish.tables = "{spec.publish.tables}", which is what '
                      "servers load", f'set it to "{spec.publish.tables}"')
    if store.checkpoint_every == 0:
        yield Mistake("", "store.checkpoint_every", "0", "a stream has no end, so that nothing would be saved",
                      'a number of steps, or "auto"')
    if stream.source in ("kafka", "nats") and 3600 * stream.retention_hours < MIN_RETENTION_S:
        yield Mistake("", "stream.retention_hours", f"{stream.retention_hours:g}", "a trainer resumes behind its last "
                      "checkpoint, which may be an hour old, and may be away for an hour", "set it to 2 or more")
