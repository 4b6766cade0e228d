"""A rendered server on this machine: its replicas behind one address, one of them killed under load."""

from __future__ import annotations

import json
import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp

from embark.errors import EmbarkError, UserError
from embark.formatting import format_duration, pluralize
from embark.kubernetes.objects import K8sObject, Objects, at, name_of, namespace_of, rows
from embark.kubernetes.pods import Names, Pod, PodIdentity, main_container, make_pod, read_services
from embark.lint.check import lint_texts
from embark.lint.rule import Finding
from embark.rehearse.controller import RESTART_S, Observer
from embark.rehearse.downscale import Change
from embark.rehearse.kubelet import Kubelet, RunningPod
from embark.rehearse.load import LOOPBACK, NUM_CLIENTS, Clients, Service
from embark.rehearse.processes import Folders, Processes
from embark.rehearse.verdict import Check, Verdict

MAX_REPLICAS = 2
NUM_REQUESTS = 25  # Of each replica, before one is killed and after it is back.
NUM_ROWS = 8  # Of a request.
ROUTE = "/score"
_ANSWERED = re.compile(rf'^embark_serve_requests_total{{route="{ROUTE}",status="200"}} ([\d.e+]+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PreparedServer:
    """A server that can be rehearsed."""

    name: str
    pods: tuple[Pod, ...]
    ports: tuple[int, ...]  # Of each pod, here.
    probe: str  # The path of the readiness probe.
    metric: str  # That the autoscaler asks for; empty where it asks for none.
    rows: bytes  # A request.
    service: Check
    changes: tuple[Change, ...]
    lint: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class ServerReport:
    """A rehearsal that is over."""

    name: str
    pods: tuple[str, ...]
    verdict: Verdict
    lint: tuple[Finding, ...]
    changes: tuple[Change, ...]
    num_answered: int = 0
    num_retried: int = 0
    num_failed: int = 0
    left_behind: str = ""


def find_server(objects: Objects) -> K8sObject | None:
    """A Deployment whose container runs `embark serve`."""
    return next((one for one in objects.of_kind("Deployment") if served_artifact(one)), None)


def served_artifact(deployment: K8sObject) -> str:
    """What its container serves; empty where it serves nothing."""
    return next(iter(_serve_words(main_container(at(deployment, "spec.template.spec") or {}))), "")


def server_pods(deployment: K8sObject, objects: Objects) -> tuple[Pod, ...]:
    """As many as always run."""
    name, scaler = name_of(deployment), _scaler(deployment, objects)
    least = int(at(scaler, "spec.minReplicas") or at(scaler, "spec.minReplicaCount") or
                at(deployment, "spec.replicas") or 1)
    return tuple(make_pod(at(deployment, "spec.template") or {}, PodIdentity(
        name=f"{name}-{index}", namespace=namespace_of(deployment), index=index, group=name), objects)
        for index in range(least))


def _scaler(deployment: K8sObject, objects: Objects) -> K8sObject:
    return next((one for one in objects.of_kind("HorizontalPodAutoscaler", "ScaledObject")
                 if at(one, "spec.scaleTargetRef.name") == name_of(deployment)), {})


def prepare_server(texts: Mapping[str, str], objects: Objects, artifact: str = "") -> PreparedServer:
    """`artifact`: served in place of the manifest's."""
    deployment = find_server(objects)
    assert deployment is not None
    name, container = name_of(deployment), main_container(at(deployment, "spec.template.spec") or {})
    pods = list(server_pods(deployment, objects))
    least, num = len(pods), min(MAX_REPLICAS, len(pods))
    there = served_artifact(deployment)
    place = str(Path(artifact).expanduser().absolute()) if artifact and "://" not in artifact else artifact or there
    changes = [Change("replicas", f"at least {least}", str(num)),
               Change("the Service", "kube-proxy", f"connections to {LOOPBACK} go to the ready replicas in turn"),
               Change("probes", "by the manifest's periods", "several times a second"),
               Change("restart delay", "10 s, doubled each time", f"{RESTART_S:g} s"),
               *([Change("artifact", there, place)] if place != there else [])]
    ports = tuple(_free_port() for _ in range(num))
    pods = [_here(pod, there, place, port) for pod, port in zip(pods, ports, strict=False)]
    return PreparedServer(
        name, tuple(pods), ports, str(at(container, "readinessProbe.httpGet.path") or ""),
        _metric(_scaler(deployment, objects)), _request(place), _check_service(objects, pods[0], container),
        tuple(changes), tuple(one for one in lint_texts(dict(texts)) if one.level == "error"))


def rehearse_server(
    prepared: PreparedServer, observer: Observer, *, limit_s: float, keep: bool = False,
    on_start: Callable[[Sequence[Change], str], None],
) -> ServerReport:
    root = Path(mkdtemp(prefix="embark-rehearse-"))
    engine = Processes(Folders(root), Names({}), has_limits=True)
    changes = (*prepared.changes, *engine.changes())
    on_start(changes, "replicas are processes of this machine")
    left = ""
    try:
        engine.begin()
        kubelet = Kubelet(engine, observer, time.monotonic() + limit_s)
        try:
            with ServerRehearsal(prepared, kubelet) as run:
                verdict = run.judge()
                clients = run.clients
        finally:
            kubelet.close()
        left = engine.close(keep=True) if keep else ""
        return ServerReport(prepared.name, tuple(pod.name for pod in prepared.pods), verdict, prepared.lint, changes,
                            clients.num_answered, clients.num_retried, clients.num_failed, left)
    finally:
        if not left:
            engine.close(keep=False)
            shutil.rmtree(root, ignore_errors=True)


class ServerRehearsal:
    """The replicas behind one address, and the clients that send requests to it."""

    def __init__(self, prepared: PreparedServer, kubelet: Kubelet) -> None:
        self._prepared, self._kubelet = prepared, kubelet
        self._metric_values: list[float] = []
        self.replicas = [kubelet.start(pod, port, prepared.probe)
                         for pod, port in zip(prepared.pods, prepared.ports, strict=True)]
        self.service = Service(self.replicas)
        self.clients = Clients(self.service.port, ROUTE, prepared.rows)

    def __enter__(self) -> ServerRehearsal:
        self.service.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.clients.stop()
        self.service.stop()

    def check_ready(self) -> Check:
        """Waits until all are."""
        began_s = time.monotonic()
        is_ready = self._kubelet.wait(lambda: all(one.is_up for one in self.replicas))
        return Check("ready", is_ready, f"{pluralize(len(self.replicas), 'replica')} after "
                     f"{format_duration(time.monotonic() - began_s)}" if is_ready else
                     "a replica ended, or did not answer its readiness probe")

    def not_ready(self, checks: Sequence[Check]) -> Verdict:
        broken = next(one for one in self.replicas if not one.is_up)
        return Verdict(False, f"{broken.pod.name} does not become ready", "embark serve with the same arguments "
                       "shows why", "\n".join(broken.last_lines[-3:]), tuple(checks))

    def check_requests(self, *, before: str = "", is_answering: bool = True) -> Check:
        """Of the clients, which are stopped."""
        self.clients.stop()
        clients = self.clients
        text = f"{before}{clients.num_retried:,} sent again, {clients.num_failed:,} failed"
        return Check("requests", is_answering and not clients.num_failed, ": ".join([text, *clients.reasons[:1]]))

    def judge(self) -> Verdict:
        """What happened, in the order of the checks."""
        checks = [self._prepared.service, self.check_ready()]
        if not checks[-1].is_ok:
            return self.not_ready(checks)
        self._kubelet.note(f"all replicas are ready; {NUM_CLIENTS} clients send requests to {self.service.url}")
        self.clients.start()
        killed, *others = self.replicas
        is_answering = self._wait(lambda: all(_num_answered(one) >= NUM_REQUESTS for one in self.replicas))
        before, clients = self.clients.num_answered, self.clients
        self._kubelet.kill(killed)
        killed_s = time.monotonic()
        is_back = self._wait(lambda: killed.num_starts > 1 and killed.is_up) and \
            self._wait(lambda: _num_answered(killed) >= NUM_REQUESTS)
        back_s = time.monotonic() - killed_s
        clients.stop()
        checks += [
            self.check_requests(before=f"{before:,} before, {clients.num_answered - before:,} after; ",
                                is_answering=is_answering),
            Check("comes back", is_back, f"{killed.pod.name} answered again after {format_duration(back_s)}" if is_back
                  else f"{killed.pod.name} did not within the limit"),
            self._check_metric(), self.check_drain()]
        wrong = next((check for check in checks if not check.is_ok), None)
        if wrong is None:
            sentence = (f"{pluralize(len(self.replicas), 'replica')} answered {clients.num_answered:,} requests behind "
                        f"one address; one was killed under load: {clients.num_retried:,} sent again, none failed, "
                        f"back after {format_duration(back_s)}")
            return Verdict(True, sentence, checks=tuple(checks))
        fix = "serve.min_replicas = 2 or more: with one replica there is none to answer" if not others else ""
        return Verdict(False, f"{wrong.name}: {wrong.text}", fix, checks=tuple(checks))

    def check_drain(self) -> Check:
        """SIGTERM to all: each ends by itself within its grace period."""
        codes = self._kubelet.end(self.replicas, self._prepared.pods[0].grace_s)
        return Check("ends on SIGTERM", codes == [0] * len(codes), "exit codes " + ", ".join(map(str, codes)))

    def _check_metric(self) -> Check:
        name = self._prepared.metric
        if not name:
            return Check("autoscaler", False, "asks for no metric of the server")
        seen = self._metric_values
        return Check("autoscaler", bool(seen), f"{name} is exported; up to {max(seen):g} under this load" if seen else
                     f"{name} is not exported by the server")

    def _wait(self, is_so: Callable[[], bool]) -> bool:
        def seen() -> bool:
            for one in self.replicas:
                if one.is_up and self._prepared.metric:
                    self._metric_values += one.metric(self._prepared.metric)
            return is_so()

        return self._kubelet.wait(seen)


def _num_answered(replica: RunningPod) -> float:
    found = _ANSWERED.search(replica.get("/metrics") or "")
    return float(found[1]) if found else 0.0


def _serve_words(container: K8sObject) -> list[str]:
    """What follows `embark serve` in its command: the artifact, then options."""
    words = [str(word) for word in [*(container.get("command") or ()), *(container.get("args") or ())]]
    at_serve = next((index for index, word in enumerate(words) if word == "serve" and index and
                     words[index - 1].rpartition("/")[2] == "embark"), None)
    return [] if at_serve is None else words[at_serve + 1:]


def _here(pod: Pod, there: str, place: str, port: int) -> Pod:
    """The pod with an artifact, a port and an address of this machine."""
    words = [place if word == there else word for word in pod.words]
    for option, value in (("--port", str(port)), ("--host", LOOPBACK)):
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    # The machine's own /tmp: what is named there, such as the artifact, would otherwise be looked for in the pod's.
    return replace(pod, command=tuple(words), args=(), mounts=tuple(m for m in pod.mounts if m.path != "/tmp"))


def _request(place: str) -> bytes:
    """Rows without a value in any column: every model scores them."""
    from embark.export.artifact import open_artifact
    from embark.features.arrow.row_parser import RowParser

    try:
        rows_format = open_artifact(place).info.rows
    except EmbarkError as error:
        raise UserError(f"the artifact cannot be read here: {error.what}",
                        fix="--artifact runs/RUN/export serves another one, or give this machine access") from None
    columns = RowParser(rows_format.columns, rows_format.prepare).columns
    return json.dumps({"rows": [dict.fromkeys(columns)] * NUM_ROWS}).encode()


def _metric(scaler: K8sObject) -> str:
    """The first that it asks the server for."""
    names = [str(at(one, "pods.metric.name")) for one in rows(scaler, "spec.metrics") if at(one, "pods.metric.name")]
    queries = [str(at(one, "metadata.query") or "") for one in rows(scaler, "spec.triggers")]
    names += [found[0] for query in queries if (found := re.search(r"[a-zA-Z_:][\w:]*(?=\{)", query))]
    return names[0] if names else ""


def _check_service(objects: Objects, pod: Pod, container: K8sObject) -> Check:
    """The Service leads to the port that the container names."""
    service = next((one for one, read in zip(objects.of_kind("Service"), read_services(objects), strict=True)
                    if read.selects(pod)), None)
    if service is None:
        return Check("Service", False, "no Service selects the pods")
    ports = {str(value) for one in rows(container, "ports") for value in (one.get("name"), one.get("containerPort"))}
    wanted = [str(one.get("targetPort") or one.get("port")) for one in rows(service, "spec.ports")]
    is_ok = bool(wanted) and set(wanted) <= ports
    return Check("Service", is_ok, f"{name_of(service)} leads to port {', '.join(wanted)}" + (
        "" if is_ok else ", which the container does not have"))


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        return int(taken.getsockname()[1])
