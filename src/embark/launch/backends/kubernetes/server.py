"""Kubernetes, through kubectl: an exported model's Deployment or InferenceService, alone or with what trains it on a
stream, from the files that are rendered."""

from collections.abc import Sequence
from dataclasses import replace

from embark.catalog import load_catalog
from embark.errors import UserError
from embark.formatting import pluralize
from embark.kubernetes.contract import Forbidden
from embark.kubernetes.names import COMPONENT, INSTANCE, INSTANCE_TYPE
from embark.kubernetes.objects import at, condition_of, name_of, texts
from embark.kubernetes.pods import room_for
from embark.launch.backend import CancelResult, LaunchRequest, Reason, Replica, Resource, RunEvent, RunHandle, Status
from embark.launch.backend import time_s as to_time_s
from embark.render.job import make_job
from embark.render.monitoring import MONITOR_RESOURCES
from embark.render.serving import artifact_of, broker_name, memory_gib, secret_commands, server_name
from embark.render.targets.follow import BROKER_FILE
from embark.render.targets.follow import FILE as FOLLOW_FILE
from embark.render.targets.serve import CONTAINER, FILES, GRACE_S, METRICS_FILE, SERVER, resources, surge_of
from embark.render.yaml_text import plain
from embark.spec import RunSpec
from embark.values import JsonDict, JsonMap
from .backend import Kubernetes, require_image
from .kubectl import Kubectl, NoSuchKind
from .pods import PodStatus
from .status import RunKind

KINDS = {"serve": RunKind("deployment.apps", CONTAINER["serve"]),
         "kserve": RunKind("inferenceservice.serving.kserve.io", CONTAINER["kserve"]),
         "follow": RunKind("statefulset.apps", "")}
PARTS = ("statefulset.apps", "deployment.apps")  # Kinds of the objects with the pods of a deployment that follows.
_HPA = "horizontalpodautoscaler.autoscaling"
SCALERS = {"hpa": _HPA, "adapter": _HPA, "keda": "scaledobject.keda.sh"}
CLUSTER_KINDS = ("apiservices", "customresourcedefinitions", "namespaces")
CUSTOM_METRICS = "v1beta1.custom.metrics.k8s.io"


