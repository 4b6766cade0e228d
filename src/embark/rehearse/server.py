"""Pods of services as processes of this machine, started, probed and restarted as a kubelet does it; and the rehearsal
of a rendered server: clients send requests to its replicas, and one of them is killed under load."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from tempfile import mkdtemp

from embark.errors import EmbarkError, UserError
from embark.formatting import format_duration, pluralize
from embark.kubernetes.objects import K8sObject, Objects, at, name_of, namespace_of, rows
from embark.kubernetes.pods import Names, Pod, PodIdentity, main_container, make_pod, read_services
from embark.launch.shell import LineMultiplexer, LineStream
from embark.lint.check import lint_texts
from embark.lint.rule import Finding
from embark.rehearse.controller import RESTART_S, Observer
from embark.rehearse.downscale import Change
from embark.rehearse.engines import LOOPBACK, Folders, Processes, Start, free_port
from embark.rehearse.verdict import Check, Verdict

NUM_CLIENTS = 4
REQUESTS_PER_CONNECTION = 10  # Then a client connects anew, to whichever replica is next.
RETRY_S = 1.0
ANSWER_S = 60.0
MAX_REASONS = 5


class Clients:
    """Threads that send the same request again and again until they are stopped.

    Each connection goes to the next replica that is up, as kube-proxy does it. A client sends a request once more, a
    second later, if its connection was closed or refused before an answer. Any other end of a request but a 200 is a
    failure.
    """

    def __init__(self, replicas: Sequence[RunningPod], path: str, body: bytes) -> None:
        self._replicas, self._path, self._body = replicas, path, body
        self._turns = count()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(NUM_CLIENTS)]
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self.num_answered = self.num_retried = self.num_failed = 0
        self.reasons: list[str] = []  # Reasons of failures.

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop once the requests that were sent are answered."""
        self._is_over.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            connection = self._connection()
            for _ in range(REQUESTS_PER_CONNECTION):
                if self._is_over.is_set():
                    break
                connection = self._request(connection)
            connection.close()

    def _request(self, connection: http.client.HTTPConnection) -> http.client.HTTPConnection:
        """Send one request, at most twice, and return the connection for the next."""
        for is_second in (False, True):
            try:
                connection.request("POST", self._path, self._body)
                answer = connection.getresponse()
                answer.read()
            except TimeoutError:
                self._count(f"no answer within {ANSWER_S:g} s")
            except (OSError, http.client.HTTPException) as error:
                if not is_second:
                    with self._lock:
                        self.num_retried += 1
                    connection.close()
                    self._is_over.wait(RETRY_S)
                    connection = self._connection()
                    continue
                self._count(f"the connection was closed twice: {error!r}")
            else:
                self._count("" if answer.status == 200 else f"status {answer.status}")
                return connection
            connection.close()
            return self._connection()
        raise AssertionError("the second try ends it")

    def _connection(self) -> http.client.HTTPConnection:
        up = [replica for replica in self._replicas if replica.is_up]
        # Port 0 refuses every connection.
        port = up[next(self._turns) % len(up)].port if up else 0
        return http.client.HTTPConnection(LOOPBACK, port, timeout=ANSWER_S)

    def _count(self, failure: str) -> None:
        with self._lock:
            self.num_answered += not failure
            self.num_failed += bool(failure)
            if failure and len(self.reasons) < MAX_REASONS:
                self.reasons.append(failure)


MAX_STARTS = 3  # Starts of a pod that ends before it is ready.


@dataclass(slots=True)
class RunningPod:
    """A running pod, as its kubelet sees it."""

    pod: Pod
    start: Start
    lines: LineStream
    port: int = 0  # 0: it gets no requests.
    probe: str = ""  # The path of the readiness probe.
    num_starts: int = 1
    is_ready: bool = False
    last_lines: list[str] = field(default_factory=list)

    @property
    def is_up(self) -> bool:
        """Whether a Service would send requests to it."""
        return self.is_ready and self.lines.code is None

    def get(self, path: str) -> str | None:
        """Return the body of the pod's answer; None without an answer."""
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self.port}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            return None

    def metric(self, name: str) -> list[float]:
        """Return values of a metric, for all labels."""
        return [float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([\d.e+-]+)$",
                                                     self.get("/metrics") or "", re.MULTILINE)]


