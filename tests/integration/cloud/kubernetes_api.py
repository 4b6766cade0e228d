"""A Kubernetes API over HTTP, small: what kubectl asks of it while a run is launched, followed and taken back.

Objects are kept as they are applied; a namespace must be there first, as on a real server, on its dry run too. What a
scheduler, a kubelet and the Job controller would do, a test does: `pod`, `preempt`, `log`, `finish`.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import re
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from http_servers import HttpHandler, HttpServer

KINDS = {
    "": {"namespaces": "Namespace", "serviceaccounts": "ServiceAccount", "configmaps": "ConfigMap",
         "services": "Service", "pods": "Pod", "events": "Event", "persistentvolumeclaims": "PersistentVolumeClaim",
         "nodes": "Node", "secrets": "Secret"},
    "authorization.k8s.io/v1": {"selfsubjectaccessreviews": "SelfSubjectAccessReview"},
    "storage.k8s.io/v1": {"storageclasses": "StorageClass"},
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "apiextensions.k8s.io/v1": {"customresourcedefinitions": "CustomResourceDefinition"},
    "apiregistration.k8s.io/v1": {"apiservices": "APIService"},
    "monitoring.coreos.com/v1": {"podmonitors": "PodMonitor"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "batch/v1": {"jobs": "Job"},
    "jobset.x-k8s.io/v1alpha2": {"jobsets": "JobSet"},
    "trainer.kubeflow.org/v1alpha1": {"trainjobs": "TrainJob", "trainingruntimes": "TrainingRuntime"},
    "kubeflow.org/v1": {"pytorchjobs": "PyTorchJob"},
    "kueue.x-k8s.io/v1beta2": {"localqueues": "LocalQueue"},
    "ray.io/v1": {"rayjobs": "RayJob"},
    "batch.volcano.sh/v1alpha1": {"jobs": "Job"},
}
CLUSTER_WIDE = ("Namespace", "Node", "SelfSubjectAccessReview", "StorageClass", "CustomResourceDefinition",
                "APIService")
OWNERS = ("jobs", "jobsets", "trainjobs", "pytorchjobs", "rayjobs")
OBJECT = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+/[^/]+))(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?")


class KubernetesApi(HttpServer):
    """One server on a port of its own, which it keeps while it is away and comes back."""

    def __init__(self, *, without: tuple[str, ...] = ()) -> None:
        self.kinds = {group: kinds for group, kinds in KINDS.items() if group not in without}
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        """By plural, namespace and name."""
        self.logs: dict[str, list[str]] = {}
        self.requests: list[tuple[str, str]] = []
        self.deletions: list[tuple[str, str]] = []
        """Names and propagation policies."""
        self.is_token_good = True
        self.refusal = ""
        """What the server says to every job it is asked to take."""
        self.forbidden: tuple[str, ...] = ()
        """Plurals that the asker may not touch."""
        self.denied: tuple[str, ...] = ()
        """Rights that a SelfSubjectAccessReview denies, such as `create jobs`."""
        self.ending_s = 0.2
        """From a deletion to the end of the pods."""
        self.is_hanging = False
        """Connections are taken, and nothing is answered."""
        self.cut_logs = 0
        """So many followed logs are cut off after their first lines, as a proxy does."""
        self._lock = threading.RLock()
        super().__init__(_Handler)

    def kubeconfig(self, folder: Path) -> Path:
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "training",
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "me", "user": {"token": "none-that-is-sent"}}],
            "contexts": [{"name": "training", "context": {"cluster": "here", "user": "me"}}],
        }))
        return path

    def put(self, plural: str, name: str, namespace: str = "embark", **fields: Any) -> dict[str, Any]:
        with self._lock:
            found = self.objects.setdefault((plural, namespace, name), {"metadata": {"name": name}})
            found["metadata"].setdefault("uid", str(uuid.uuid4()))
            found["metadata"].setdefault("creationTimestamp", _now())
            found["metadata"].update(fields.pop("metadata", {}))
            found.update(fields)
            return found

    def pod(self, name: str, of: str, *, index: int, container: str = "trainer", phase: str = "Pending",
            waits: str = "", conditions: tuple[dict[str, str], ...] = (), created: str = "",
            labels: dict[str, str] | None = None, node: str = "") -> None:
        """As the Job controller makes it and the kubelet describes it."""
        state: dict[str, Any] = {"Running": {"running": {"startedAt": _now()}},
                                 "Succeeded": {"terminated": {"exitCode": 0, "reason": "Completed"}}}.get(phase, {})
        if waits:
            state = {"waiting": {"reason": waits}}
        status = {"phase": phase, "conditions": list(conditions),
                  "containerStatuses": [{"name": container, "restartCount": 0, "state": state}] if state else []}
        metadata: dict[str, Any] = {"labels": {"app.kubernetes.io/instance": of,
                                               "batch.kubernetes.io/job-completion-index": str(index),
                                               **(labels or {})}}
        if created:
            metadata["creationTimestamp"] = created
        self.put("pods", name, spec={"containers": [{"name": container}], **({"nodeName": node} if node else {})},
                 status=status, metadata=metadata)

    def preempt(self, name: str, code: int = 75) -> None:
        self.end_pod(name, code)["conditions"].append(
            {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"})

    def end_pod(self, name: str, code: int) -> dict[str, Any]:
        status: dict[str, Any] = self.objects[("pods", "embark", name)]["status"]
        status["phase"] = "Failed"
        status["containerStatuses"][0]["state"] = {"terminated": {"exitCode": code, "reason": "Error"}}
        return status

    def log(self, pod: str, *lines: str) -> None:
        self.logs.setdefault(pod, []).extend(f"{_now_nanos()} {line}" for line in lines)

    def finish(self, plural: str, name: str, condition: str = "Complete", **more: str) -> None:
        self.objects[(plural, "embark", name)]["status"] = {
            "conditions": [{"type": condition, "status": "True", **more}]}
        for (kind, _, _), found in list(self.objects.items()):
            if kind == "pods" and found["status"]["phase"] == "Running":
                found["status"]["phase"] = "Succeeded" if condition == "Complete" else "Failed"
                found["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 0}}

    def event(self, about: str, reason: str, message: str) -> None:
        self.put("events", f"{about}.{uuid.uuid4().hex[:8]}", involvedObject={"name": about}, reason=reason,
                 message=message, type="Warning", lastTimestamp=_now())

    def names(self, plural: str) -> set[str]:
        with self._lock:  # an object that is being put is not complete
            return {name for kind, _, name in self.objects if kind == plural}

    def delete(self, plural: str, namespace: str, name: str, policy: str) -> None:
        with self._lock:
            self.deletions.append((f"{plural}/{name}", policy))
            found = self.objects[(plural, namespace, name)]
            if plural not in OWNERS:
                del self.objects[(plural, namespace, name)]
                return
            found["metadata"]["deletionTimestamp"] = _now()
            mine = [key for key, pod in self.objects.items() if key[0] == "pods"
                    and pod["metadata"]["labels"]["app.kubernetes.io/instance"] == name]
            for key in mine:
                self.objects[key]["metadata"]["deletionTimestamp"] = _now()

        def end() -> None:
            time.sleep(self.ending_s)
            with self._lock:
                for key in (*mine, (plural, namespace, name)):
                    self.objects.pop(key, None)

        threading.Thread(target=end, daemon=True).start()

    def is_over(self, pod: str) -> bool:
        found = self.objects.get(("pods", "embark", pod))
        return found is None or found["status"]["phase"] in ("Succeeded", "Failed")


class _Handler(HttpHandler):
    owner: KubernetesApi

    def handle_any(self) -> None:
        split = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(split.query).items()}
        body = self.body()
        self.owner.requests.append((self.command, self.path))
        if self.owner.is_hanging:
            while self.owner.is_hanging:
                time.sleep(0.02)
            self.close_connection = True
            return None
        if not self.owner.is_token_good:  # kubectl sends none over plain HTTP, so that this is not asked of the header
            return self._refuse(401, "Unauthorized", "Unauthorized")
        found = self._discovery(split.path)
        if found is not None:
            return self.answer_json(200, found)
        match = OBJECT.fullmatch(split.path)
        if match is None:
            return self._refuse(404, "NotFound", "the server could not find the requested resource")
        if split.path.startswith("/api/v1/namespaces") and split.path.count("/") <= 4:
            name = split.path.split("/")[4] if split.path.count("/") == 4 else ""
            return self._object("", "namespaces", "", name, "", query, body)
        group = match["group"] or ""
        if match["plural"] not in self.owner.kinds.get(group, {}):
            return self._refuse(404, "NotFound", "the server could not find the requested resource")
        return self._object(group, match["plural"], match["namespace"] or "", match["name"] or "", match["sub"] or "",
                            query, body)

    do_GET = do_POST = do_PATCH = do_DELETE = handle_any  # noqa: N815

    def _object(self, group: str, plural: str, namespace: str, name: str, sub: str, query: dict[str, str],
                body: bytes) -> None:
        api, key = self.owner, (plural, namespace, name)
        if plural in api.forbidden:
            return self._refuse(403, "Forbidden", f'{plural} "{name}" is forbidden: User "me" cannot touch {plural}')
        if sub == "log":
            return self._log(name, query)
        if self.command == "GET" and not name and query.get("watch") in ("1", "true"):
            return self._watch(group, plural, namespace, query)
        if self.command == "GET" and not name:
            return self.answer_json(200, self._list(group, plural, namespace, query))
        if self.command == "GET":
            found = api.objects.get(key)
            return self.answer_json(200, self._whole(group, plural, found)) if found else self._missing(plural, name)
        if self.command == "DELETE":
            if key not in api.objects:
                return self._missing(plural, name)
            options = json.loads(body or b"{}")
            api.delete(*key, options.get("propagationPolicy", ""))
            return self.answer_json(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})
        if plural == "selfsubjectaccessreviews":
            asked = _resource_attributes(body)
            words = "/".join(filter(None, (asked.get(5), asked.get(6))))
            allowed = f"{asked[2]} {words}" not in api.denied
            return self.answer_json(201, self._whole(group, plural, {"status": {"allowed": allowed}}))
        given = _from_protobuf(body) if body.startswith(b"k8s\0") else yaml.safe_load(body)
        name = name or given["metadata"]["name"]
        if namespace and ("namespaces", "", namespace) not in api.objects:
            return self._missing("namespaces", namespace)
        if self.command == "POST" and (plural, namespace, name) in api.objects:
            return self._refuse(409, "AlreadyExists", f'{plural} "{name}" already exists')
        if plural in OWNERS and api.refusal:
            return self._refuse(422, "Invalid", api.refusal)
        if query.get("dryRun") == "All":
            return self.answer_json(200, self._whole(group, plural, given))
        retained = {field: value for field, value in given.items() if field not in ("metadata", "apiVersion", "kind")}
        found = api.put(plural, name, namespace, metadata=given["metadata"], **retained)
        return self.answer_json(201, self._whole(group, plural, found))

    def _list(self, group: str, plural: str, namespace: str, query: dict[str, str]) -> dict[str, Any]:
        wanted = [pair.partition("=") for pair in query.get("labelSelector", "").split(",") if pair]
        found = [one for (kind, of, _), one in list(self.owner.objects.items())
                 if kind == plural and namespace in ("", of) and all(
                     (value == labels.get(name)) if mark else name in labels for name, mark, value in wanted
                     for labels in [one["metadata"].get("labels", {})])]
        named = query.get("fieldSelector", "").partition("metadata.name=")[2]
        found = [one for one in found if named in ("", one["metadata"]["name"])]
        kind = self.owner.kinds[group][plural]
        return {"kind": f"{kind}List", "apiVersion": group or "v1", "metadata": {"resourceVersion": "1"},
                "items": [self._whole(group, plural, one) for one in found]}

    def _watch(self, group: str, plural: str, namespace: str, query: dict[str, str]) -> None:
        """Send the objects and each that changes, and bookmarks that say that these are all, while somebody reads."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        mark = self._whole(group, plural, {"metadata": {
            "resourceVersion": "1", "annotations": {"k8s.io/initial-events-end": "true"}}})
        known: dict[str, dict[str, Any]] = {}
        is_read = True
        while is_read:
            for one in copy.deepcopy(self._list(group, plural, namespace, query)["items"]):
                name = one["metadata"]["name"]
                one["metadata"] |= {"resourceVersion": "1", "namespace": namespace}
                if known.get(name) != one:
                    self._chunk(_watch_event("MODIFIED" if name in known else "ADDED", one))
                    known[name] = one
            is_read = self._chunk(_watch_event("BOOKMARK", mark))
            time.sleep(0.05)

    def _whole(self, group: str, plural: str, found: dict[str, Any]) -> dict[str, Any]:
        return {**found, "apiVersion": group or "v1", "kind": self.owner.kinds[group][plural]}

    def _log(self, pod: str, query: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        since, sent = query.get("sinceTime", ""), 0
        must_cut = query.get("follow") == "true" and self.owner.cut_logs > 0
        self.owner.cut_logs -= must_cut
        while True:
            is_over = query.get("follow") != "true" or self.owner.is_over(pod)
            lines = self.owner.logs.get(pod, [])
            for line in lines[sent:]:
                sent += 1
                if line[:19] >= since[:19]:
                    text = line if query.get("timestamps") == "true" else line.partition(" ")[2]
                    self._chunk(f"{text}\n".encode())
                    if must_cut:
                        self.close_connection = True
                        return
            if is_over and sent == len(self.owner.logs.get(pod, [])):
                self._chunk(b"")
                return
            time.sleep(0.02)

    def _chunk(self, data: bytes) -> bool:
        """Return whether anybody reads it."""
        with contextlib.suppress(OSError):
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
            return True
        return False

    def _discovery(self, path: str) -> dict[str, Any] | None:
        kinds = self.owner.kinds
        if path == "/version":
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.4"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(group) for group in kinds if group]}
        if path == "/openapi/v3":
            return {"paths": {_root(group)[1:]: {"serverRelativeURL": f"/openapi/v3{_root(group)}"}
                              for group in kinds}}
        for group, plurals in kinds.items():
            if path == _root(group):
                return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group or "v1", "resources": [
                    {"name": plural, "singularName": kind.lower(), "namespaced": kind not in CLUSTER_WIDE, "kind": kind,
                     "shortNames": ["pvc"] if plural == "persistentvolumeclaims" else [],
                     "verbs": ["create", "delete", "get", "list", "patch", "watch"]}
                    for plural, kind in plurals.items()]}
            if path == f"/openapi/v3{_root(group)}":
                return _openapi(group, plurals)
        return None

    def _missing(self, plural: str, name: str) -> None:
        self._refuse(404, "NotFound", f'{plural} "{name}" not found')

    def _refuse(self, code: int, reason: str, message: str) -> None:
        self.answer_json(code, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code,
                          "reason": reason, "message": message})