class KubernetesServer(Kubernetes):
    """A server of an exported model. Launching it again applies the file, and Kubernetes replaces the replicas in
    turn."""

    name = "kubernetes-server"

    def handle_of(self, spec: RunSpec) -> RunHandle:
        job = make_job(spec, load_catalog())
        name, serve = server_name(spec.name), job.spec.serve
        where = {**self._cluster_of(job), "object": server_name(job.name), "instance": job.name,
                 "target": spec.place.target, "min_replicas": serve.min_replicas, "autoscaler": serve.autoscaler,
                 "config": server_name(job.name) if spec.model.is_custom else "", "grace_s": GRACE_S}
        return RunHandle(name=name, backend=self.name, where=where, run_uri=artifact_of(spec),
                         title=f"{name}: {serve.min_replicas} to {pluralize(serve.max_replicas, 'replica')}")

    def check(self, request: LaunchRequest) -> None:
        require_image(request.spec, self._shell)
        handle, spec = request.handle, make_job(request.spec, load_catalog()).spec
        found, namespace = self._find(handle), handle.where["namespace"]
        for secret, command in secret_commands(spec, handle.where["instance"]).items():
            if not self._has(handle, "secrets", secret, otherwise=True):
                is_new = not self._has(handle, "namespaces", namespace, otherwise=True)
                raise UserError(f"the namespace {namespace} has no Secret {secret}", (
                    f"kubectl create namespace {namespace}; " if is_new else "") + command)
        account = spec.serve.service_account
        if spec.place.is_existing and not self._has(handle, "serviceaccounts", account, otherwise=True):
            raise UserError(f"the namespace {namespace} has no service account {account}, as which the servers read",
                            f"kubectl create serviceaccount {account} --namespace={namespace}, or set "
                                "serve.service_account")
        if spec.serve.autoscaler == "adapter" and not self._has(handle, "apiservices", CUSTOM_METRICS, otherwise=True):
            raise UserError('serve.autoscaler = "adapter": the cluster serves no custom metrics',
                            '"hpa" goes by CPU alone; or install an adapter, such as prometheus-adapter')
        if spec.place.target != "kserve":
            self._check_room(request, surge_of(spec) if found else spec.serve.min_replicas, is_rollout=bool(found))

    def _check_room(self, request: LaunchRequest, num: int, *, is_rollout: bool) -> None:
        """Compare the replicas that start beside what runs with the room on the nodes that there are."""
        handle, kubectl = request.handle, self._kubectl(request.handle)
        machine = request.spec.serve.machine
        pod = {"nodeSelector": {INSTANCE_TYPE: machine} if machine else {},
               "containers": [{"resources": plain(resources(request.spec))}]}
        try:
            nodes, pods = (kubectl.items(kind, everywhere=True) for kind in ("nodes", "pods"))
        except Forbidden:  # whose rights end at one namespace sees no nodes
            return
        room = room_for(pod, nodes, pods)
        if not nodes or room >= num:
            return
        what = f"{pluralize(num, 'replica')} of {memory_gib(request.spec)} GiB, and the nodes have room for {room} more"
        grows = any("karpenter.sh/nodepool" in texts(at(node, "metadata.labels")) for node in nodes) or self._has(
            handle, "configmaps", "cluster-autoscaler-status", otherwise=False, namespace="kube-system")
        if is_rollout and not grows:
            raise UserError(f"the rollout would not end: it starts {what}",
                            "--set serve.max_surge=0 ends a replica before the next one starts; or add a node")
        self._notify(f"it starts {what}: the others wait for nodes")

    def _has(self, handle: RunHandle, kind: str, name: str, *, otherwise: bool, namespace: str = "") -> bool:
        """Return whether there is such an object, or `otherwise` if that may not be known."""
        cluster = self._cluster(handle)
        kubectl = Kubectl(self._shell, replace(cluster, namespace=namespace or cluster.namespace), notify=self._notify,
                          retry=self._retry)
        if self._shell.is_dry:
            return otherwise
        try:
            return kubectl.get(kind, name, in_namespace=kind not in CLUSTER_KINDS) is not None
        except (Forbidden, NoSuchKind):
            return otherwise

    def status(self, handle: RunHandle) -> Status:
        found = self._find(handle)
        return self._gone(handle) if found is None else server_status(
            found, self._pods(handle), self.events(handle), least=handle.where["min_replicas"])

    def _gone(self, handle: RunHandle) -> Status:
        return Status("gone", f"{self._title(handle)} is not in namespace {handle.where['namespace']}",
                      "embark launch starts it")

    def cancel(self, handle: RunHandle) -> CancelResult:
        kubectl = self._kubectl(handle)
        removed = [f"{kind}/{name}" for kind, name in self._objects(handle) if kubectl.delete(kind, name)]
        is_over = not removed or self._wait(handle, lambda: not self._pods(handle), handle.where["grace_s"] + 30.0)
        return CancelResult(tuple(removed), self._remains(handle), is_complete=is_over)

    def _objects(self, handle: RunHandle) -> list[tuple[str, str]]:
        """Return kinds and names of what was created."""
        kinds = [*(self._beside(handle) if handle.where["target"] == "serve" else []), self._kind(handle).name,
                 *(["configmap"] if handle.where["config"] else [])]
        return [(kind, self._object(handle)) for kind in kinds]

    def _beside(self, handle: RunHandle) -> list[str]:
        """Return kinds beside a Deployment: the autoscaler first, which would otherwise look for what it scales."""
        return [SCALERS[handle.where["autoscaler"]], "poddisruptionbudget.policy", "networkpolicy.networking.k8s.io",
                "service", MONITOR_RESOURCES[handle.where["cloud"]]]

    def _manifests(self, request: LaunchRequest) -> list[str]:
        """Return that of the servers and, in a cluster whose Prometheus takes it, that of their metrics."""
        target, handle = request.spec.place.target, request.handle
        has_metrics = target != "kserve" and self._has(
            handle, "customresourcedefinitions", MONITOR_RESOURCES[handle.where["cloud"]], otherwise=False)
        return [FILES["kserve" if target == "kserve" else "serve"], *([METRICS_FILE] if has_metrics else [])]

    def _remains(self, handle: RunHandle) -> tuple[Resource, ...]:
        cluster, namespace = self._cluster(handle), handle.where["namespace"]
        model = Resource(f"the exported model in {handle.run_uri}", "remains until you delete it")
        if handle.where.get("is_existing"):
            return (model,)
        return (Resource(f"namespace {namespace} with its service account {handle.where['service_account']}",
                         cluster.line("delete", "namespace", namespace) + ", if nothing else is in it"), model)

    def _pods(self, handle: RunHandle) -> list[PodStatus]:
        (label, value), = SERVER.items()
        found = self._kubectl(handle).items("pods", f"{INSTANCE}={handle.where['instance']},{label}={value}")
        return [PodStatus.of(one, self._kind(handle).container) for one in found]

    def _kind(self, handle: RunHandle) -> RunKind:
        return KINDS[handle.where["target"]]


