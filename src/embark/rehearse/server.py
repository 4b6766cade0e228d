"""Pods of services as processes of this machine, started, probed and restarted as a kubelet does it; and the rehearsal
of a rendered server: clients send requests to its replicas, and one of them is killed under load."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from embark.errors import EmbarkError, UserError
from embark.formatting import format_duration, pluralize
from embark.kubernetes.objects import K8sObject, Objects, at, name_of, namespace_of, rows, texts
from embark.kubernetes.pods import (
    Pod,
    PodIdentity,
    command_words,
    embark_words,
    main_container,
    make_pod,
    read_services,
)
from embark.launch.shell import LineMultiplexer, LineStream
from embark.lint.check import lint_texts
from embark.values import frozen
from .controller import RESTART_S, Observer
from .downscale import Change
from .manifest import selects
from .processes import CHANGES, LOOPBACK, Processes, Start, free_port
from .rehearsal import Prepared, RehearsalReport
from .verdict import Check, Verdict

NUM_CLIENTS = 4
RETRY_S = 1.0
ANSWER_S = 60.0


class Clients:
    """Threads that send the same request again and again until they are stopped.

    Each request goes to the next replica that is up, as kube-proxy does it. A client sends a request once more, a
    second later, if its connection was closed or refused before an answer. Any other end of a request but a 200 is a
    failure.
    """

    def __init__(self, replicas: Sequence[RunningPod], path: str, body: bytes) -> None:
        self._replicas, self._path, self._body = replicas, path, body
        self._turns = count()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(NUM_CLIENTS)]
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self.answered: Counter[int] = Counter()  # Answers by the port of the replica.
        self.num_retried = self.num_failed = 0
        self.reason = ""  # The reason of the last failure.

    @property
    def num_answered(self) -> int:
        return self.answered.total()

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
        is_second = False
        while is_second or not self._is_over.is_set():
            is_second = self._send(is_second=is_second)
            if is_second:
                self._is_over.wait(RETRY_S)

    def _send(self, *, is_second: bool) -> bool:
        """Send the request to the next replica; return whether to send it once more."""
        up = [replica for replica in self._replicas if replica.is_up]
        port = up[next(self._turns) % len(up)].port if up else 0  # port 0 refuses every connection
        failure = ""
        try:
            with closing(http.client.HTTPConnection(LOOPBACK, port, timeout=ANSWER_S)) as connection:
                connection.request("POST", self._path, self._body)
                answer = connection.getresponse()
                answer.read()
            failure = "" if answer.status == 200 else f"status {answer.status}"
        except TimeoutError:
            failure = f"no answer within {ANSWER_S:g} s"
        except (OSError, http.client.HTTPException) as error:
            if not is_second:
                with self._lock:
                    self.num_retried += 1
                return True
            failure = f"the connection was closed twice: {error!r}"
        with self._lock:
            self.answered[port] += not failure
            self.num_failed += bool(failure)
            self.reason = failure or self.reason
        return False


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
    refusal: str = ""  # A probe that the server does not know or may not answer, and the status of its answer.
    last_lines: list[str] = field(default_factory=list)

    @property
    def is_up(self) -> bool:
        """Whether a Service would send requests to it."""
        return self.is_ready and self.lines.code is None

    def answers_probes(self) -> bool:
        """Ask the readiness probe; before its first good answer also the others, as a kubelet would begin with them."""
        container = main_container(self.pod.spec)
        others = {} if self.is_ready else {name: str(at(container, f"{name}.httpGet.path") or "")
                                           for name in ("startupProbe", "livenessProbe")}
        for name, path in {"readinessProbe": self.probe, **others}.items():
            try:
                if path:
                    urllib.request.urlopen(f"http://{LOOPBACK}:{self.port}{path}", timeout=5).close()
            except urllib.error.HTTPError as error:
                error.close()
                if 400 <= error.code < 500:
                    self.refusal = f"{name} failed: GET {path} was answered with status {error.code}"
                return False
            except OSError:
                return False
        return True

    def get(self, path: str) -> str | None:
        """Return the body of the pod's answer; None without an answer."""
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self.port}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            return None


class Kubelet:
    """Starts, probes and restarts the pods."""

    def __init__(self, processes: Processes, observer: Observer, until_s: float) -> None:
        """`until_s` is when to give up waiting, by `time.monotonic`."""
        self._processes, self._observer, self._until_s = processes, observer, until_s
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
        self._processes.kill(one.start)

    def wait(self, is_so: Callable[[], bool]) -> bool:
        """Wait for a condition; False if the time limit passes, a pod was started too often or refuses a probe."""
        while not is_so():
            self.take(0.05)
            self._look()
            if time.monotonic() > self._until_s or any(
                    one.refusal or (one.num_starts > MAX_STARTS and not one.is_ready) for one in self.pods):
                return False
        return True

    def end(self, pods: list[RunningPod], grace_s: float) -> list[int | None]:
        """Send SIGTERM to these pods; return their exit codes within the grace period."""
        for one in pods:
            self._processes.term(one.start)
        until_s = time.monotonic() + grace_s
        while time.monotonic() < until_s and any(one.lines.code is None for one in pods):
            self.take(0.05)
        return [one.lines.code for one in pods]

    def take(self, wait_s: float) -> None:
        """Show the lines that have come."""
        self._observer.check()
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
                one.is_ready = one.answers_probes()

    def _start(self, pod: Pod) -> tuple[Start, LineStream]:
        start = Start(pod, self._number, 0)
        self._number += 1
        lines = self._processes.start(start)
        self._output.add(start.key, lines)
        return start, lines


