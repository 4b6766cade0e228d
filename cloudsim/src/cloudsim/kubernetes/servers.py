"""The servers of a cluster: each pod of a Deployment that runs `embark serve` is a process of this machine."""

import atexit
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from embark.kubernetes.objects import at
from embark.kubernetes.pods import Pod, main_container
from embark.rehearse.controller import Observer
from embark.rehearse.processes import Processes, free_port
from embark.rehearse.server import Kubelet, RunningPod, pod_here

READY_S = 300.0  # Of this machine's clock; the account's stands still meanwhile.


@dataclass(frozen=True, slots=True)
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
            error = "" if is_ready else "\n".join(running.last_lines) or "the server is not ready"
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
