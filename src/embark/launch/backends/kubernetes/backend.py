"""Kubernetes, through kubectl: a Job, JobSet, TrainJob, PyTorchJob or RayJob, from the very files that are rendered."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from embark.catalog import load_catalog
from embark.errors import Interrupted, UserError
from embark.formatting import pluralize, to_one_line
from embark.launch.backend import CancelResult, LaunchRequest, LogLine, Notify, Resource, RunEvent, RunHandle, Status
from embark.launch.backends.kubernetes.kinds import INSTANCE, KINDS, RunKind
from embark.launch.backends.kubernetes.kubectl import (
    Cluster,
    Forbidden,
    Kubectl,
    Patience,
    classify_error,
    cluster_error,
    current_context,
)
from embark.launch.backends.kubernetes.log_follower import PodLogFollower
from embark.launch.backends.kubernetes.status import Pod, event_of, pod_of, status_of
from embark.launch.shell import CommandResult, LineStream, Shell
from embark.render.file import File
from embark.render.job import Job, make_job
from embark.render.launch_script import MANIFESTS
from embark.render.location import location_of
from embark.render.render import render
from embark.render.settings import grace_s
from embark.spec import RunSpec
from embark.store import run_uri

NAME = "kubernetes"
POLL_S = 5.0
END_MARGIN_S = 60.0
"""Beyond the pods' grace, until a deleted job is gone."""