MAX_REPLICAS = 2
NUM_REQUESTS = 25  # Requests to each replica, before one is killed and after it is back.
NUM_ROWS = 8  # Rows of a request.
ROUTE = "/score"


@frozen
class PreparedServer(Prepared):
    """A server that can be rehearsed."""

    pods: tuple[Pod, ...]
    ports: tuple[int, ...]  # The port of each pod here.
    probe: str  # The path of the readiness probe.
    metric: str  # The metric that the autoscaler asks for; empty if it asks for none.
    rows: bytes  # Body of the request that is sent.
    service: Check

    def run_pods(self, processes: Processes, observer: Observer, limit_s: float) -> RehearsalReport:
        with closing(Kubelet(processes, observer, time.monotonic() + limit_s)) as kubelet:
            servers = ServerRehearsal(self, kubelet)
            try:
                return report_of(self, kubelet, servers.judge(), servers.clients)
            finally:
                servers.clients.stop()


def report_of(prepared: Prepared, kubelet: Kubelet, verdict: Verdict, clients: Clients | None) -> RehearsalReport:
    """Report on services, and on the requests of their clients if there were any."""
    counts = {name: getattr(clients, name) for name in ("num_answered", "num_retried", "num_failed")} if clients else {}
    return prepared.report(tuple(one.pod.name for one in kubelet.pods), verdict, **counts)


def find_server(objects: Objects) -> K8sObject | None:
    """Return a Deployment whose container runs `embark serve`."""
    return next((one for one in objects.of_kind("Deployment") if served_artifact(one)), None)


def served_artifact(deployment: K8sObject) -> str:
    """Return the artifact that a Deployment's container serves; empty if it serves nothing."""
    container = main_container(at(deployment, "spec.template.spec") or {})
    words = embark_words(command_words(container, "command", "args"))
    return words[1] if words[:1] == ["serve"] and len(words) > 1 else ""


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


def prepare_server(texts: Mapping[str, str], objects: Objects, artifact: str) -> PreparedServer:
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
               *([Change("artifact", there, uri)] if uri != there else []), *CHANGES]
    ports = tuple(free_port() for _ in range(num))
    pods = [pod_here(pod, there, uri, port) for pod, port in zip(pods, ports, strict=False)]
    return PreparedServer(
        kind="Deployment", name=name, title=f"Deployment {name}: {pluralize(num, 'replica')}", names={},
        pods=tuple(pods), ports=ports,
        probe=str(at(container, "readinessProbe.httpGet.path") or ""), rows=_request(uri),
        metric=_metric(_scaler(deployment, objects)), service=_check_service(objects, pods[0], container),
        changes=tuple(changes), findings=tuple(lint_texts(dict(texts))))


class ServerRehearsal:
    """The replicas, and the clients that send requests to them."""

    def __init__(self, prepared: PreparedServer, kubelet: Kubelet) -> None:
        self._prepared, self._kubelet = prepared, kubelet
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
        sentence, fix = f"{broken.pod.name} does not become ready", "embark serve with the same arguments shows why"
        if broken.refusal:
            sentence, fix = f"{sentence}: {broken.refusal}", "the probes' paths are those of embark render's manifest"
        return Verdict(False, sentence, fix, "\n".join(broken.last_lines[-3:]), tuple(checks))

    def check_requests(self, *, before: str, is_answering: bool = True) -> Check:
        """Stop the clients, and check what became of their requests."""
        self.clients.stop()
        clients = self.clients
        text = f"{before}{clients.num_retried:,} sent again, {clients.num_failed:,} failed"
        return Check("requests", is_answering and not clients.num_failed,
                     f"{text}: {clients.reason}" if clients.reason else text)

    def judge(self) -> Verdict:
        """Run the checks in order."""
        checks = [self._prepared.service, self.check_ready()]
        if not checks[-1].is_ok:
            return self.not_ready(checks)
        self._kubelet.note(f"all replicas are ready; {NUM_CLIENTS} clients send requests to each in turn")
        self.clients.start()
        killed, *others = self.replicas
        clients, wait = self.clients, self._kubelet.wait
        is_answering = wait(lambda: all(clients.answered[one.port] >= NUM_REQUESTS for one in self.replicas))
        before, metric = clients.num_answered, self._check_metric()
        self._kubelet.kill(killed)
        killed_s, answered = time.monotonic(), clients.answered[killed.port]
        is_back = wait(lambda: clients.answered[killed.port] >= answered + NUM_REQUESTS)
        back_s = time.monotonic() - killed_s
        clients.stop()
        checks += [
            self.check_requests(before=f"{before:,} before, {clients.num_answered - before:,} after; ",
                                is_answering=is_answering),
            Check("comes back", is_back, f"{killed.pod.name} answered again after {format_duration(back_s)}" if is_back
                  else f"{killed.pod.name} did not within the limit"),
            metric, self.check_drain()]
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
        if name == "cpu":
            return Check("autoscaler", True, "goes by the pods' CPU, which the kubelet measures")
        is_there = re.search(rf"^{re.escape(name)}[{{ ]", self.replicas[-1].get("/metrics") or "", re.MULTILINE)
        return Check("autoscaler", bool(is_there), f"{name} is {'' if is_there else 'not '}exported by the server")


