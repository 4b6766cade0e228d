"""The API server's rules beyond schemas: names, labels, values of fields, and relations between fields of an object."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cloudsim.kubernetes.cluster import Object
from cloudsim.kubernetes.kinds import ObjectKind
from cloudsim.state import load_facts
from embark.kubernetes.objects import at, name_of, quantity, rows
from embark.kubernetes.pods import pod_specs
from embark.values import JsonMap

MAX_LABEL, MAX_NAME, MAX_PORT_NAME = 63, 253, 15
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
LABELLED = ("metadata.labels", "spec.template.metadata.labels", "spec.selector.matchLabels", "spec.nodeSelector",
            "spec.template.spec.nodeSelector")
QUANTITIES = ("storage", "sizeLimit", "nominalQuota")
HANDLERS = {"exec", "httpGet", "tcpSocket", "grpc"}
STANDARD = ("cpu", "memory", "ephemeral-storage")


def find_mistake(thing: Object, kind: ObjectKind) -> str:
    """Return the first thing that the API server refuses, as `field: reason`, or an empty text."""
    return next(_mistakes(thing, kind), "")


def name_error(name: str, *, is_label: bool = False) -> str:
    most = MAX_LABEL if is_label else MAX_NAME
    if len(name) > most:
        return f"must be no more than {most} characters"
    if not (LABEL if is_label else SUBDOMAIN).fullmatch(name):
        return (f"a lowercase RFC 1123 {'label' if is_label else 'subdomain'} must consist of lower case alphanumeric "
                "characters, '-' or '.', and must start and end with an alphanumeric character")
    return ""


def label_error(key: str, value: str) -> str:
    """Return why a label's key or value is refused, or an empty text."""
    prefix, _, name = key.rpartition("/")
    if "/" in prefix:
        return f"{key!r}: a qualified name must consist of a name with an optional DNS subdomain prefix and one '/'"
    if (prefix and name_error(prefix)) or not name or len(name) > MAX_LABEL or not VALUE.fullmatch(name):
        return f"{key!r}: name part must consist of alphanumeric characters, '-', '_' or '.', at most {MAX_LABEL}"
    if len(value) > MAX_LABEL:
        return f"{value!r}: must be no more than {MAX_LABEL} characters"
    if not VALUE.fullmatch(value):
        return f"{value!r}: a valid label must consist of alphanumeric characters, '-', '_' or '.'"
    return ""


def _mistakes(thing: Object, kind: ObjectKind) -> Iterator[str]:
    name = name_of(thing)
    if kind.group != "rbac.authorization.k8s.io" and (why := name_error(name)):
        yield f'metadata.name: Invalid value: "{name}": {why}'
    host = f"{name}-{int(at(thing, 'spec.completions') or 1) - 1}" if at(
        thing, "spec.completionMode") == "Indexed" else name
    if kind.is_label and (why := name_error(host, is_label=True)):
        yield f'metadata.name: Invalid value: "{host}": {why}'
    for path in LABELLED:
        for key, value in (at(thing, path) or {}).items():
            if why := label_error(str(key), str(value)):
                yield f"{path}: Invalid value: {why}"
    yield from (f"{path}: Required value" for path in kind.required if not at(thing, path))
    yield from _values(thing, "")
    for spec in pod_specs(thing):
        yield from _pod(spec, [str(at(one, "metadata.name")) for one in rows(thing, "spec.volumeClaimTemplates")])
    yield from {"Deployment": _deployment, "StatefulSet": _deployment, "Service": _service, "Job": _job,
                "HorizontalPodAutoscaler": _scaler, "PodDisruptionBudget": _budget,
                "PersistentVolume": _volume, "ClusterQueue": _queue}.get(kind.key, lambda _: iter(()))(thing)


def _values(thing: Any, path: str) -> Iterator[str]:
    """Yield the fields that have one of a few values, or a number within limits, and have another one here."""
    known = load_facts("kubernetes/kinds.toml")["values"]
    items = thing.items() if isinstance(thing, Mapping) else enumerate(thing) if isinstance(thing, list) else ()
    for key, value in items:
        where = f"{path}.{key}".lstrip(".")
        names = re.sub(r"\.\d+", "", where).split(".")
        allowed = next((known[name] for length in (3, 2, 1) if (name := ".".join(names[-length:])) in known), ())
        for one in value if isinstance(value, list) else [value]:
            if not allowed or type(one) is not type(allowed[0]):
                continue
            if isinstance(one, str) and one not in allowed:
                yield f'{where}: Unsupported value: "{one}": supported values: {", ".join(allowed)}'
            elif isinstance(one, int) and not allowed[0] <= one <= allowed[1]:
                limits = f"between {allowed[0]} and {allowed[1]}, inclusive"
                yield (f"{where}: Invalid value: {one}: must be "
                       f"{limits if one > allowed[1] else f'greater than or equal to {allowed[0]}'}")
        if key in QUANTITIES:
            yield from _quantity(where, value)
        if key not in ("data", "stringData", "annotations", "labels", "status", "managedFields"):
            yield from _values(value, where)