class KubernetesFollow(KubernetesServer):
    """A trainer that follows a stream, with its publisher, servers and broker. Launching it again applies the files,
    and what they change is replaced."""

    name = "kubernetes-follow"

    def handle_of(self, spec: RunSpec) -> RunHandle:
        job = make_job(spec, load_catalog())
        where = {**super().handle_of(spec).where, "object": job.name,
                 "broker": broker_name(job.name) if job.has_own_broker else ""}
        return RunHandle.of(job, self.name, where)

    def status(self, handle: RunHandle) -> Status:
        """Return the trainer's state, with what the other parts wait for."""
        found = {name_of(one): one for kind in PARTS for one in self._ours(handle, kind)}
        if self._object(handle) not in found:
            return self._gone(handle)
        events, pods = self.events(handle), self._ours(handle, "pods")
        parts = {name: server_status(one, [PodStatus.of(pod, "") for pod in pods if _part(pod) == _part(one)], events,
                                     least=1) for name, one in found.items()}
        own = parts.pop(self._object(handle))
        waiting = [f"{name}: {one.reason}" for name, one in parts.items() if "ready" in one.reason]
        fix = next((one.fix for one in (own, *parts.values()) if one.fix), "")
        everyone = tuple(replica for one in (own, *parts.values()) for replica in one.replicas)
        return replace(own.become(own.state, "; ".join(filter(None, [own.reason, *waiting])), fix), replicas=everyone)

    def _objects(self, handle: RunHandle) -> list[tuple[str, str]]:
        kinds = (*self._beside(handle), *PARTS, "configmap")
        return [(kind, name_of(one)) for kind in kinds for one in self._ours(handle, kind)]

    def _manifests(self, request: LaunchRequest) -> list[str]:
        return [*([BROKER_FILE] if request.handle.where["broker"] else []), FOLLOW_FILE, *super()._manifests(request)]

    def _remains(self, handle: RunHandle) -> tuple[Resource, ...]:
        claim, cluster = f"data-{handle.where['broker']}-0", self._cluster(handle)
        disk = Resource(f"the broker's disk, claim {claim}, which is paid",
                        cluster.line("delete", "pvc", claim, f"--namespace={cluster.namespace}"))
        return (*([disk] if handle.where["broker"] else []), *super()._remains(handle)[:1], handle.checkpoints)

    def _ours(self, handle: RunHandle, kind: str) -> list[JsonDict]:
        """Return the objects of a kind that belong to the deployment."""
        try:
            return self._kubectl(handle).items(kind, f"{INSTANCE}={handle.where['instance']}")
        except NoSuchKind:
            return []

    def _pods(self, handle: RunHandle) -> list[PodStatus]:
        return [PodStatus.of(one, "") for one in self._ours(handle, "pods") if _part(one)]


def _part(thing: JsonMap) -> str:
    """Return the component of a deployment that a pod or its owner belongs to."""
    return texts(at(thing, "metadata.labels")).get(COMPONENT, "")


def server_status(
    found: JsonMap, pods: Sequence[PodStatus], events: Sequence[RunEvent], *, least: int
) -> Status:
    """Return the status of a Deployment or an InferenceService of at least `least` replicas."""
    status, metadata = found.get("status") or {}, found["metadata"]
    replicas = tuple(Replica(pod.name, None, "ending" if pod.is_leaving else pod.phase.lower(), pod.why.text,
                             pod.since_s) for pod in sorted(pods, key=lambda pod: pod.name))
    num_restarts = sum(pod.num_container_starts for pod in pods)
    is_deployment = found.get("kind") in ("Deployment", "StatefulSet")
    num_wanted = int((found.get("spec") or {}).get("replicas") or least) if is_deployment else least
    num_ready = int(status.get("readyReplicas") or 0) if is_deployment else (
        num_wanted if condition_of(status, "Ready") else 0)

    server = Status("pending", replicas=replicas, num_restarts=num_restarts,
                    since_s=to_time_s(metadata.get("creationTimestamp", "")))
    if num_ready >= num_wanted:
        return server.become("running", f"restarted {pluralize(num_restarts, 'time')}" if num_restarts else "")
    waits = _why(pods, events)
    ready = f"{num_ready} of {pluralize(num_wanted, 'replica')} ready" + (f"; {waits.text}" if waits.text else "")
    if num_ready:
        return server.become("running", ready, waits.fix)
    progress = condition_of(status, "Progressing", "False") or {}
    if progress.get("reason") == "ProgressDeadlineExceeded":
        return server.become("failed", ready, waits.fix or "embark logs says why; embark launch again, once it is "
                                                           "corrected")
    return server.become("restarting" if num_restarts else "pending", ready, waits.fix)


def _why(pods: Sequence[PodStatus], events: Sequence[RunEvent]) -> Reason:
    """Why a replica is not ready."""
    waiting = [pod for pod in pods if not pod.is_leaving and (pod.phase == "Pending" or pod.why.text)]
    if not waiting:
        return Reason("" if pods else "no pod created yet")
    first = next((pod for pod in waiting if pod.why.fix), waiting[0])
    why = first.waits_for(events) if first.phase == "Pending" else first.why
    return Reason(f"{first.name}: {why.text}", why.fix)
