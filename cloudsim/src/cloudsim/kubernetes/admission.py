"""Rules of the API server: known kinds, namespaces, strict schemas, webhooks and immutable fields."""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache

import kubernetes_validate
from kubernetes_validate import utils

from cloudsim.kubernetes.cluster import ANY_TAINT, Cluster, Object, labels_of
from cloudsim.kubernetes.kinds import ObjectKind, Release, releases
from cloudsim.kubernetes.validation import find_mistake
from cloudsim.state import Refusal
from embark.kubernetes.objects import Objects, at, name_of, rows
from embark.kubernetes.pods import pod_specs
from embark.rehearse.workload import make_workload
from embark.values import JsonMap

utils.schema_contents = cache(utils.schema_contents)  # It would read megabytes for each object.
REHEARSED = ("Job", "JobSet", "TrainJob", "PyTorchJob")
ENFORCE = "pod-security.kubernetes.io/enforce"


def pod_refusal(cluster: Cluster, namespace: str, spec: Mapping[str, object]) -> str:
    """Return why the API server creates no such pod: its service account, its priority or Pod Security."""
    name, klass = str(spec.get("serviceAccountName") or "default"), spec.get("priorityClassName")
    if name != "default" and cluster.find("ServiceAccount", name, namespace) is None:
        return f'error looking up service account {namespace}/{name}: serviceaccount "{name}" not found'
    if klass and cluster.find("PriorityClass", str(klass)) is None:
        return f"no PriorityClass with name {klass} was found"
    level = labels_of(cluster.find("Namespace", namespace)).get(ENFORCE, "privileged")
    for container in rows(spec, "containers"):
        added = at(container, "securityContext.capabilities.add") or []
        if level != "privileged" and added and added != ["NET_BIND_SERVICE"]:
            return (f'violates PodSecurity "{level}:latest": non-default capabilities (container '
                    f'"{container.get("name")}" must not include "{added[0]}" in securityContext.capabilities.add)')
    return ""


def admit(cluster: Cluster, thing: Object, origin: str, namespace: str) -> str:
    """Answer a server-side dry run: check an object as if it were created, and keep nothing."""
    kind, name = cluster.kind_of(thing, origin), name_of(thing)
    if f"create {kind.plural}" in cluster.denied:
        raise Refusal(f'Error from server (Forbidden): error when creating "{origin}": {kind.plural} is forbidden: '
                      f'User "you" cannot create resource "{kind.plural}" in API group "{kind.group}" in the '
                      f'namespace "{namespace}"')
    _check(cluster, thing, kind, origin, namespace)
    refused = pod_refusal(cluster, namespace, thing.get("spec") or {}) if kind.key == "Pod" else ""
    if refused:
        raise Refusal(f'Error from server (Forbidden): error when creating "{origin}": pods "{name}" is forbidden: '
                      f"{refused}")
    return f"{kind.resource}/{name}"