def _pod(spec: JsonMap, claimed: Sequence[str]) -> Iterator[str]:
    volumes = [str(one.get("name")) for one in rows(spec, "volumes")]
    for index, volume in enumerate(rows(spec, "volumes")):
        sources = [key for key in volume if key != "name"]
        if why := name_error(volumes[index], is_label=True):
            yield f"spec.volumes[{index}].name: Invalid value: {volumes[index]!r}: {why}"
        if not sources:
            yield f"spec.volumes[{index}]: Required value: must specify a volume type"
        if len(sources) > 1:
            yield f"spec.volumes[{index}].{sources[1]}: Forbidden: may not specify more than 1 volume type"
    containers = [*rows(spec, "initContainers"), *rows(spec, "containers")]
    yield from _repeated("spec.volumes", volumes)
    yield from _repeated("spec.containers", [str(one.get("name")) for one in containers])
    for container in containers:
        yield from _container(container, [*volumes, *claimed])
        pause_s = at(container, "lifecycle.preStop.sleep.seconds") or 0
        if pause_s > spec.get("terminationGracePeriodSeconds", 30):
            yield (f"spec.containers[{container.get('name')}].lifecycle.preStop.sleep: Invalid value: {pause_s}: must "
                   "be less than terminationGracePeriodSeconds")
    for index, one in enumerate(rows(spec, "tolerations")):
        if one.get("operator") == "Exists" and one.get("value"):
            yield (f"spec.tolerations[{index}].operator: Invalid value: {one['value']!r}: value must be empty when "
                   "`operator` is 'Exists'")


def _container(container: JsonMap, volumes: Sequence[str]) -> Iterator[str]:
    name = str(container.get("name", ""))
    path = f"spec.containers[{name}]"
    if why := name_error(name, is_label=True):
        yield f"{path}.name: Invalid value: {name!r}: {why}"
    if not str(container.get("image") or "").strip():
        yield f"{path}.image: Required value"
    mounted = [str(one.get("mountPath")) for one in rows(container, "volumeMounts")]
    for one in rows(container, "volumeMounts"):
        if str(one.get("name")) not in volumes:
            yield f'{path}.volumeMounts.name: Not found: "{one.get("name")}"'
    yield from _repeated(f"{path}.volumeMounts.mountPath", mounted)
    for index, port in enumerate(rows(container, "ports")):
        yield from _port(f"{path}.ports[{index}]", port)
    yield from _repeated(f"{path}.ports.name", [str(one["name"]) for one in rows(container, "ports") if "name" in one])
    for row in rows(container, "env"):
        if "value" in row and "valueFrom" in row:
            yield f"{path}.env[{row.get('name')}].valueFrom: may not be specified when `value` is not empty"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe in container and not HANDLERS & set(container[probe]):
            yield f"{path}.{probe}: Required value: must specify a handler type"
    yield from _resources(path, at(container, "resources") or {})


def _resources(path: str, resources: JsonMap) -> Iterator[str]:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for section, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            where = f"{path}.resources.{section}[{name}]"
            yield from _quantity(where, amount)
            if "/" not in name and name not in STANDARD and not name.startswith("hugepages-"):
                yield f"{where}: Invalid value: {name!r}: must be a standard resource for containers"
            if "/" in name and not (quantity(str(amount)) or 0.0).is_integer():
                yield f"{where}: Invalid value: {amount!r}: must be an integer"
    for name, amount in requests.items():
        asked, limit = quantity(str(amount)) or 0.0, quantity(str(limits.get(name, ""))) if name in limits else None
        is_fixed = "/" in name or name.startswith("hugepages-")
        if limit is None and is_fixed:
            yield f"{path}.resources.limits: Required value: Limit must be set for non overcommitable resources"
        elif limit is not None and (asked > limit or (is_fixed and asked != limit)):
            relation = "equal to" if is_fixed else "less than or equal to"
            yield (f"{path}.resources.requests: Invalid value: {str(amount)!r}: must be {relation} {name} limit of "
                   f"{limits[name]}")
    if any(name.startswith("hugepages-") for name in limits) and not {"cpu", "memory"} & {*limits, *requests}:
        yield f"{path}.resources: Forbidden: HugePages require cpu or memory"


