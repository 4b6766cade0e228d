"""Pods as process groups on the loopback, for a machine without a container engine; and where the files of pods are."""

import base64
import os
import re
import shutil
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from embark.errors import UserError
from embark.kubernetes.pods import POD_IP, Mount, Names, Pod
from embark.launch.shell import LineStream
from embark.rehearse.downscale import Change
from embark.rehearse.load import LOOPBACK
from embark.render.command import SPEC_VARIABLE


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a pod's container."""

    pod: Pod
    number: int  # Counted over all starts of all pods.
    generation: int  # Of the pod: a container that the kubelet starts again is in the same pod, and sees what it left.

    @property
    def key(self) -> str:
        return f"{self.pod.name}#{self.number}"


@dataclass(frozen=True, slots=True)
class Folders:
    """Where mounts lie on this machine, below one folder."""

    root: Path

    def of(self, mount: Mount, start: Start) -> Path:
        """The folder, or the file, of a mount; made if it is not there."""
        own = self.root / "pods" / start.pod.name / str(start.generation)
        if mount.kind == "files":
            path = own / "files" / mount.name
            path.mkdir(parents=True, exist_ok=True)
        elif mount.kind == "shared":
            path = self._open(self.root / "shared" / mount.name)
        else:
            path = self._open(own / mount.kind / mount.name)
        for name, text in mount.files.items():
            file = path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        if mount.sub_path:
            path = path / mount.sub_path
            if mount.kind != "files":
                self._open(path)
        return path

    def workdir(self, start: Start) -> Path:
        """Where a process starts that has no image to start in."""
        return self._open(self.root / "pods" / start.pod.name / str(start.generation) / "workdir")

    def find(self, path: str, start: Start) -> Path | None:
        """Where a path that the pod sees lies here; None where it is inside of the container."""
        for mount in sorted(start.pod.mounts, key=lambda one: -len(one.path)):
            if path == mount.path or path.startswith(mount.path.rstrip("/") + "/"):
                return self.of(mount, start) / path[len(mount.path):].lstrip("/")
        return None

    @staticmethod
    def _open(path: Path) -> Path:
        # The pods' user is none of this machine.
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
        return path