def _watch_event(kind: str, thing: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": thing}).encode() + b"\n"


def _resource_attributes(body: bytes) -> dict[int, str]:
    """The attributes of a SelfSubjectAccessReview by their numbers, of which 2 is the verb, 5 the resource and 6 the
    subresource; kubectl sends it as protobuf, after a magic number and inside a runtime.Unknown."""
    assert body.startswith(b"k8s\0")
    review = _fields(_fields(body[4:])[2][0])
    attributes = _fields(_fields(review[2][0])[1][0])
    return {number: values[0].decode() for number, values in attributes.items()}


@contextlib.contextmanager
def kubernetes_api(**options: Any) -> Iterator[KubernetesApi]:
    api = KubernetesApi(**options)
    try:
        yield api
    finally:
        api.down()


def _root(group: str) -> str:
    return f"/apis/{group}" if group else "/api/v1"


def _group(group: str) -> dict[str, Any]:
    name, _, version = group.partition("/")
    mine = {"groupVersion": group, "version": version}
    return {"name": name, "versions": [mine], "preferredVersion": mine}


def _openapi(group: str, plurals: dict[str, str]) -> dict[str, Any]:
    """Enough for kubectl to see that the server validates fields and knows dry runs itself."""
    name, _, version = group.rpartition("/")
    paths = {}
    for plural, kind in plurals.items():
        parameters = [{"name": word, "in": "query", "schema": {"type": "string"}} for word in
                      ("fieldValidation", "dryRun", "fieldManager", "force")]
        where = "" if kind in CLUSTER_WIDE else "/namespaces/{namespace}"
        paths[f"{_root(group)}{where}/{plural}/{{name}}"] = {"patch": {
            "parameters": parameters, "responses": {"200": {"description": "OK"}},
            "x-kubernetes-action": "patch",
            "x-kubernetes-group-version-kind": {"group": name, "version": version or "v1", "kind": kind}}}
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.36.4"}, "paths": paths}


def _from_protobuf(body: bytes) -> dict[str, Any]:
    """Name and entries of what `kubectl create` sends: a runtime.Unknown with a Namespace or a Secret in it."""
    thing = _fields(_fields(body[4:])[2][0])
    entries = [_fields(one) for one in thing.get(2, [])]
    return {"metadata": {"name": _fields(thing[1][0])[1][0].decode()},
            "data": {entry[1][0].decode(): base64.b64encode(entry[2][0]).decode() for entry in entries if 2 in entry}}


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """The fields of a message of Protocol Buffers by their numbers; of numbers none."""
    found: dict[int, list[bytes]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        tag = number()
        if tag & 7 == 0:
            number()
            continue
        size = number()
        found.setdefault(tag >> 3, []).append(message[at:at + size])
        at += size
    return found


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _now_nanos() -> str:
    now_ns = time.time_ns()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_ns // 10**9)) + f".{now_ns % 10**9:09d}Z"