def _quantity(path: str, amount: Any) -> Iterator[str]:
    if isinstance(amount, str | int | float) and quantity(str(amount)) is None:
        yield (f"{path}: Invalid value: {str(amount)!r}: quantities must match the regular expression "
               "'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")


def _port(path: str, port: JsonMap) -> Iterator[str]:
    name = str(port.get("name", "a"))
    if len(name) > MAX_PORT_NAME or not LABEL.fullmatch(name):
        yield f"{path}.name: Invalid value: {name!r}: must be no more than {MAX_PORT_NAME} lower case characters or '-'"


def _repeated(path: str, names: Sequence[str]) -> Iterator[str]:
    for name in sorted({one for one in names if names.count(one) > 1}):
        yield f"{path}: Duplicate value: {name!r}"


def _deployment(thing: Object) -> Iterator[str]:
    wanted, labels = at(thing, "spec.selector.matchLabels") or {}, at(thing, "spec.template.metadata.labels") or {}
    if not wanted.items() <= labels.items():
        yield f"spec.template.metadata.labels: Invalid value: {labels}: `selector` does not match template `labels`"
    if (policy := at(thing, "spec.template.spec.restartPolicy")) not in (None, "Always"):
        yield f'spec.template.spec.restartPolicy: Unsupported value: "{policy}": supported values: "Always"'
    rolling = at(thing, "spec.strategy.rollingUpdate") or {}
    if all(str(rolling.get(name, "25%")) in ("0", "0%") for name in ("maxSurge", "maxUnavailable")):
        yield "spec.strategy.rollingUpdate.maxUnavailable: Invalid value: 0: may not be 0 when `maxSurge` is 0"
    if rolling and at(thing, "spec.strategy.type") == "Recreate":
        yield "spec.strategy.rollingUpdate: Forbidden: may not be specified when strategy `type` is 'Recreate'"


def _service(thing: Object) -> Iterator[str]:
    ports = rows(thing, "spec.ports")
    if not ports and at(thing, "spec.clusterIP") != "None" and at(thing, "spec.type") != "ExternalName":
        yield "spec.ports: Required value"
    for index, port in enumerate(ports):
        yield from _port(f"spec.ports[{index}]", port)
        if len(ports) > 1 and not port.get("name"):
            yield f"spec.ports[{index}].name: Required value"


def _job(thing: Object) -> Iterator[str]:
    spec = thing["spec"]
    if spec.get("completionMode") == "Indexed" and spec.get("completions") is None:
        yield "spec.completions: Required value: when completion mode is Indexed"
    names = [one.get("name") for one in rows(spec, "template.spec.containers")]
    for index, rule in enumerate(rows(spec, "podFailurePolicy.rules")):
        where, codes = f"spec.podFailurePolicy.rules[{index}]", rule.get("onExitCodes") or {}
        if codes.get("containerName") not in (None, *names):
            yield f"{where}.onExitCodes.containerName: Invalid value: {codes['containerName']!r}: must be one of the " \
                  f"container or initContainer names in the pod template"
        if codes.get("operator") == "In" and 0 in (codes.get("values") or ()):
            yield f"{where}.onExitCodes.values: Invalid value: 0: must not be 0 for the In operator"


def _scaler(thing: Object) -> Iterator[str]:
    least, most = int(at(thing, "spec.minReplicas") or 1), int(at(thing, "spec.maxReplicas") or 0)
    if most < least:
        yield f"spec.maxReplicas: Invalid value: {most}: must be greater than or equal to `minReplicas`"


def _queue(thing: Object) -> Iterator[str]:
    for index, group in enumerate(rows(thing, "spec.resourceGroups")):
        where, covered = f"spec.resourceGroups[{index}]", group.get("coveredResources") or []
        for flavor in rows(group, "flavors"):
            names = [f"{one.get('name')}" for one in rows(flavor, "resources")]
            if names != covered:
                yield (f"{where}: Invalid value: flavors must have the same number of resources as the "
                       f"coveredResources, in their order: {flavor.get('name')} has {', '.join(names)}, and "
                       f"{', '.join(covered)} are covered")


def _budget(thing: Object) -> Iterator[str]:
    if {"minAvailable", "maxUnavailable"} <= set(thing["spec"]):
        yield "spec: Invalid value: minAvailable and maxUnavailable cannot be both set"


def _volume(thing: Object) -> Iterator[str]:
    if not {"csi", "nfs", "hostPath", "local"} & set(thing["spec"]):
        yield "spec: Required value: must specify a volume type"
