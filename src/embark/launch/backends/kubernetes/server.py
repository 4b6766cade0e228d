"""Kubernetes, through kubectl: an exported model's Deployment or InferenceService, from the file that is rendered."""

from collections.abc import Mapping, Sequence
from typing import Any

from embark.catalog import load_catalog
from embark.formatting import pluralize
from embark.kubernetes.names import INSTANCE
from embark.kubernetes.objects import condition_of
from embark.launch.backend import CancelResult, LaunchRequest, Reason, Replica, Resource, RunEvent, RunHandle, Status
from embark.launch.backend import time_s as to_time_s
from embark.launch.backends.kubernetes.backend import Kubernetes, require_image
from embark.launch.backends.kubernetes.pods import PodStatus
from embark.launch.backends.kubernetes.status import RunKind
from embark.render.job import make_job
from embark.render.serving import artifact_of, server_name
from embark.render.targets.serve import CONTAINER, FILES, GRACE_S, SERVER
from embark.spec import RunSpec

KINDS = {"serve": RunKind("deployment.apps", CONTAINER["serve"]),
         "kserve": RunKind("inferenceservice.serving.kserve.io", CONTAINER["kserve"])}
SCALERS = {"hpa": "horizontalpodautoscaler.autoscaling", "keda": "scaledobject.keda.sh"}


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
        require_image(request.spec)
        self._find(request.handle)

    def status(self, handle: RunHandle) -> Status:
        found = self._find(handle)
        if found is None:
            return Status(state="gone", reason=f"{self._title(handle)} is not in namespace "
                          f"{handle.where['namespace']}", fix="embark launch starts it")
        return server_status(found, self._pods(handle), self.events(handle), least=handle.where["min_replicas"])

    def cancel(self, handle: RunHandle) -> CancelResult:
        kubectl, name, target = self._kubectl(handle), self._object(handle), handle.where["target"]
        # The autoscaler first, which would otherwise look for what it scales.
        beside = [SCALERS[handle.where["autoscaler"]], "poddisruptionbudget.policy", "service"]
        kinds = [*(beside if target == "serve" else []), self._kind(handle).name,
                 *(["configmap"] if handle.where["config"] else [])]
        removed = [f"{kind}/{name}" for kind in kinds if kubectl.delete(kind, name)]
        if removed and not self._wait(handle, lambda: not self._pods(handle), GRACE_S + 30.0):
            return CancelResult(tuple(removed), self._remains(handle), is_complete=False)
        return CancelResult(tuple(removed), self._remains(handle))

    def _manifest(self, spec: RunSpec) -> str:
        return FILES[spec.place.target]

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


def server_status(
    found: Mapping[str, Any], pods: Sequence[PodStatus], events: Sequence[RunEvent], *, least: int
) -> Status:
    """Return the status of a Deployment or an InferenceService of at least `least` replicas."""
    status, metadata = found.get("status") or {}, found["metadata"]
    replicas = tuple(Replica(pod.name, None, "ending" if pod.is_leaving else pod.phase.lower(), pod.why.text,
                             pod.since_s) for pod in sorted(pods, key=lambda pod: pod.name))
    num_restarts = sum(pod.num_container_starts for pod in pods)
    is_deployment = found.get("kind") == "Deployment"
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