def pod_here(pod: Pod, there: str, uri: str, port: int) -> Pod:
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
                        "--artifact runs/RUN/export serves another one, or give this machine access") from None
    columns = RowParser(rows_format.columns, rows_format.prepare).columns
    return json.dumps({"rows": [dict.fromkeys(columns)] * NUM_ROWS}).encode()


def _metric(scaler: K8sObject) -> str:
    """Return the first metric that the autoscaler asks the server for, or `cpu` if it asks for none of its own."""
    names = [str(at(one, "pods.metric.name")) for one in rows(scaler, "spec.metrics") if at(one, "pods.metric.name")]
    queries = [str(at(one, "metadata.query") or "") for one in rows(scaler, "spec.triggers")]
    names += [found[0] for query in queries if (found := re.search(r"[a-zA-Z_:][\w:]*(?=\{)", query))]
    names += [str(name) for one in rows(scaler, "spec.metrics") if (name := at(one, "resource.name"))]
    return names[0] if names else ""


def find_port(container: K8sObject, port: str) -> tuple[str, str]:
    """Return the number of a port that may have a name, and why the container's program does not answer there. It
    listens on the ports that its command names, or else on those that the container declares."""
    declared = {str(one.get("name")): str(one.get("containerPort")) for one in rows(container, "ports")}
    number, text = declared.get(port, port), " ".join(command_words(container, "command", "args"))
    listens = re.findall(r"port[= ](\d+)", text) or list(declared.values())
    if not number.isdigit():
        return "", f"the container has no port {port}"
    if re.search(r"(host|addr)[= ](127\.0\.0\.1|localhost)\b", text):
        return number, f"dial tcp :{number}: connect: connection refused: the program listens on 127.0.0.1 alone"
    return number, "" if number in listens or not listens else (
        f"dial tcp :{number}: connect: connection refused: the program listens on {', '.join(listens)}")


def policy_error(policies: Sequence[K8sObject], labels: Mapping[str, str], container: K8sObject, number: str) -> str:
    """Return which NetworkPolicies keep everyone from a port of a pod, or an empty text; who may connect to the other
    ports does not count."""
    names, allowed = [], list[str]()
    for one in policies:
        types = at(one, "spec.policyTypes") or ["Ingress"]
        if "Ingress" in types and selects(at(one, "spec.podSelector"), labels):
            names.append(name_of(one))
            for rule in rows(one, "spec.ingress"):
                allowed += [find_port(container, str(port.get("port") or number))[0]
                            for port in rows(rule, "ports") or [{}]]
    return "" if not names or number in allowed else (
        f"NetworkPolicy {', '.join(names)} lets nobody in to port {number}, only to {', '.join(allowed) or 'none'}")


def probe_error(pod: Pod) -> str:
    """Return which probe asks where the pod's program does not answer, and why; an empty text if none does."""
    container = main_container(pod.spec)
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        for handler in texts(container.get(name)):
            port = at(container, f"{name}.{handler}.port")
            if port is not None and (error := find_port(container, str(port))[1]):
                return f"{name} failed: {error}"
    return ""


def _check_service(objects: Objects, pod: Pod, container: K8sObject) -> Check:
    """Check that the Service leads to the port that the container names."""
    service = next((one for one, read in zip(objects.of_kind("Service"), read_services(objects), strict=True)
                    if read.selects(pod)), None)
    if service is None:
        return Check("Service", False, "no Service selects the pods")
    wanted = [str(one.get("targetPort") or one.get("port")) for one in rows(service, "spec.ports")]
    leads = f"{name_of(service)} leads to port {', '.join(wanted)}"
    policies = [one for one in objects.of_kind("NetworkPolicy") if namespace_of(one) == pod.namespace]
    found = [find_port(container, port) for port in wanted]
    errors = [*(error or policy_error(policies, pod.labels, container, number) for number, error in found),
              probe_error(pod)]
    errors = [*filter(None, errors)]
    return Check("Service", bool(wanted) and not errors, f"{leads}: {errors[0]}" if errors else leads)


