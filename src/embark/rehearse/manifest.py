"""The objects of a manifest: which of them is the job to rehearse, and the variables of its containers."""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embark.errors import UserError
from embark.lint.pods import pods_of
from embark.lint.read import Document, read_sources
from embark.lint.source import SourceFile

K8sObject = Mapping[str, Any]
KINDS = ("Job", "JobSet", "TrainJob", "PyTorchJob", "RayJob", "Pod")  # Those that make pods which train.
MANIFEST_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Objects:
    """All objects of some files, together."""

    all: tuple[K8sObject, ...]
    documents: tuple[Document, ...] = field(default=(), repr=False)  # The same objects as the linter reads them.

    def of_kind(self, *kinds: str) -> list[K8sObject]:
        return [one for one in self.all if one.get("kind") in kinds]

    def find(self, kind: str, name: str, namespace: str) -> K8sObject | None:
        named = (one for one in self.of_kind(kind) if name_of(one) == name and namespace_of(one) == namespace)
        return next(named, None)


def read_texts(texts: Mapping[str, str]) -> Objects:
    """Of texts by their names, such as those that a renderer is about to write."""
    files = read_sources(SourceFile.of(Path(name), text) for name, text in texts.items())
    for bad in files.unread:
        raise UserError(f"{bad.source.path}:{bad.source.line_of(bad.index)}: {bad.what}", fix=bad.fix)
    documents = [one for one in files.documents if one.root.is_map]
    return Objects(tuple(one.root.plain() for one in documents), tuple(documents))


def manifest_texts(path: Path) -> dict[str, str]:
    """A manifest, or all manifests of a folder."""
    paths = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.suffix in MANIFEST_SUFFIXES)
    texts = {}
    for one in paths:
        try:
            texts[str(one)] = one.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{one}: cannot be read: {error}",
                            fix="it must be a YAML file in UTF-8 that you may read") from error
    if not texts:
        raise UserError(f"{path}: has no manifest in it", fix="embark render SPEC --out FOLDER writes one")
    return texts


def find_training_job(objects: Objects, where: str) -> K8sObject:
    """The one that trains."""
    all_jobs = objects.of_kind(*KINDS)
    training = [one for one, document in zip(objects.all, objects.documents, strict=True) if one in all_jobs and (
        document.kind == "JobSet" or any(pod.is_training for pod in pods_of(document)))]
    found = training or all_jobs
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(f"{one['kind']} {name_of(one)}" for one in found)
        raise UserError(f"{where}: has {len(found)} jobs in it: {listed}", fix="name the file of one")
    kinds = sorted({str(one["kind"]) for one in objects.all if one.get("kind")})
    if not kinds:
        raise UserError(f"{where}: has no object of Kubernetes in it, only a part of one",
                        fix="give the whole manifest, with apiVersion and kind")
    raise UserError(f"{where}: has no job in it, only {', '.join(kinds)}",
                    fix=f"what can be rehearsed is a {', a '.join(KINDS)}")


def name_of(thing: K8sObject) -> str:
    return str(at(thing, "metadata.name") or "")


def namespace_of(thing: K8sObject) -> str:
    return str(at(thing, "metadata.namespace") or "default")


def at(thing: Any, path: str) -> Any:
    """The value at a dotted path; None without one."""
    for word in path.split("."):
        thing = thing.get(word) if isinstance(thing, Mapping) else None
    return thing


def rows(thing: Any, path: str) -> list[K8sObject]:
    """The list of objects at a dotted path; empty without one."""
    found = at(thing, path)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


POD_IP = "@pod-ip@"  # Stands for an address that is known only once the pod is started.
_REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']*)'\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodIdentity:
    """What a controller gives one pod beyond its template."""

    name: str
    namespace: str
    index: int = 0
    group: str = ""
    subdomain: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    restart_policy: str = ""


