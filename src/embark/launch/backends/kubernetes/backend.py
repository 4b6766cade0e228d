"""Kubernetes, through kubectl: a Job, JobSet, TrainJob, PyTorchJob or RayJob, from the very files that are rendered."""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from embark.catalog import load_catalog
from embark.errors import UserError
from embark.formatting import pluralize, to_one_line
from embark.kubernetes.contract import Forbidden
from embark.kubernetes.names import COMPONENT, INSTANCE
from embark.launch.backend import (
    CancelResult,
    LaunchBackend,
    LaunchRequest,
    LogLine,
    LogSource,
    ReadLines,
    Resource,
    RunEvent,
    RunHandle,
    Status,
    read_logs,
)
from embark.launch.shell import CommandResult, Shell
from embark.lint.rendered import render_spec
from embark.render.job import Job, make_job
from embark.render.targets.kubernetes import MANIFESTS
from embark.spec import RunSpec
from embark.values import JsonDict
from .kubectl import Cluster, Kubectl, classify_error
from .pods import PodLogPosition, PodStatus
from .status import KINDS, RunKind, event_of, failed_condition, status_of

CONTRACT = "embark doctor --cloud SPEC checks all that the cluster must have"
END_MARGIN_S = 60.0  # Beyond the pods' grace, until a deleted job is gone.


