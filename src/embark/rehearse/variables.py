"""A container's variables as the kubelet makes them, and `$(NAME)` as it puts them into words."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embark.rehearse.objects import Objects, Thing, at, rows

POD_IP = "@pod-ip@"
"""Stands for an address that is known only once the pod is started."""
_REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']*)'\]")


@dataclass(frozen=True, slots=True)
class About:
    """What a pod can be told of itself."""

    name: str
    namespace: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Variables:
    """Of one container."""

    values: Mapping[str, str]
    missing: tuple[str, ...]
    """Without these the kubelet does not start the container."""
    not_here: tuple[str, ...]
    """Secrets that no file holds, as it should be: what they would set is not set."""


def expand(text: str, values: Mapping[str, str]) -> str:
    """`$(NAME)` becomes the value; where there is none it stays as it is. `$$` is a dollar."""
    return _REFERENCE.sub(lambda match: "$" if match[0] == "$$" else values.get(match[1], match[0]), text)


def undefined(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Names that are referred to and defined nowhere."""
    found = (match[1] for word in words for match in _REFERENCE.finditer(word) if match[0] != "$$")
    return list(dict.fromkeys(name for name in found if re.fullmatch(r"[A-Za-z_][\w.-]*", name)
                              and name not in values))


def variables(container: Thing, added: Mapping[str, str], objects: Objects, about: About) -> Variables:
    """envFrom first, then env in its order, then what the controller adds; each may refer to those before it."""
    values: dict[str, str] = {}
    missing: list[str] = []
    not_here: list[str] = []
    for row in rows(container, "envFrom"):
        kind = "ConfigMap" if "configMapRef" in row else "Secret"
        reference = row.get("configMapRef") or row.get("secretRef") or {}
        held = held_data(objects, kind, str(reference.get("name", "")), about.namespace)
        if held is not None:
            values |= {f"{row.get('prefix', '')}{name}": value for name, value in held.items()}
        elif kind == "Secret":
            not_here.append(f"secret {reference.get('name')}")
        elif not reference.get("optional"):
            missing.append(f"ConfigMap {reference.get('name')}")
    for row in rows(container, "env"):
        name = str(row.get("name", ""))
        if "valueFrom" not in row:
            values[name] = expand(_text(row.get("value", "")), values)
            continue
        value, lack, secret = _referred(row["valueFrom"], container, objects, about)
        if value is not None:
            values[name] = value
        missing += [lack] if lack else []
        not_here += [secret] if secret else []
    return Variables({**values, **added}, tuple(dict.fromkeys(missing)), tuple(dict.fromkeys(not_here)))


def held_data(objects: Objects, kind: str, name: str, namespace: str) -> dict[str, str] | None:
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


def _referred(source: Thing, container: Thing, objects: Objects, about: About) -> tuple[str | None, str, str]:
    """The value, or what is missing for it, or the secret that is not here."""
    if field := at(source, "fieldRef.fieldPath"):
        return _field(str(field), about), "", ""
    for key, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
        if reference := source.get(key):
            held = held_data(objects, kind, str(reference.get("name")), about.namespace)
            value = (held or {}).get(str(reference.get("key")))
            what = f"{kind} {reference.get('name')}, key {reference.get('key')}"
            if value is not None or reference.get("optional"):
                return value, "", ""
            return (None, "", what) if kind == "Secret" else (None, what, "")
    if resource := at(source, "resourceFieldRef.resource"):
        word = str(resource).removeprefix("limits.").removeprefix("requests.")
        asked = at(container, "resources.limits") if "limits" in str(resource) else at(container, "resources.requests")
        return str((asked or {}).get(word, 0)), "", ""
    return None, "", ""


def _field(path: str, about: About) -> str:
    if match := _KEYED.fullmatch(path):
        held = about.labels if match[1] == "labels" else about.annotations
        return held.get(match[2], "")
    return {"metadata.name": about.name, "metadata.namespace": about.namespace, "spec.nodeName": "this-machine",
            "status.podIP": POD_IP, "status.hostIP": POD_IP}.get(path, "")


def _text(value: object) -> str:
    return "" if value is None else str(value)
