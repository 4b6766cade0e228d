"""EMB95x: does a deployment that follows a stream train each record once, and serve what it publishes?"""

import re
from collections.abc import Iterator
from pathlib import Path

from embark.kubernetes.pods import embark_words
from embark.kubernetes.yaml_nodes import Node
from embark.lint.edits import set_key, set_scalar
from embark.lint.manifests import Manifests
from embark.lint.pods import Container, PodTemplate
from embark.lint.read import Document
from embark.lint.rule import Hit, Hits
from embark.render.serving import MIN_RETENTION_S, published_uri
from embark.spec import RunSpec, parse_spec
from .serving import SCALERS

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def followers(manifests: Manifests) -> Iterator[tuple[Container, PodTemplate]]:
    """Yield containers that run `embark follow` or `embark publish --watch`, of which there may be one each."""
    for pod in manifests.pods:
        for container in pod.containers:
            words = embark_words(container.argv)
            if words[:1] == ["follow"] or (words[:1] == ["publish"] and "--watch" in words):
                yield container, pod


def two_trainers_of_a_stream(follower: Container, pod: PodTemplate, manifests: Manifests) -> Hits:
    """Several may run at a time: by replicas, by an autoscaler, or while one is replaced."""
    name, spec = embark_words(follower.argv)[0], pod.document["spec"]
    field = "parallelism" if pod.kind == "Job" else "replicas"
    replicas = spec[field]
    if replicas.integer is not None and replicas.integer > 1:
        yield Hit(replicas, f"{replicas.text} pods run `embark {name}`", f"{field}: 1", set_scalar(replicas, "1"))
    if pod.kind == "Deployment" and spec.at("strategy.type").text != "Recreate":
        strategy = spec["strategy"]
        edits = set_scalar(strategy["type"], "Recreate") if strategy["type"] and not strategy["rollingUpdate"] else \
            () if strategy else set_key(spec, "strategy", "{type: Recreate}")
        yield Hit(strategy["type"] or strategy or pod.document,
                  f"a rolling update starts the next `embark {name}` before the last one ends",
                  "strategy: {type: Recreate}", edits)
    for scaler in manifests.of_kind(*SCALERS):
        target = scaler.at("spec.scaleTargetRef.name")
        if target.text == pod.document.name and scaler.namespace == pod.document.namespace:
            yield Hit(target, f"{scaler.name} adds pods that run `embark {name}`", "leave the autoscaler out")


def retention_below_checkpoints(document: Document) -> Hits:
    """Records may be deleted before a trainer resumes from its checkpoint."""
    for node, kept_s in _retentions(document):
        if 0 < kept_s < MIN_RETENTION_S:
            yield Hit(node, f"records are kept for {kept_s / 3600:g} h; a checkpoint may be an hour old, and a "
                      "trainer away for an hour")
    for node, spec in _specs(document):
        if spec.stream.is_on and spec.store.checkpoint_every == 0:
            yield Hit(node, "store.checkpoint_every = 0: a stream has no end, so that nothing is ever saved",
                      'store.checkpoint_every: a number of steps, or "auto"')


def server_follows_another_place(server: Container, pod: PodTemplate, manifests: Manifests) -> Hits:
    """Another folder is another deployment."""
    folder = pod.document.location.source.path.parent
    uris = {uri for home, uri in _published(manifests) if home == folder}
    artifact = next((node for node, before in zip(server.argv_nodes[1:], server.argv_nodes, strict=False)
                     if before.text == "serve"), None)
    if uris and artifact and artifact.text.rstrip("/") not in uris:
        yield Hit(artifact, f"it serves {artifact.text}, and versions are published to "
                  f"{', '.join(sorted(uris))}", f"embark serve {min(uris)}")


def broker_without_token(pod: PodTemplate, manifests: Manifests) -> Hits:
    mounted = [volume.at("configMap.name").text for volume in pod.spec["volumes"]]
    files = [str(one["data"].texts) for one in manifests.of_kind("ConfigMap") if one.name in mounted]
    for container in pod.containers:
        if re.search(r"(^|/)nats:", container.node["image"].text) and not re.search(
                r"authorization|accounts|--auth|--user", " ".join([*container.argv, *files])):
            yield Hit(container)


def _published(manifests: Manifests) -> Iterator[tuple[Path, str]]:
    """Yield the URIs that the publishers publish to, as far as the files say, each with the publisher's folder."""
    specs = [spec for document in manifests.of_kind("ConfigMap") for _, spec in _specs(document)]
    for container, pod in followers(manifests):
        folder, words = pod.document.location.source.path.parent, embark_words(container.argv)
        if words[0] != "publish":
            continue
        if "--to" in words[:-1]:
            yield folder, words[words.index("--to") + 1].rstrip("/")
            continue
        run = words[1].rstrip("/")
        yield from ((folder, published_uri(spec)) for spec in specs
                    if run == f"{spec.store.root.rstrip('/')}/{spec.name}")


def _retentions(document: Document) -> Iterator[tuple[Node, float]]:
    """Retention in seconds of Strimzi's topics, NACK's streams and specs, with its node; 0 means for ever."""
    if document.kind == "KafkaTopic":
        kept = document.at("spec.config")["retention.ms"]
        if kept.integer is not None:
            yield kept, max(0, kept.integer) / 1000
    if document.kind == "Stream" and document.api.startswith("jetstream.nats.io/"):
        kept = document.at("spec.maxAge")
        number, unit = kept.text[:-1], kept.text[-1:]
        if number.isdigit() and unit in _SECONDS:
            yield kept, int(number) * _SECONDS[unit]
    for node, spec in _specs(document):
        if spec.stream.source in ("kafka", "nats"):
            yield node, 3600 * spec.stream.retention_hours


def _specs(document: Document) -> Iterator[tuple[Node, RunSpec]]:
    """Yield the specs of runs in a ConfigMap."""
    data = document["data"]
    for name in data.names if document.kind == "ConfigMap" else ():
        if name.endswith(".toml") and (spec := parse_spec(data[name].text)) is not None:
            yield data[name], spec