def apply(cluster: Cluster, thing: Object, origin: str, namespace: str = "", *, create: bool = False) -> str:
    """Create or change an object and return the line that kubectl prints, such as `job.batch/dlrm created`."""
    kind = cluster.kind_of(thing, origin)
    thing = deepcopy(thing)
    meta = thing.setdefault("metadata", {})
    if not meta.get("name"):
        raise Refusal(f"error: error when retrieving current configuration of:\nResource: {kind.plural!r}: "
                      f"resource name may not be empty")
    if kind.is_namespaced:
        given = meta.get("namespace")
        if namespace and given and given != namespace:
            raise Refusal(f'error: the namespace from the provided object "{given}" does not match the namespace '
                          f'"{namespace}". You must pass \'--namespace={given}\' to perform this operation.')
        space = meta.setdefault("namespace", given or namespace or "default")
    else:
        meta.pop("namespace", None)
        space = ""
    _check(cluster, thing, kind, origin, space)
    old = cluster.find(kind.key, meta["name"], space)
    label = f"{kind.resource}/{meta['name']}"
    if old is None:
        cluster.put(thing)
        effects(cluster, thing, kind)
        return f"{label} created"
    if create:
        raise Refusal(f'Error from server (AlreadyExists): {kind.plural} "{meta["name"]}" already exists')
    for name in ("replicas", "volumeName", "storageClassName"):  # What a controller has set and the file does not have.
        if at(old, f"spec.{name}") is not None:
            thing["spec"].setdefault(name, old["spec"][name])
    for name in kind.immutable:
        if at(old, f"spec.{name}") != at(thing, f"spec.{name}"):
            raise Refusal(f'The {kind.kind} "{meta["name"]}" is invalid: spec.{name}: Invalid value: field is '
                          "immutable")
    merged = {**old, **{key: value for key, value in thing.items() if key != "metadata"}}
    merged["metadata"] = {**old["metadata"], **{key: {**(old["metadata"].get(key) or {}), **value}
                          if isinstance(value, Mapping) else value for key, value in meta.items()}}
    is_same = {**merged, "status": None} == {**old, "status": None}
    cluster.objects[(kind.key, space, meta["name"])] = merged
    effects(cluster, merged, kind)
    return f"{label} {'unchanged' if is_same else 'configured'}"


def _check(cluster: Cluster, thing: Object, kind: ObjectKind, origin: str, space: str) -> None:
    if kind.is_namespaced and cluster.find("Namespace", space) is None:
        raise Refusal(f'Error from server (NotFound): error when creating "{origin}": namespaces "{space}" not found')
    check_schema(cluster, thing, kind, origin)
    check_webhooks(cluster, thing, kind, origin)