class Kubernetes(LaunchBackend):
    """The cluster that kubectl is set to when a run is launched; afterwards the one that the run is in."""

    name = "kubernetes"
    poll_s = 5.0  # Each look reads the log of every pod.

    def handle_of(self, spec: RunSpec) -> RunHandle:
        job = make_job(spec, load_catalog())
        where = {
            **self._cluster_of(job), "object": job.name, "target": spec.place.target, "num_nodes": job.num_pods,
            "min_nodes": job.min_nodes * job.machine.num_hosts, "queue": job.queue,
            "claim": job.claim_name, "config": job.config_name,
            "pool": job.location.pool
        }
        return RunHandle.of(job, self.name, where)

    def _cluster_of(self, job: Job) -> JsonDict:
        """Return what is needed to find the run's cluster and namespace again."""
        kubeconfig = _absolute(os.getenv("KUBECONFIG", ""))
        return {"context": self._context or Cluster(kubeconfig=kubeconfig).current_context(self._shell),
                "kubeconfig": kubeconfig, "namespace": job.namespace, "cloud": job.cloud,
                "service_account": job.place.service_account, "is_existing": job.place.is_existing}

    def check(self, request: LaunchRequest) -> None:
        place, handle = request.spec.place, request.handle
        require_image(request.spec, self._shell)
        kubectl = self._kubectl(handle)
        if self._find(handle) is not None:
            raise self._exists(f"{self._title(handle)} in namespace {place.namespace}", handle)
        queue = str(handle.where["queue"])
        if queue and not kubectl.has("localqueues.kueue.x-k8s.io", queue):
            raise UserError(f"the namespace {place.namespace} has no queue {queue}",
                            CONTRACT if place.is_existing else
                            "embark render writes kueue.yaml: kubectl apply -f it once, or leave place.queue out")
        if (claim := handle.where["claim"]) and not kubectl.has("persistentvolumeclaims", claim):
            raise UserError(f"the claim {claim} does not exist in namespace {place.namespace}",
                            CONTRACT if place.is_existing else "embark render writes storage.sh: run it once")

    def submit(self, request: LaunchRequest) -> None:
        """Apply the manifest, after the server has validated all of it."""
        handle, kubectl = request.handle, self._kubectl(request.handle)
        paths, namespace = self._manifests(request), kubectl.cluster.namespace
        files = sorted((one for one in render_spec(request.spec) if one.path in paths),
                       key=lambda one: paths.index(one.path))
        # A server-side dry run knows no namespace that does not exist.
        may_make = self._make_namespace(request, kubectl)
        texts = [one.text if may_make else _without_namespace(one.text) for one in files]
        name, text = ", ".join(one.path for one in files), "\n---\n".join(texts)
        kubectl.apply(text, name, is_check=True)
        beside = f"its ConfigMap, Service and account in namespace {namespace}"
        request.record(Resource(f"{self._title(handle)} with {beside}", f"embark cancel {handle.name}"))
        kubectl.apply(text, name, is_check=False)

    def status(self, handle: RunHandle) -> Status:
        job = self._find(handle)
        if job is None:
            return Status("gone", f"{self._title(handle)} is not in namespace "
                          f"{handle.where['namespace']}: it was deleted, or removed a day after it ended",
                          f"its checkpoints and events are in {handle.run_uri}")
        found, label = self._kind(handle).read(job), self._kind(handle).job_label
        has_jobs = bool(label) and failed_condition(found.get("status", {})) is not None
        jobs = self._kubectl(handle).items("jobs.batch", f"{label}={self._object(handle)}") if has_jobs else []
        return status_of(found, self._pods(handle), self.events(handle), jobs=jobs,
                         num_nodes=handle.where["num_nodes"],
                         min_nodes=handle.where.get("min_nodes", handle.where["num_nodes"]),
                         queue=handle.where["queue"])

    def log_reader(self, handle: RunHandle) -> ReadLines:
        positions: defaultdict[str, PodLogPosition] = defaultdict(PodLogPosition)

        def read() -> Iterator[LogLine]:
            pods = [pod for pod in self._log_pods(handle) if pod.has_started]
            sources = [self._log_source(handle, pod, positions[pod.name]) for pod in pods]
            return map(self._kind(handle).line, read_logs(sources))

        return read

    def events(self, handle: RunHandle) -> list[RunEvent]:
        name = self._object(handle)
        found = [event_of(one) for one in self._kubectl(handle).items("events")]
        ours = [event for event in found if event.source == name or event.source.startswith(f"{name}-")]
        return sorted(ours, key=lambda event: event.time_s)

    def cancel(self, handle: RunHandle) -> CancelResult:
        kubectl, kind, name = self._kubectl(handle), self._kind(handle).name, self._object(handle)
        removed = []
        grace_s, num_up = handle.where["grace_s"], sum(pod.phase == "Running" for pod in self._pods(handle))
        if kubectl.delete(kind, name):
            if num_up:
                self._notify(f"stopping {pluralize(num_up, 'pod')}; each saves a checkpoint, within {grace_s} s")
            if not self._wait(handle, lambda: self._find(handle) is None, grace_s + END_MARGIN_S):
                return CancelResult((), self._remains(handle), is_complete=False)
            removed.append(self._title(handle))
        removed += [small for small in self._small_objects(handle) if kubectl.delete(*small.split("/"))]
        return CancelResult(tuple(removed), self._remains(handle))

    def _manifests(self, request: LaunchRequest) -> list[str]:
        """Return the paths of the manifests that are applied, in their order."""
        return [MANIFESTS[request.spec.place.target][0]]

    def _make_namespace(self, request: LaunchRequest, kubectl: Kubectl) -> bool:
        """Make the namespace if it is missing. False if namespaces may not even be read, so that it must exist."""
        namespace = kubectl.cluster.namespace
        try:
            is_there = kubectl.get("namespaces", namespace, in_namespace=False) is not None
        except Forbidden:  # whose rights end at one namespace has been given that one
            return False
        if not is_there and request.spec.place.is_existing:
            raise UserError(f"the cluster has no namespace {namespace}",
                            CONTRACT)
        if not is_there:
            request.record(Resource(f"namespace {namespace}", kubectl.cluster.line("delete", "namespace", namespace)))
            kubectl.make_namespace()
        return True

    def _remains(self, handle: RunHandle) -> tuple[Resource, ...]:
        cluster = self._cluster(handle)
        namespace = cluster.namespace
        if handle.where.get("is_existing"):  # whose namespace, claim and machines are someone else's
            return (handle.checkpoints,)
        found = [Resource(f"namespace {namespace} with its service account {handle.where['service_account']}",
                        cluster.line("delete", "namespace", namespace) + ", if no other run is in it")]
        if claim := handle.where["claim"]:
            found.append(Resource(f"the volume's claim {claim}, with its data",
                                cluster.line("delete", "pvc", str(claim), f"--namespace={namespace}")))
        found.append(Resource(f"the machines of node pool {handle.where['pool']}, paid until it shrinks",
                            "the clean command of the rendered train_dlrm_… script"))
        found.append(handle.checkpoints)
        return tuple(found)

    def _small_objects(self, handle: RunHandle) -> list[str]:
        """Return objects that were created beside the job for this run alone."""
        name, target = self._object(handle), handle.where["target"]
        found = [f"configmap/{handle.where['config']}"]
        if target == "job" and handle.where["num_nodes"] > 1:
            found.append(f"service/{name}")
        if target == "trainjob":
            found.append(f"trainingruntime.trainer.kubeflow.org/{name}")
        return found

    def _log_source(self, handle: RunHandle, pod: PodStatus, position: PodLogPosition) -> LogSource:
        kubectl, kind = self._kubectl(handle), self._kind(handle)
        since = position.begin()
        stream = self._shell.lines(kubectl.words(
            "logs", pod.name, f"--container={kind.log_container or kind.container}", "--timestamps",
            *([f"--since-time={since}"] if since else [])))

        def on_failure(done: CommandResult) -> None:
            error = classify_error(done)
            if error in ("token", "forbidden"):
                raise kubectl.cluster.error(done)
            if error not in ("not found", "away"):  # replaced meanwhile; or the next look at the pods retries
                self._notify(f"cannot read the log of {pod.name}: {to_one_line(done.err)[:300]}")

        return LogSource(stream, lambda text: position.parse(pod, text), on_failure)

    def _pods(self, handle: RunHandle) -> list[PodStatus]:
        """Return the pods that train."""
        kind = self._kind(handle)
        found = self._kubectl(handle).items("pods", f"{INSTANCE}={self._object(handle)}")
        # The head of a Ray cluster trains nothing, nor do servers of the exported model.
        return [PodStatus.of(one, kind.container) for one in found
                if one["metadata"].get("labels", {}).get(COMPONENT) not in ("head", "serve")]

    def _log_pods(self, handle: RunHandle) -> list[PodStatus]:
        kind = self._kind(handle)
        if not kind.log_label:
            return self._pods(handle)
        found = self._kubectl(handle).items("pods", f"{kind.log_label}={self._object(handle)}")
        return [PodStatus.of(one, kind.log_container) for one in found]

    def _find(self, handle: RunHandle) -> JsonDict | None:
        return self._kubectl(handle).get(self._kind(handle).name, self._object(handle))

    def _title(self, handle: RunHandle) -> str:
        return f"{self._kind(handle).name}/{self._object(handle)}"

    def _kind(self, handle: RunHandle) -> RunKind:
        return KINDS[handle.where["target"]]

    def _object(self, handle: RunHandle) -> str:
        return str(handle.where["object"])

    def _cluster(self, handle: RunHandle) -> Cluster:
        where = handle.where
        return Cluster(where["context"], where["kubeconfig"], where["cloud"], where["namespace"])

    def _kubectl(self, handle: RunHandle) -> Kubectl:
        return Kubectl(self._shell, self._cluster(handle), notify=self._notify, retry=self._retry)


def require_image(spec: RunSpec, shell: Shell) -> None:
    if not spec.place.image and not shell.is_dry:
        raise UserError("place.image is not set: the cluster has no image to pull",
                        "embark image SPEC --tag REGISTRY/embark:1 --push builds, pushes and sets it")


def _without_namespace(text: str) -> str:
    """Return the text without its Namespace object."""
    import yaml

    documents = text.split("\n---\n")
    return "\n---\n".join(one for one in documents if (yaml.safe_load(one) or {}).get("kind") != "Namespace")


def _absolute(kubeconfig: str) -> str:
    """Absolute paths, which another terminal in another folder finds too."""
    return os.pathsep.join(str(Path(path).expanduser().absolute()) for path in kubeconfig.split(os.pathsep) if path)