class Kubelet:
    """Starts, probes and restarts the pods."""

    def __init__(self, engine: Processes, observer: Observer, until_s: float) -> None:
        """`until_s` is when to give up waiting, by `time.monotonic`."""
        self._engine, self._observer, self._until_s = engine, observer, until_s
        self._output, self._number = LineMultiplexer(), 0
        self.pods: list[RunningPod] = []

    def start(self, pod: Pod, port: int = 0, probe: str = "") -> RunningPod:
        self.pods.append(RunningPod(pod, *self._start(pod), port=port, probe=probe))
        return self.pods[-1]

    def note(self, text: str) -> None:
        self._observer.note(text)

    def kill(self, one: RunningPod) -> None:
        """Send SIGKILL, without notice."""
        self.note(f"{one.pod.name} is killed under load")
        self._engine.kill(one.start)

    def wait(self, is_so: Callable[[], bool]) -> bool:
        """Wait for a condition; False if the time limit passes or a pod was started too often."""
        while not is_so():
            self.take(0.05)
            self._look()
            if time.monotonic() > self._until_s or any(
                    one.num_starts > MAX_STARTS and not one.is_ready for one in self.pods):
                return False
        return True

    def end(self, pods: list[RunningPod], grace_s: float) -> list[int | None]:
        """Send SIGTERM to these pods; return their exit codes within the grace period."""
        for one in pods:
            self._engine.term(one.start)
        until_s = time.monotonic() + grace_s
        while time.monotonic() < until_s and any(one.lines.code is None for one in pods):
            self.take(0.05)
        return [one.lines.code for one in pods]

    def take(self, wait_s: float) -> None:
        """Show the lines that have come."""
        for key, text in self._output.take(wait_s):
            found = next(one for one in self.pods if one.pod.name == key.partition("#")[0])
            found.last_lines = [*found.last_lines[-20:], text]
            self._observer.line(found.pod.name, "", text)

    def close(self) -> None:
        self._output.close()

    def _look(self) -> None:
        for one in self.pods:
            if one.lines.code is not None:
                self.note(f"{one.pod.name} ended with {one.lines.code}; it is started again")
                time.sleep(RESTART_S)
                one.start, one.lines = self._start(one.pod)
                one.num_starts, one.is_ready = one.num_starts + 1, False
            elif one.port:
                one.is_ready = one.get(one.probe) is not None if one.probe else True

    def _start(self, pod: Pod) -> tuple[Start, LineStream]:
        start = Start(pod, self._number, 0)
        self._number += 1
        lines = self._engine.start(start)
        self._output.add(start.key, lines)
        return start, lines