def check_schema(cluster: Cluster, thing: Object, kind: ObjectKind, origin: str) -> None:
    """Check built-in kinds against Kubernetes' own schemas, and jobs against the rules of their controllers."""
    is_custom = any(kind in release.kinds for release in cluster.releases.values())
    checked = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": {"containers": [], **spec}}
               for spec in pod_specs(thing)] if is_custom else [thing]
    for one in checked:
        try:
            kubernetes_validate.validate(one, cluster.version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(str(part) for part in error.path)
            raise Refusal(f'Error from server (BadRequest): error when creating "{origin}": {kind.kind} in version '
                          f'"{thing["apiVersion"]}" cannot be handled as a {kind.kind}: strict decoding error: '
                          f'{path}: {error.message}') from error
    if kind.fields and (unknown := sorted(_field_names(thing.get("spec")) - set(kind.fields))):
        raise Refusal(f'Error from server (BadRequest): error when creating "{origin}": {kind.kind} in version '
                      f'"{thing["apiVersion"]}" cannot be handled as a {kind.kind}: strict decoding error: unknown '
                      f'field "spec.{unknown[0]}"')
    if mistake := find_mistake(thing, kind):
        raise Refusal(f'The {kind.kind} "{name_of(thing)}" is invalid: {mistake}')
    if kind.key in REHEARSED:
        workload, _ = make_workload(thing, Objects((*cluster.objects.values(), thing)))
        if workload.refusal is not None:
            raise Refusal(f'Error from server (Invalid): error when creating "{origin}": {kind.kind} '
                          f'"{name_of(thing)}" is invalid: {workload.refusal.what}')


def _field_names(thing: object) -> set[str]:
    """Return the names of all fields of an object, whose labels and selectors are free."""
    if isinstance(thing, list):
        return set().union(*map(_field_names, thing))
    found: set[str] = set()
    for name, value in thing.items() if isinstance(thing, dict) else ():
        found |= {name} | (set() if name in ("nodeLabels", "matchLabels") else _field_names(value))
    return found


def check_webhooks(cluster: Cluster, thing: Object, kind: ObjectKind, origin: str) -> None:
    """Refuse an object whose webhook does not answer yet. A release's webhook answers once its Deployment is available;
    Kueue's is called for every job."""
    for release in cluster.releases.values():
        is_asked = kind in release.kinds or (release.name == "kueue" and kind.key in REHEARSED)
        if release.webhook and is_asked and not cluster.is_available("Deployment", release.webhook):
            raise Refusal(f'Error from server (InternalError): error when creating "{origin}": Internal error '
                          f'occurred: failed calling webhook: Post "https://{release.name}-webhook-service.'
                          f'{release.namespace}.svc:443": dial tcp: connect: connection refused')


def effects(cluster: Cluster, thing: Object, kind: ObjectKind) -> None:
    """Add what an operator creates for an object of one of its kinds."""
    for release in cluster.releases.values():
        made = release.made_by.get(kind.key)
        if made is not None and "status" not in thing:
            for name, section in made.get("device_plugins", {}).items():
                cluster.add_controller("DaemonSet", name, release.namespace or "kube-system", made["takes_s"],
                                       devices=_configured_devices(at(thing, f"spec.{section}.config")))
            stored = cluster.objects[(kind.key, str(thing["metadata"].get("namespace") or ""),
                                      name_of(thing))]
            stored["status"] = dict(made.get("status", {}))


def _configured_devices(config: object) -> list[str]:
    """Return the devices that the configuration of a network device plugin names."""
    try:
        raw = json.loads(str(config or "{}"))
    except ValueError:
        return []
    listed = [*raw.get("resourceList", []), *raw.get("configList", [])]
    return [f"{one.get('resourcePrefix', 'rdma')}/{one.get('resourceName')}" for one in listed]


def install(cluster: Cluster, release: Release, namespace: str, *, owner: Mapping[str, str] | None = None,
            values: JsonMap | None = None) -> list[str]:
    """Install a release with the values of its chart, and return the lines that `kubectl apply` prints."""
    if release.needs_kind and not any(kind.key == release.needs_kind for kind in cluster.kinds()):
        raise Refusal(f'error: resource mapping not found: no matches for kind "{release.needs_kind}"\nensure CRDs '
                      "are installed first")
    cluster.releases[release.name] = release
    lines = [f"customresourcedefinition.apiextensions.k8s.io/{kind.plural}.{kind.group} serverside-applied"
             for kind in release.kinds]
    for kind in release.kinds:
        cluster.add("CustomResourceDefinition", f"{kind.plural}.{kind.group}")
    space = release.namespace or namespace
    if space and cluster.find("Namespace", space) is None:
        cluster.add("Namespace", space)
    for kind_name, name in release.workloads:
        if name in release.switches and at(values, release.switches[name]) is False:
            continue
        tolerations: Sequence[JsonMap] = ANY_TAINT
        if path := release.tolerations.get(name):
            given = at(values, path)
            tolerations = [{"key": key, "operator": "Exists"} for key in release.tolerated] if given is None \
                else given
        if found := cluster.find(kind_name, name, space):
            found["spec"]["template"]["spec"]["tolerations"] = [dict(one) for one in tolerations]
        else:
            cluster.add_controller(kind_name, name, space, release.takes_s, owner, tolerations=tolerations,
                                   needs=release.needs if name != release.needs else "")
        lines.append(f"{kind_name.lower()}.apps/{name} serverside-applied")
    return lines or [f"{release.needs_kind.lower()}/{release.name} serverside-applied"]


def release_at(address: str, *, kustomize: bool) -> Release:
    """Find the release at a URL, as kubectl would fetch it."""
    for release in releases():
        if release.is_at(address, kustomize=kustomize):
            return release
    if kustomize:
        raise Refusal(f"error: evalsymlink failure on '{address}': the path or the ref does not exist there")
    raise Refusal(f'error: unable to read URL "{address}", server reported 404 Not Found, status code=404')


def refuse_client_side(release: Release) -> None:
    """Refuse CRDs that are too large for the annotation of a client-side apply."""
    if release.needs_server_side:
        name = release.kinds[0] if release.kinds else None
        called = f"{name.plural}.{name.group}" if name else release.name
        raise Refusal(f'The CustomResourceDefinition "{called}" is invalid: metadata.annotations: Too long: may not be '
                      "more than 262144 bytes")