NATS_SERVER = "nats-server"
_MARK = "EMBARK_REHEARSAL_POD"
_INHERITED = ("PATH", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE")
"""What a process needs of this machine; of an image it would have its own."""
_SHIMS = {"python": "", "python3": "", "torchrun": "-m torch.distributed.run", "embark": "-m embark",
          "ray": "-m ray.scripts.scripts"}
_PORT = re.compile(r"(?P<host>[\w.-]+):(?P<port>\d{2,5})\b")
_HOST_WORD = re.compile(r"(--master[-_]addr(?:=|\s+))([\w.-]+)")
_PORT_WORD = re.compile(r"((?:--[a-z_-]*port|\bMASTER_PORT)(?:=|\s+))([1-9]\d+)")
_PORT_VARIABLES = ("MASTER_PORT", "PET_MASTER_PORT")


class Processes:
    """Each pod a process group of this machine's own Python. Names that the cluster would resolve are the loopback."""

    name = "processes"
    can_cut = False

    def __init__(self, folders: Folders, names: Names, *, has_limits: bool = False) -> None:
        """`has_limits`: the pods have limits of memory or CPU that a container here would have too."""
        self.folders = folders
        self._names = names
        self._has_limits = has_limits
        self._ports: dict[str, str] = {}
        self._running: dict[str, LineStream] = {}
        self._starts: list[Start] = []

    def changes(self) -> list[Change]:
        """What is not as in the cluster because of how pods are run here."""
        return [
            Change("pods", "containers of the image", f"processes of {sys.executable} on this machine, as its user"),
            Change("names of pods", "those that a Service makes resolvable", f"{LOOPBACK}, and a free port for each"),
            Change("paths of mounts", "in the container", "folders of this machine, in commands, variables and files"),
            *([Change("limits of memory and CPU", "the container's", "none")] if self._has_limits else []),
        ]

    def begin(self) -> None:
        folder = self._bin
        folder.mkdir(parents=True, exist_ok=True)
        for name, options in _SHIMS.items():
            shim = folder / name
            shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" {options} "$@"\n')
            shim.chmod(0o755)
        if (program := _nats_server()) and not (folder / NATS_SERVER).exists():
            (folder / NATS_SERVER).symlink_to(program)

    def start(self, start: Start) -> LineStream:
        """Its lines; the pod ends as the program does."""
        pod = start.pod
        if not pod.words:
            raise UserError(f"{pod.name}: its command is the image's own, and there is no image here",
                            fix="--engine podman, or a command in the manifest")
        workdir = self.folders.find(pod.workdir, start) if pod.workdir else None
        folder = workdir or self.folders.workdir(start)
        folder.mkdir(parents=True, exist_ok=True)
        here = self._here(start)
        words = [here(word) for word in pod.words]
        if not self._is_found(words[0], folder):
            line = f'exec: "{words[0]}": executable file not found in $PATH'
            words = ["/bin/sh", "-c", 'echo "$1"; exit 127', "sh", line]
        lines = LineStream(words, folder=folder, env=self._environment(start, here), is_merged=True)
        self._running[start.key] = lines
        self._starts.append(start)
        return lines

    def translate(self, start: Start) -> Callable[[str], str]:
        """From words of the pod to what they are right here."""
        return self._here(start)

    def term(self, start: Start) -> None:
        """SIGTERM to its first process."""
        lines = self._running[start.key]
        if lines.code is None:
            os.kill(lines.pid, signal.SIGTERM)

    def kill(self, start: Start) -> None:
        # Stopped first: one that is being killed can start no other.
        self._send(start, signal.SIGSTOP)
        while _marked(self._mark(start)):
            self._send(start, signal.SIGKILL)
            time.sleep(0.01)

    def sweep(self, start: Start) -> None:
        """What is left of a pod whose first process has ended."""
        self.kill(start)

    def begin_fault(self, kind: str, start: Start) -> None:
        """A pause; only a container has a network to be cut off from."""
        self._send(start, signal.SIGSTOP)

    def end_fault(self, kind: str, start: Start) -> None:
        self._send(start, signal.SIGCONT)

    def close(self, *, keep: bool) -> str:
        """Ends what runs, and removes what was made, but for the folders; with `keep`, says what is left."""
        for start in self._starts:
            self.kill(start)
        return f"{self.folders.root}; rm -r {self.folders.root} removes it" if keep else ""

    @property
    def _bin(self) -> Path:
        return self.folders.root / "bin"

    def _is_found(self, program: str, folder: Path) -> bool:
        if "/" in program:
            return os.access(folder / program, os.X_OK)
        return shutil.which(program, path=f"{self._bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}") is not None

    def _environment(self, start: Start, here: Callable[[str], str]) -> dict[str, str]:
        pod = start.pod
        env = {name: value for name in _INHERITED if (value := os.environ.get(name))}
        if "PYTHONPATH" in env:  # a pod starts elsewhere
            env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, env["PYTHONPATH"].split(os.pathsep)))
        env |= {name: here(value) for name, value in pod.env.items() if name != "PATH"}
        if SPEC_VARIABLE in pod.env:
            text = here(base64.b64decode(pod.env[SPEC_VARIABLE]).decode())
            env[SPEC_VARIABLE] = base64.b64encode(text.encode()).decode()
        for name in _PORT_VARIABLES:
            if (value := env.get(name, "")).isdigit():
                env[name] = self._port(value)
        env["PATH"] = f"{self._bin}{os.pathsep}{env.get('PATH', os.defpath)}"
        # The machine's own name may lead to an interface that is not the loopback, or nowhere.
        own = {"HOSTNAME": pod.hostname, "PET_LOCAL_ADDR": LOOPBACK, "GLOO_SOCKET_IFNAME": "lo"}
        return {**own, **env, _MARK: self._mark(start)}

    def _here(self, start: Start) -> Callable[[str], str]:
        """Words of the pod as they are right here."""
        pod = start.pod
        places: Mapping[str, str] = {mount.path.rstrip("/"): str(self.folders.of(mount, start)) for mount in pod.mounts
                                     if mount.path.rstrip("/") != "/dev/shm"}
        by_length = sorted(places, key=len, reverse=True)
        either = "|".join(map(re.escape, by_length))
        paths = re.compile(rf"(?<![\w./-])(?:{either})(?![\w.-])") if places else None

        def here(text: str) -> str:
            text = _PORT.sub(self._endpoint, text)
            text = _PORT_WORD.sub(lambda match: f"{match[1]}{self._port(match[2])}", text)
            text = _HOST_WORD.sub(self._host, text)
            text = re.sub(r"[\w.-]+", lambda match: LOOPBACK if self._names.resolves(match[0]) and "." in match[0]
                          else match[0], text)
            text = text.replace(POD_IP, LOOPBACK)
            if self._names.resolves(text):
                text = LOOPBACK
            return paths.sub(lambda match: places[match[0]], text) if paths else text

        for mount in pod.mounts:  # what the files of a ConfigMap say of paths is said of paths here
            if mount.kind == "files":
                self.folders.of(replace(mount, files={name: here(text) for name, text in mount.files.items()},
                                        sub_path=""), start)
        return here

    def _endpoint(self, match: re.Match[str]) -> str:
        is_own = match["host"] in ("localhost", LOOPBACK)
        if not is_own and not self._names.resolves(match["host"]):
            return match[0]
        return f"{LOOPBACK}:{self._port(match['port'])}"

    def _host(self, match: re.Match[str]) -> str:
        return f"{match[1]}{LOOPBACK if self._names.resolves(match[2]) else match[2]}"

    def _port(self, there: str) -> str:
        """A free one, the same each time: two rehearsals of one machine do not meet by mistake."""
        if there not in self._ports and there not in self._ports.values():
            with socket.socket() as taken:
                taken.bind((LOOPBACK, 0))
                self._ports[there] = str(taken.getsockname()[1])
        return self._ports.get(there, there)

    def _mark(self, start: Start) -> str:
        return f"{self.folders.root}#{start.key}"

    def _send(self, start: Start, number: int) -> None:
        for pid in _marked(self._mark(start)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def has_nats_server() -> bool:
    return _nats_server() is not None


def _nats_server() -> str | None:
    """That pip installed, or the machine's own."""
    return shutil.which(NATS_SERVER, path=sysconfig.get_path("scripts")) or shutil.which(NATS_SERVER)


def _marked(mark: str) -> list[int]:
    """Processes with this mark in their environment. torchrun puts each rank into a session of its own, and ranks
    whose torchrun was killed have no parent to be found by."""
    return [one.pid for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get(_MARK) == mark]