@dataclass(frozen=True, slots=True)
class Variables:
    """Of one container."""

    values: Mapping[str, str]
    missing: tuple[str, ...]  # Without these the kubelet does not start the container.
    unset_secrets: tuple[str, ...]  # Secrets that no file holds, as it should be: what they would set is not set.


def expand(text: str, values: Mapping[str, str]) -> str:
    """`$(NAME)` becomes the value; where there is none it stays as it is. `$$` is a dollar."""
    return _REFERENCE.sub(lambda match: "$" if match[0] == "$$" else values.get(match[1], match[0]), text)


def variables(container: K8sObject, objects: Objects, pod: PodIdentity) -> Variables:
    """envFrom first, then env in its order, then what the controller adds; each may refer to those before it."""
    values: dict[str, str] = {}
    missing: list[str] = []
    unset_secrets: list[str] = []
    for row in rows(container, "envFrom"):
        kind = "ConfigMap" if "configMapRef" in row else "Secret"
        reference = row.get("configMapRef") or row.get("secretRef") or {}
        contents = data_of(objects, kind, str(reference.get("name", "")), pod.namespace)
        if contents is not None:
            values |= {f"{row.get('prefix', '')}{name}": value for name, value in contents.items()}
        elif kind == "Secret":
            unset_secrets.append(f"secret {reference.get('name')}")
        elif not reference.get("optional"):
            missing.append(f"ConfigMap {reference.get('name')}")
    for row in rows(container, "env"):
        name = str(row.get("name", ""))
        if "valueFrom" not in row:
            values[name] = expand(_text(row.get("value", "")), values)
            continue
        value, lack, secret = _referred(row["valueFrom"], container, objects, pod)
        if value is not None:
            values[name] = value
        missing += [lack] if lack else []
        unset_secrets += [secret] if secret else []
    return Variables({**values, **pod.env}, tuple(dict.fromkeys(missing)), tuple(dict.fromkeys(unset_secrets)))


def data_of(objects: Objects, kind: str, name: str, namespace: str) -> dict[str, str] | None:
    """The entries of a ConfigMap or a Secret; None where there is none of that name."""
    found = objects.find(kind, name, namespace)
    if found is None:
        return None
    if kind == "ConfigMap":
        return {str(key): _text(value) for key, value in (found.get("data") or {}).items()}
    plain = {str(key): _text(value) for key, value in (found.get("stringData") or {}).items()}
    for key, value in (found.get("data") or {}).items():
        plain.setdefault(str(key), base64.b64decode(str(value)).decode(errors="replace"))
    return plain


def _referred(
    source: K8sObject, container: K8sObject, objects: Objects, pod: PodIdentity
) -> tuple[str | None, str, str]:
    """The value, or what is missing for it, or the secret that is not here."""
    if path := at(source, "fieldRef.fieldPath"):
        return _field(str(path), pod), "", ""
    for key, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
        if reference := source.get(key):
            contents = data_of(objects, kind, str(reference.get("name")), pod.namespace)
            value = (contents or {}).get(str(reference.get("key")))
            what = f"{kind} {reference.get('name')}, key {reference.get('key')}"
            if value is not None or reference.get("optional"):
                return value, "", ""
            return (None, "", what) if kind == "Secret" else (None, what, "")
    if resource := at(source, "resourceFieldRef.resource"):
        word = str(resource).removeprefix("limits.").removeprefix("requests.")
        amounts = at(container, "resources.limits" if "limits" in str(resource) else "resources.requests") or {}
        return str(amounts.get(word, 0)), "", ""
    return None, "", ""


def _field(path: str, pod: PodIdentity) -> str:
    if match := _KEYED.fullmatch(path):
        contents = pod.labels if match[1] == "labels" else pod.annotations
        return contents.get(match[2], "")
    return {"metadata.name": pod.name, "metadata.namespace": pod.namespace, "spec.nodeName": "this-machine",
            "status.podIP": POD_IP, "status.hostIP": POD_IP}.get(path, "")


def _text(value: object) -> str:
    return "" if value is None else str(value)
