"""Pods as process groups of this machine's own Python, and where their files are."""

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
from dataclasses import replace
from pathlib import Path

import psutil

from embark.errors import UserError
from embark.kubernetes.pods import POD_IP, Mount, Names, Pod
from embark.launch.shell import LineStream
from embark.render.command import SPEC_VARIABLE
from embark.values import frozen
from .downscale import Change


@frozen
class Start:
    """One start of a pod's container."""

    pod: Pod
    number: int  # Counted over all starts of all pods.
    generation: int  # Counts the pods of this name: a container that restarts in its pod sees what it left.

    @property
    def key(self) -> str:
        return f"{self.pod.name}#{self.number}"


LOOPBACK = "127.0.0.1"
NATS_SERVER = "nats-server"
_MARK = "EMBARK_REHEARSAL_POD"
_INHERITED = ("PATH", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE")
"""Variables of this machine that a process needs; an image would have its own."""
_SHIMS = {"python": "", "python3": "", "torchrun": "-m torch.distributed.run", "embark": "-m embark",
          "ray": "-m ray.scripts.scripts"}
_PORT = re.compile(r"(?P<host>[\w.-]+):(?P<port>\d{2,5})\b")
_HOST_WORD = re.compile(r"(--master[-_]addr(?:=|\s+))([\w.-]+)")
_PORT_WORD = re.compile(r"((?:--[a-z_-]*port|\bMASTER_PORT)(?:=|\s+))([1-9]\d+)")
_PORT_VARIABLES = ("MASTER_PORT", "PET_MASTER_PORT", "PORT")
CHANGES = (
    Change("pods", "containers of the image", f"processes of {sys.executable} on this machine, as its user"),
    Change("names of pods", "those that a Service makes resolvable", f"{LOOPBACK}, and a free port for each"),
    Change("paths of mounts", "in the container", "folders of this machine, in commands, variables and files"),
    Change("limits of memory and CPU", "those of the manifest", "none")
)
"""Differences from the cluster that come from how pods are run here."""


class Processes:
    """Runs each pod as a process group of this machine's own Python. Names that the cluster would resolve are the
    loopback."""

    def __init__(self, root: Path, names: Names, env: Mapping[str, str] | None = None) -> None:
        """`root` is an empty folder for everything that the pods write; `env` are variables that all of them get, such
        as the address of an object store."""
        self._root = root
        self._names = names
        self._env = dict(env or {})
        self._ports: dict[str, str] = {}
        self._running: dict[str, LineStream] = {}
        self._starts: list[Start] = []
        self._bin = root / "bin"
        self._bin.mkdir()
        for name, options in _SHIMS.items():
            shim = self._bin / name
            shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" {options} "$@"\n')
            shim.chmod(0o755)
        if program := find_nats_server():
            (self._bin / NATS_SERVER).symlink_to(program)

    def start(self, start: Start) -> LineStream:
        """Start the pod's program and return its lines; the pod ends as the program does."""
        pod = start.pod
        if not pod.words:
            raise UserError(f"{pod.name}: its command is the image's own, and there is no image here",
                            "give the container a command in the manifest")
        folder = (self.find(pod.workdir, start) if pod.workdir else None) or self._own_folder(start) / "workdir"
        folder.mkdir(parents=True, exist_ok=True)
        here = self.translate(start)
        words = [here(word) for word in pod.words]
        if not self._is_found(words[0], folder):
            line = f'exec: "{words[0]}": executable file not found in $PATH'
            words = ["/bin/sh", "-c", 'echo "$1"; exit 127', "sh", line]
        self._starts.append(start)  # before it runs: a signal may come at any time
        self._running[start.key] = LineStream(words, folder=folder, env=self._environment(start, here), is_merged=True)
        return self._running[start.key]

    def find(self, path: str, start: Start) -> Path | None:
        """Return the path here of a path that the pod sees; None if it is inside of the container."""
        for mount in sorted(start.pod.mounts, key=lambda one: -len(one.path)):
            if path == mount.path or path.startswith(mount.path.rstrip("/") + "/"):
                return self._folder(mount, start) / path[len(mount.path):].lstrip("/")
        return None

    def term(self, start: Start) -> None:
        """Send SIGTERM to the pod's first process."""
        lines = self._running[start.key]
        if lines.code is None:
            os.kill(lines.pid, signal.SIGTERM)

    def kill(self, start: Start) -> None:
        # Stopped first: one that is being killed can start no other.
        self._send(start, signal.SIGSTOP)
        while _marked(self._mark(start)):
            self._send(start, signal.SIGKILL)
            time.sleep(0.01)

    def close(self) -> None:
        """End all that runs."""
        for start in self._starts:
            self.kill(start)

    def _own_folder(self, start: Start) -> Path:
        return self._root / "pods" / start.pod.name / str(start.generation)

    def _folder(self, mount: Mount, start: Start) -> Path:
        """Return the folder or file of a mount, created if needed."""
        path = self._root / "shared" / mount.name if mount.kind == "shared" else \
            self._own_folder(start) / mount.kind / mount.name
        for name, text in mount.files.items():
            file = path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        path = path / mount.sub_path
        if mount.kind != "files" or not mount.sub_path:
            path.mkdir(parents=True, exist_ok=True)
        return path

    def _is_found(self, program: str, folder: Path) -> bool:
        if "/" in program:
            return os.access(folder / program, os.X_OK)
        return shutil.which(program, path=f"{self._bin}{os.pathsep}{os.getenv('PATH', os.defpath)}") is not None

    def _environment(self, start: Start, here: Callable[[str], str]) -> dict[str, str]:
        pod = start.pod
        env = {name: value for name in _INHERITED if (value := os.getenv(name))} | self._env
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

    def translate(self, start: Start) -> Callable[[str], str]:
        """Translate the pod's files of ConfigMaps, and return the function that translates its paths and addresses."""
        pod = start.pod
        places = {mount.path.rstrip("/"): str(self._folder(mount, start)) for mount in pod.mounts
                  if mount.path.rstrip("/") != "/dev/shm"}
        by_length = sorted(places, key=len, reverse=True)
        either = "|".join(map(re.escape, by_length))
        paths = re.compile(rf"(?<![\w./-])(?:{either})(?![\w.-])") if places else None

        def here(text: str) -> str:
            text = _PORT.sub(self._endpoint, text)
            text = _PORT_WORD.sub(lambda match: f"{match[1]}{self._port(match[2])}", text)
            text = _HOST_WORD.sub(self._host, text)
            text = re.sub(r"[\w.-]+", lambda match: LOOPBACK if match[0] in self._names and "." in match[0]
                          else match[0], text)
            text = text.replace(POD_IP, LOOPBACK)
            if text in self._names:
                text = LOOPBACK
            return paths.sub(lambda match: places[match[0]], text) if paths else text

        for mount in pod.mounts:  # what the files of a ConfigMap say of paths is said of paths here
            if mount.kind == "files":
                files = {name: here(text) for name, text in mount.files.items()}
                self._folder(replace(mount, files=files, sub_path=""), start)
        return here

    def _endpoint(self, match: re.Match[str]) -> str:
        is_custom = match["host"] in ("localhost", LOOPBACK)
        if not is_custom and match["host"] not in self._names:
            return match[0]
        return f"{LOOPBACK}:{self._port(match['port'])}"

    def _host(self, match: re.Match[str]) -> str:
        return f"{match[1]}{LOOPBACK if match[2] in self._names else match[2]}"

    def _port(self, there: str) -> str:
        """Return a free port, the same each time, so that two rehearsals of one machine do not meet."""
        if there not in self._ports and there not in self._ports.values():
            self._ports[there] = str(free_port())
        return self._ports.get(there, there)

    def _mark(self, start: Start) -> str:
        return f"{self._root}#{start.key}"

    def _send(self, start: Start, number: int) -> None:
        for pid in _marked(self._mark(start)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        return int(taken.getsockname()[1])


def find_nats_server() -> str | None:
    """Return the program that pip installed, or the machine's own."""
    return shutil.which(NATS_SERVER, path=sysconfig.get_path("scripts")) or shutil.which(NATS_SERVER)


def _marked(mark: str) -> list[int]:
    """Return processes with this mark in their environment. torchrun puts each rank into a session of its own, and
    ranks whose torchrun was killed have no parent to be found by."""
    return [one.pid for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get(_MARK) == mark]