MAX_REPLICAS = 2
NUM_REQUESTS = 25  # Requests to each replica, before one is killed and after it is back.
NUM_ROWS = 8  # Rows of a request.
ROUTE = "/score"
_ANSWERED = re.compile(rf'^embark_serve_requests_total{{route="{ROUTE}",status="200"}} ([\d.e+]+)', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedServices(ABC):
    """Services that can be rehearsed."""

    name: str
    changes: tuple[Change, ...]
    lint: tuple[Finding, ...]  # The linter's errors.

    @property
    @abstractmethod
    def names(self) -> Names:
        """The DNS names that lead to the pods."""

    @abstractmethod
    def judge(self, engine: Processes, kubelet: Kubelet) -> tuple[Verdict, Clients | None]:
        """Run the rehearsal and return its verdict, with the clients if there were any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedServer(PreparedServices):
    """A server that can be rehearsed."""

    pods: tuple[Pod, ...]
    ports: tuple[int, ...]  # The port of each pod here.
    probe: str  # The path of the readiness probe.
    metric: str  # The metric that the autoscaler asks for; empty if it asks for none.
    rows: bytes  # Body of the request that is sent.
    service: Check

    @property
    def names(self) -> Names:
        return Names({})

    def judge(self, engine: Processes, kubelet: Kubelet) -> tuple[Verdict, Clients]:
        run = ServerRehearsal(self, kubelet)
        try:
            return run.judge(), run.clients
        finally:
            run.clients.stop()


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
    """Return a Deployment whose container runs `embark serve`."""
    return next((one for one in objects.of_kind("Deployment") if served_artifact(one)), None)


def served_artifact(deployment: K8sObject) -> str:
    """Return the artifact that a Deployment's container serves; empty if it serves nothing."""
    return next(iter(_serve_words(main_container(at(deployment, "spec.template.spec") or {}))), "")


def server_pods(deployment: K8sObject, objects: Objects) -> tuple[Pod, ...]:
    """Return the pods that always run."""
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
    """Prepare a server's pods for this machine. `artifact` replaces the manifest's."""
    deployment = find_server(objects)
    assert deployment is not None
    name, container = name_of(deployment), main_container(at(deployment, "spec.template.spec") or {})
    pods = list(server_pods(deployment, objects))
    least, num = len(pods), min(MAX_REPLICAS, len(pods))
    there = served_artifact(deployment)
    uri = str(Path(artifact).expanduser().absolute()) if artifact and "://" not in artifact else artifact or there
    changes = [Change("replicas", f"at least {least}", str(num)),
               Change("the Service", "kube-proxy", "each client connects to the ready replicas in turn"),
               Change("probes", "by the manifest's periods", "several times a second"),
               Change("restart delay", "10 s, doubled each time", f"{RESTART_S:g} s"),
               *([Change("artifact", there, uri)] if uri != there else [])]
    ports = tuple(free_port() for _ in range(num))
    pods = [_here(pod, there, uri, port) for pod, port in zip(pods, ports, strict=False)]
    return PreparedServer(
        name=name, pods=tuple(pods), ports=ports, probe=str(at(container, "readinessProbe.httpGet.path") or ""),
        metric=_metric(_scaler(deployment, objects)), rows=_request(uri),
        service=_check_service(objects, pods[0], container), changes=tuple(changes),
        lint=tuple(one for one in lint_texts(dict(texts)) if one.level == "error"))


def rehearse_services(
    prepared: PreparedServices, observer: Observer, *, limit_s: float, keep: bool = False,
    on_start: Callable[[Sequence[Change], str], None],
) -> ServerReport:
    """Run the pods as processes. `on_start` gets what differs from the cluster, and the engine, before they begin."""
    root = Path(mkdtemp(prefix="embark-rehearse-"))
    engine = Processes(Folders(root), prepared.names, has_limits=True)
    changes = (*prepared.changes, *engine.changes())
    on_start(changes, "pods are processes of this machine")
    left = ""
    try:
        engine.begin()
        kubelet = Kubelet(engine, observer, time.monotonic() + limit_s)
        try:
            verdict, clients = prepared.judge(engine, kubelet)
        finally:
            kubelet.close()
        left = engine.close(keep=True) if keep else ""
        counts = (clients.num_answered, clients.num_retried, clients.num_failed) if clients else (0, 0, 0)
        return ServerReport(prepared.name, tuple(one.pod.name for one in kubelet.pods), verdict, prepared.lint, changes,
                            *counts, left)
    finally:
        if not left:
            engine.close(keep=False)
            shutil.rmtree(root, ignore_errors=True)


class ServerRehearsal:
    """The replicas, and the clients that send requests to them."""

    def __init__(self, prepared: PreparedServer, kubelet: Kubelet) -> None:
        self._prepared, self._kubelet = prepared, kubelet
        self._metric_values: list[float] = []
        self.replicas = [kubelet.start(pod, port, prepared.probe)
                         for pod, port in zip(prepared.pods, prepared.ports, strict=True)]
        self.clients = Clients(self.replicas, ROUTE, prepared.rows)

    def check_ready(self) -> Check:
        """Wait until all replicas are ready."""
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
        """Stop the clients, and check what became of their requests."""
        self.clients.stop()
        clients = self.clients
        text = f"{before}{clients.num_retried:,} sent again, {clients.num_failed:,} failed"
        return Check("requests", is_answering and not clients.num_failed, ": ".join([text, *clients.reasons[:1]]))

    def judge(self) -> Verdict:
        """Run the checks in order."""
        checks = [self._prepared.service, self.check_ready()]
        if not checks[-1].is_ok:
            return self.not_ready(checks)
        self._kubelet.note(f"all replicas are ready; {NUM_CLIENTS} clients send requests to each in turn")
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
            sentence = (f"{pluralize(len(self.replicas), 'replica')} answered {clients.num_answered:,} requests; "
                        f"one was killed under load: {clients.num_retried:,} sent again, none failed, "
                        f"back after {format_duration(back_s)}")
            return Verdict(True, sentence, checks=tuple(checks))
        fix = "serve.min_replicas = 2 or more: with one replica there is none to answer" if not others else ""
        return Verdict(False, f"{wrong.name}: {wrong.text}", fix, checks=tuple(checks))

    def check_drain(self) -> Check:
        """Send SIGTERM to all: each must end by itself within its grace period."""
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
    """Return the words after `embark serve` in a command: the artifact, then options."""
    words = [str(word) for word in [*(container.get("command") or ()), *(container.get("args") or ())]]
    at_serve = next((index for index, word in enumerate(words) if word == "serve" and index and
                     words[index - 1].rpartition("/")[2] == "embark"), None)
    return [] if at_serve is None else words[at_serve + 1:]


def _here(pod: Pod, there: str, uri: str, port: int) -> Pod:
    """Return the pod with an artifact, a port and an address of this machine."""
    words = [uri if word == there else word for word in pod.words]
    for option, value in (("--port", str(port)), ("--host", LOOPBACK)):
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    # The machine's own /tmp: what is named there, such as the artifact, would otherwise be looked for in the pod's.
    return replace(pod, command=tuple(words), args=(), mounts=tuple(m for m in pod.mounts if m.path != "/tmp"))


def _request(uri: str) -> bytes:
    """Return a request of rows without a value in any column: every model scores them."""
    from embark.export.artifact import open_artifact
    from embark.features.arrow.row_parser import RowParser

    try:
        rows_format = open_artifact(uri).info.rows
    except EmbarkError as error:
        raise UserError(f"the artifact cannot be read here: {error.what}",
                        fix="--artifact runs/RUN/export serves another one, or give this machine access") from None
    columns = RowParser(rows_format.columns, rows_format.prepare).columns
    return json.dumps({"rows": [dict.fromkeys(columns)] * NUM_ROWS}).encode()


def _metric(scaler: K8sObject) -> str:
    """Return the first metric that the autoscaler asks the server for."""
    names = [str(at(one, "pods.metric.name")) for one in rows(scaler, "spec.metrics") if at(one, "pods.metric.name")]
    queries = [str(at(one, "metadata.query") or "") for one in rows(scaler, "spec.triggers")]
    names += [found[0] for query in queries if (found := re.search(r"[a-zA-Z_:][\w:]*(?=\{)", query))]
    return names[0] if names else ""


def _check_service(objects: Objects, pod: Pod, container: K8sObject) -> Check:
    """Check that the Service leads to the port that the container names."""
    service = next((one for one, read in zip(objects.of_kind("Service"), read_services(objects), strict=True)
                    if read.selects(pod)), None)
    if service is None:
        return Check("Service", False, "no Service selects the pods")
    ports = {str(value) for one in rows(container, "ports") for value in (one.get("name"), one.get("containerPort"))}
    wanted = [str(one.get("targetPort") or one.get("port")) for one in rows(service, "spec.ports")]
    is_ok = bool(wanted) and set(wanted) <= ports
    return Check("Service", is_ok, f"{name_of(service)} leads to port {', '.join(wanted)}" + (
        "" if is_ok else ", which the container does not have"))