class Kubernetes:
    """The cluster that kubectl is set to when a run is launched; afterwards the one that the run is in."""

    name = NAME

    def __init__(self, shell: Shell, *, tell: Notify, patience: Patience | None = None, poll_s: float = POLL_S,
                 context: str = "") -> None:
        """`context`: of kubectl, for a run that is launched; empty: the current one."""
        self._shell = shell
        self._context = context
        self._tell = tell
        self._patience = patience
        self._poll_s = poll_s

    def handle_of(self, spec: RunSpec) -> RunHandle:
        """What the run will be found by. Refuses what cannot be rendered."""
        job = make_job(spec, load_catalog())
        kubeconfig = _absolute(os.environ.get("KUBECONFIG", ""))
        where: dict[str, str | int] = {
            "context": self._context or current_context(self._shell, kubeconfig), "kubeconfig": kubeconfig,
            "namespace": job.namespace,
            "object": job.name, "target": spec.place.target, "cloud": job.cloud, "num_nodes": job.num_pods,
            "queue": spec.place.queue, "claim": job.claim_name if spec.place.volume else "",
            "config": job.config_name, "grace_s": grace_s(job), "pool": location_of(job).pool,
            "service_account": spec.place.service_account,
        }
        return RunHandle(spec.name, self.name, where, job.title, run_uri(spec.store.root, spec.name), job.usd_per_hour)

    def check(self, order: LaunchRequest) -> None:
        place, handle = order.spec.place, order.handle
        if not place.image:
            raise UserError("place.image is not set: the cluster has no image to pull",
                            fix="build the Dockerfile that embark render writes, push it, and --set "
                                "place.image=REGISTRY/embark@sha256:…")
        kubectl, name = self._kubectl(handle), self._object(handle)
        there = kubectl.get(self._kind(handle).name, name)
        if there is not None:
            raise UserError(f"{self._kind(handle).name}/{name} is in namespace {place.namespace} already",
                            fix=f"embark status {handle.name}; embark cancel {handle.name} takes it away, and its "
                                "checkpoints stay; or another --set name=…")
        if place.queue and not kubectl.has("localqueues.kueue.x-k8s.io", place.queue):
            raise UserError(f"the namespace {place.namespace} has no queue {place.queue}",
                            fix="embark render writes kueue.yaml: kubectl apply -f it once, or leave place.queue out")
        if place.volume and not kubectl.has("persistentvolumeclaims", str(handle.where["claim"])):
            raise UserError(f"the claim {handle.where['claim']} of place.volume is not there",
                            fix="embark render writes storage.sh: run it once")

    def submit(self, order: LaunchRequest) -> None:
        """The server checks everything first, so that what is wrong is refused before anything is made."""
        handle, kubectl = order.handle, self._kubectl(order.handle)
        manifest = self._manifest(make_job(order.spec, load_catalog()))
        namespace, text = kubectl.cluster.namespace, manifest.text
        # A dry run of the server knows no namespace that it has not kept.
        if not self._make_namespace(order, kubectl):
            text = _without_namespace(text)
        kubectl.apply(text, manifest.path, is_try=True)
        kind, name = self._kind(handle).name, self._object(handle)
        order.note(Resource(f"{kind}/{name} with its ConfigMap, Service and service account in namespace {namespace}",
                         f"embark cancel {handle.name}"))
        kubectl.apply(text, manifest.path, is_try=False)

    def status(self, handle: RunHandle) -> Status:
        kubectl = self._kubectl(handle)
        job = kubectl.get(self._kind(handle).name, self._object(handle))
        if job is None:
            return Status("gone", f"{self._kind(handle).name}/{self._object(handle)} is not in namespace "
                                  f"{handle.where['namespace']}: it was deleted, or removed a day after it ended",
                          f"its checkpoints and events are in {handle.run_uri}")
        return status_of(self._kind(handle).read(job), self._pods(handle), self.events(handle),
                         num_nodes=int(handle.where["num_nodes"]), queue=str(handle.where["queue"]))

    def logs(self, handle: RunHandle, *, follow: bool = False) -> Iterator[LogLine]:
        following = PodLogFollower(lambda pod, since, goes_on: self._open_log(handle, pod, since, goes_on),
                              lambda pod, done: self._log_failed(handle, pod, done))
        pods = self._log_pods(handle)
        if not pods and not follow:
            status = self.status(handle)
            raise UserError(f"{handle.name} has no pods, so no logs: it is {status.state}. {status.reason}",
                            fix=status.fix)
        as_read = self._kind(handle).line
        yield from map(as_read, following.now(pods))
        if follow:
            yield from map(as_read, following.on(lambda: self._log_pods(handle), lambda: self._is_over(handle),
                                                 self._poll_s))

    def events(self, handle: RunHandle) -> list[RunEvent]:
        name = self._object(handle)
        found = [event_of(one) for one in self._kubectl(handle).items("events")]
        ours = [event for event in found if event.source == name or event.source.startswith(f"{name}-")]
        return sorted(ours, key=lambda event: event.time_s)

    def cancel(self, handle: RunHandle) -> CancelResult:
        kubectl, kind, name = self._kubectl(handle), self._kind(handle).name, self._object(handle)
        removed = []
        if kubectl.delete(kind, name):
            if not self._wait_until_gone(handle):
                return CancelResult((), self._remains(handle), is_complete=False)
            removed.append(f"{kind}/{name}")
        removed += [small for small in self._small_objects(handle) if kubectl.delete(*small.split("/"))]
        return CancelResult(tuple(removed), self._remains(handle))

    def _make_namespace(self, order: LaunchRequest, kubectl: Kubectl) -> bool:
        """Where it is missing. False: there must be one, and it cannot even be asked for."""
        namespace = kubectl.cluster.namespace
        try:
            is_there = kubectl.get("namespaces", namespace, in_namespace=False) is not None
        except Forbidden:  # who has rights in one namespace alone has been given that one
            return False
        if not is_there:
            order.note(Resource(f"namespace {namespace}", kubectl.cluster.line("delete", "namespace", namespace)))
            kubectl.make_namespace()
        return True

    def _wait_until_gone(self, handle: RunHandle) -> bool:
        kubectl, grace = self._kubectl(handle), int(handle.where["grace_s"])
        until_s, said = time.monotonic() + grace + END_MARGIN_S, ""
        try:
            while kubectl.get(self._kind(handle).name, self._object(handle)) is not None:
                num_up = sum(pod.phase == "Running" for pod in self._pods(handle))
                now = f"{pluralize(num_up, 'pod')} told to end; each saves a last checkpoint, within {grace} s"
                if num_up and now != said:
                    self._tell(now)
                    said = now
                if time.monotonic() > until_s:
                    return False
                time.sleep(min(self._poll_s, 2.0))
        except KeyboardInterrupt:
            raise Interrupted(f"stopped waiting; {handle.name} was told to end, and the cluster goes on ending it",
                              fix=f"embark cancel {handle.name} once more takes the rest away") from None
        return True

    def _remains(self, handle: RunHandle) -> tuple[Resource, ...]:
        cluster = self._cluster(handle)
        namespace = cluster.namespace
        things = [Resource(f"namespace {namespace} with its service account {handle.where['service_account']}",
                        cluster.line("delete", "namespace", namespace) + ", if no other run is in it")]
        if claim := handle.where["claim"]:
            things.append(Resource(f"the volume's claim {claim}, with its data",
                                cluster.line("delete", "pvc", str(claim), f"--namespace={namespace}")))
        things.append(Resource(f"the machines of node pool {handle.where['pool']}, paid until it shrinks",
                            "the clean verb of the rendered train_dlrm_… script"))
        things.append(Resource(f"checkpoints and events in {handle.run_uri}", "nothing removes them unasked"))
        return tuple(things)

    def _small_objects(self, handle: RunHandle) -> list[str]:
        """What was made beside the job for this run alone."""
        name, target = self._object(handle), handle.where["target"]
        found = [f"configmap/{handle.where['config']}"]
        if target == "job" and int(handle.where["num_nodes"]) > 1:
            found.append(f"service/{name}")
        if target == "trainjob":
            found.append(f"trainingruntime.trainer.kubeflow.org/{name}")
        return found

    def _manifest(self, job: Job) -> File:
        path = MANIFESTS[job.spec.place.target][0]
        return next(file for file in render(job) if file.path == path)

    def _open_log(self, handle: RunHandle, pod: Pod, since: str, goes_on: bool) -> LineStream:
        kubectl, kind = self._kubectl(handle), self._kind(handle)
        container = kind.log_container or kind.container
        options = [f"--container={container}"] if container else []
        options += ["--timestamps", *([f"--since-time={since}"] if since else [])]
        options += ["--follow"] if goes_on else []
        return self._shell.lines(kubectl.words("logs", pod.name, *options))

    def _log_failed(self, handle: RunHandle, pod: Pod, done: CommandResult) -> None:
        trouble = classify_error(done)
        if trouble in ("token", "forbidden"):
            raise cluster_error(done, self._cluster(handle))
        if trouble not in ("not found", "away"):  # replaced meanwhile; or the next look at the pods waits, and says so
            self._tell(f"the log of {pod.name} could not be read: {to_one_line(done.err)[:300]}")

    def _is_over(self, handle: RunHandle) -> bool:
        return self.status(handle).has_ended

    def _pods(self, handle: RunHandle) -> list[Pod]:
        """Of the machines that train."""
        kind = self._kind(handle)
        found = self._kubectl(handle).items("pods", f"{INSTANCE}={self._object(handle)}")
        # The head of a Ray cluster trains nothing.
        return [pod_of(one, kind.container) for one in found
                if one["metadata"].get("labels", {}).get("app.kubernetes.io/component") != "head"]

    def _log_pods(self, handle: RunHandle) -> list[Pod]:
        kind = self._kind(handle)
        if not kind.log_label:
            return self._pods(handle)
        found = self._kubectl(handle).items("pods", f"{kind.log_label}={self._object(handle)}")
        return [pod_of(one, kind.log_container) for one in found]

    def _kind(self, handle: RunHandle) -> RunKind:
        return KINDS[str(handle.where["target"])]

    def _object(self, handle: RunHandle) -> str:
        """The object's name."""
        return str(handle.where["object"])

    def _cluster(self, handle: RunHandle) -> Cluster:
        where = handle.where
        return Cluster(str(where["context"]), str(where["kubeconfig"]), str(where["cloud"]), str(where["namespace"]))

    def _kubectl(self, handle: RunHandle) -> Kubectl:
        return Kubectl(self._shell, self._cluster(handle), tell=self._tell, patience=self._patience)


def _without_namespace(text: str) -> str:
    """The same objects but for the namespace itself."""
    import yaml

    documents = text.split("\n---\n")
    return "\n---\n".join(one for one in documents if (yaml.safe_load(one) or {}).get("kind") != "Namespace")


def _absolute(kubeconfig: str) -> str:
    """So that another terminal, in another folder, finds the same files."""
    return os.pathsep.join(str(Path(path).expanduser().absolute()) for path in kubeconfig.split(os.pathsep) if path)
