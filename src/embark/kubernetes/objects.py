"""Kubernetes objects as the plain values of their YAML or JSON: looking into them, and quantities."""

import base64
import re
from collections.abc import Mapping
from typing import Any

from embark.values import JsonDict, JsonMap, frozen

K8sObject = JsonMap
_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Ki": 2.0**10,
          "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([mkMGTPE]|[KMGTPE]i)?")


@frozen
class Objects:
    """All objects of some files, together."""

    all: tuple[K8sObject, ...]

    def of_kind(self, *kinds: str) -> list[K8sObject]:
        return [one for one in self.all if one.get("kind") in kinds]

    def find(self, kind: str, name: str, namespace: str) -> K8sObject | None:
        named = (one for one in self.of_kind(kind) if name_of(one) == name and namespace_of(one) == namespace)
        return next(named, None)

    def data_of(self, kind: str, name: str, namespace: str) -> dict[str, str] | None:
        """Return the entries of a ConfigMap or a Secret; None if no file has it."""
        found = self.find(kind, name, namespace)
        if found is None:
            return None
        data = texts(found.get("data"))
        if kind == "Secret":
            data = {key: base64.b64decode(value).decode(errors="replace") for key, value in data.items()}
        return data | texts(found.get("stringData"))


def at(thing: Any, path: str) -> Any:
    """Return the value at a dotted path, or None."""
    for word in path.split("."):
        thing = thing.get(word) if isinstance(thing, Mapping) else None
    return thing


def rows(thing: Any, path: str) -> list[K8sObject]:
    """Return the list of objects at a dotted path; empty if there is none."""
    found = at(thing, path)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def texts(thing: Any) -> dict[str, str]:
    """Return a mapping of texts, such as labels; a key without a value has an empty text."""
    items = thing.items() if isinstance(thing, Mapping) else ()
    return {str(key): "" if value is None else str(value) for key, value in items}


def name_of(thing: K8sObject) -> str:
    return str(at(thing, "metadata.name") or "")


def namespace_of(thing: K8sObject) -> str:
    return str(at(thing, "metadata.namespace") or "default")


def condition_of(status: K8sObject, name: str, value: str = "True") -> JsonDict | None:
    """Return the condition of that type, if it has that value."""
    conditions = status.get("conditions") or ()
    return next((one for one in conditions if one.get("type") == name and one.get("status") == value), None)


def split_quantity(text: str) -> tuple[float, str] | None:
    """`64Gi` as 64 and `Gi`; None if the text is no quantity."""
    match = _QUANTITY.fullmatch(text.strip())
    return (float(match[1]), match[2] or "") if match else None


def quantity(text: str) -> float | None:
    """`500m`, `64Gi` and the like as a number."""
    parts = split_quantity(text)
    return parts[0] * _UNITS[parts[1]] if parts else None
