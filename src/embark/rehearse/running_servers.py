"""Servers as processes of this machine: those of a cluster's pods, and those of managed endpoints."""

import atexit
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

from embark.formatting import to_one_line
from embark.kubernetes.objects import Objects, at
from embark.kubernetes.pods import Pod, PodIdentity, main_container, make_pod
from embark.render.serving import versions_gib
from embark.render.targets.endpoints import ARTIFACT, READY
from embark.values import frozen
from .controller import Observer
from .processes import LOOPBACK, Processes, free_port
from .server import Kubelet, RunningPod, pod_here

READY_S = 300.0  # Of this machine's clock; the account's stands still meanwhile.


@frozen
class _Server:
    kubelet: Kubelet
    processes: Processes
    running: RunningPod
    error: str  # Why it is not ready; empty if it is.


class Servers:
    """Starts the servers of pods, and ends those of pods that are gone."""

    def __init__(self) -> None:
        self._by_pod: dict[tuple[str, str], _Server] = {}

    def start(self, pod: Pod, artifact: str, folder: Path, env: Mapping[str, str]) -> str:
        """Start the pod's server, if it does not run, and wait until it is ready. Return why it is not, or an empty
        text."""
        key = (pod.namespace, pod.name)
        if key not in self._by_pod:
            atexit.register(self.close)  # The cluster may be deleted before the account ends.
            folder.mkdir(parents=True, exist_ok=True)
            processes = Processes(Path(mkdtemp(dir=folder)), {}, env)
            kubelet = Kubelet(processes, Observer(lambda *_: None, lambda _: None), time.monotonic() + READY_S)
            port = free_port()
            running = kubelet.start(pod_here(pod, artifact, artifact, port), port,
                                    str(at(main_container(pod.spec), "readinessProbe.httpGet.path") or ""))
            is_ready = kubelet.wait(lambda: running.is_up)
            error = "" if is_ready else running.refusal or "\n".join(running.last_lines) or "the server is not ready"
            self._by_pod[key] = _Server(kubelet, processes, running, error)
        return self._by_pod[key].error

    def log(self, pod: Pod) -> str:
        server = self._by_pod[(pod.namespace, pod.name)]
        server.kubelet.take(0.0)
        return "".join(f"{line}\n" for line in server.running.last_lines)

    def port(self, namespace: str, pod: str) -> int:
        """Return the port of this machine on which the server of a pod answers; 0 if it does not."""
        server = self._by_pod.get((namespace, pod))
        return server.running.port if server is not None and not server.error else 0

    def keep(self, pods: set[tuple[str, str]]) -> None:
        """End the servers of all pods but these, which are pairs of namespace and name."""
        for key in set(self._by_pod) - pods:
            server = self._by_pod.pop(key)
            server.processes.close()
            server.kubelet.close()

    def close(self) -> None:
        self.keep(set())


class EndpointServer:
    """The server of one deployment. It starts by the image's own command and its variables."""

    def __init__(self, name: str, folder: Path, env: Mapping[str, str], artifact_bytes: float) -> None:
        """`env` leads to the object store. `artifact_bytes` is the size of the artifact that a small one stands for."""
        self._name, self._folder, self._env, self._servers = name, folder, env, Servers()
        self._needed_gib = versions_gib(artifact_bytes)

    def start(self, env: Mapping[str, str], *, port: str, probe: str, disk_gib: float = 0.0) -> str:
        """Start the server and wait until its probe is answered; return why it is not, or an empty text."""
        host, own = env.get("EMBARK_SERVE_HOST", "127.0.0.1"), env.get("EMBARK_SERVE_PORT") or env.get("AIP_HTTP_PORT")
        if host != "0.0.0.0" or own != port:
            return f"the server listens on {host}:{own or 8000}, and requests come to port {port} of the container"
        if not env.get(ARTIFACT):
            return f"embark serve: error: {ARTIFACT} is not set, and no artifact is given"
        if 0 < disk_gib < self._needed_gib:
            return (f"OSError: [Errno 28] No space left on device: the versions of {env[ARTIFACT]} need "
                    f"{self._needed_gib} GiB, and there are {disk_gib:g}")
        own_env = {**env, "EMBARK_SERVE_WORKERS": "1"}  # More would only wait for this machine's processors.
        container = {"command": ["embark", "serve", env[ARTIFACT]], "readinessProbe": {"httpGet": {"path": READY}},
                     "env": [{"name": key, "value": value} for key, value in own_env.items()]}
        pod = make_pod({"spec": {"containers": [container]}}, PodIdentity(name=self._name, namespace=""), Objects(()))
        error = to_one_line(self._servers.start(pod, env[ARTIFACT], self._folder, self._env))
        code, _ = (0, "") if error else self.ask(probe)
        return error if error or code == 200 else f"GET {probe} on port {port} was answered with status {code}"

    def ask(self, path: str, body: bytes | None = None) -> tuple[int, str]:
        """Send a request to the server; return the status and the text of its answer."""
        url = f"http://{LOOPBACK}:{self.port}{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}),
                                        timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    @property
    def port(self) -> int:
        return self._servers.port("", self._name)

    def close(self) -> None:
        self._servers.close()


@dataclass(slots=True)
class Deployments:
    """What is deployed behind a managed endpoint, and the share of the requests that each deployment gets."""

    servers: dict[str, EndpointServer] = field(default_factory=dict)
    routes: dict[str, str] = field(default_factory=dict)  # The path that requests are sent to.
    traffic: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, server: EndpointServer, route: str = "") -> None:
        """Add a deployment, or replace the server of one."""
        if name in self.servers:
            self.servers[name].close()
        self.servers[name], self.routes[name] = server, route

    def split_error(self, traffic: Mapping[str, int], new: str = "") -> str:
        """Return why requests cannot be divided so, or an empty text; `new` is a deployment that is being made."""
        if sum(traffic.values()) != 100:
            return f"The traffic percentages must sum to 100, and sum to {sum(traffic.values())}."
        unknown = [name for name in traffic if name not in (*self.servers, new)]
        return f"{unknown[0]}: no such deployment; there are {', '.join(self.servers) or 'none'}." if unknown else ""

    @property
    def active(self) -> str:
        """The deployment with most of the traffic; empty without one."""
        return max(self.traffic, key=self.traffic.__getitem__, default="")

    def ask(self, body: str) -> tuple[int, str]:
        if not self.active:
            return 503, "no deployment has traffic"
        return self.servers[self.active].ask(self.routes[self.active], body.encode())

    def remove(self, name: str) -> str:
        """End a deployment; return why it cannot be ended, or an empty text."""
        if name not in self.servers:
            return f"{name}: no such deployment."
        if self.traffic.get(name) and len(self.servers) > 1:
            return f"{name} has traffic; assign it to another deployment first."
        self.servers.pop(name).close()
        self.traffic.pop(name, None)
        return ""

    def close(self) -> None:
        for server in self.servers.values():
            server.close()
