"""Pods on this machine, as containers of podman or docker or as process groups; and where their files are."""

import base64
import ipaddress
import os
import random
import re
import resource
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

from embark.errors import Fault, UserError
from embark.kubernetes.pods import POD_IP, Mount, Names, Pod
from embark.launch.shell import CommandResult, LineStream, Shell
from embark.rehearse.downscale import Change
from embark.render.command import SPEC_VARIABLE


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a pod's container."""

    pod: Pod
    number: int  # Counted over all starts of all pods.
    generation: int  # Counts the pods of this name: a container that restarts in its pod sees what it left.

    @property
    def key(self) -> str:
        return f"{self.pod.name}#{self.number}"


@dataclass(frozen=True, slots=True)
class Folders:
    """Finds the folders of mounts on this machine."""

    root: Path

    def of(self, mount: Mount, start: Start) -> Path:
        """Return the folder or file of a mount, created if needed."""
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
        """Return the working directory of a process that has no image to start in."""
        return self._open(self.root / "pods" / start.pod.name / str(start.generation) / "workdir")

    def find(self, path: str, start: Start) -> Path | None:
        """Return the path here of a path that the pod sees; None if it is inside of the container."""
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
_PORT_VARIABLES = ("MASTER_PORT", "PET_MASTER_PORT")


class Processes:
    """Runs each pod as a process group of this machine's own Python. Names that the cluster would resolve are the
    loopback."""

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
        """Return differences from the cluster that come from how pods are run here."""
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
        """Start the pod's program and return its lines; the pod ends as the program does."""
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
        """Return a function that translates paths and addresses of the pod into those of this machine."""
        return self._here(start)

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

    def sweep(self, start: Start) -> None:
        """Kill what is left of a pod whose first process has ended."""
        self.kill(start)

    def begin_fault(self, kind: str, start: Start) -> None:
        """Pause the pod; only a container has a network to be cut off from."""
        self._send(start, signal.SIGSTOP)

    def end_fault(self, kind: str, start: Start) -> None:
        self._send(start, signal.SIGCONT)

    def close(self, *, keep: bool) -> str:
        """End what runs and remove everything but the folders; with `keep`, return what is left."""
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
        """Translate the pod's files of ConfigMaps, and return the function that translates its words."""
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
        is_custom = match["host"] in ("localhost", LOOPBACK)
        if not is_custom and not self._names.resolves(match["host"]):
            return match[0]
        return f"{LOOPBACK}:{self._port(match['port'])}"

    def _host(self, match: re.Match[str]) -> str:
        return f"{match[1]}{LOOPBACK if self._names.resolves(match[2]) else match[2]}"

    def _port(self, there: str) -> str:
        """Return a free port, the same each time, so that two rehearsals of one machine do not meet."""
        if there not in self._ports and there not in self._ports.values():
            self._ports[there] = str(free_port())
        return self._ports.get(there, there)

    def _mark(self, start: Start) -> str:
        return f"{self.folders.root}#{start.key}"

    def _send(self, start: Start, number: int) -> None:
        for pid in _marked(self._mark(start)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        return int(taken.getsockname()[1])


def has_nats_server() -> bool:
    return _nats_server() is not None


def _nats_server() -> str | None:
    """Return the program that pip installed, or the machine's own."""
    return shutil.which(NATS_SERVER, path=sysconfig.get_path("scripts")) or shutil.which(NATS_SERVER)


def _marked(mark: str) -> list[int]:
    """Return processes with this mark in their environment. torchrun puts each rank into a session of its own, and
    ranks whose torchrun was killed have no parent to be found by."""
    return [one.pid for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get(_MARK) == mark]


FIRST_ADDRESS = 10
TRIES = 20
WIDE_NOFILE = 1_048_576  # Podman's default limit; with a lower hard limit, a container would not start.
SHM = "/dev/shm"
ENGINES = ("podman", "docker")
DNS = ("--dns-option", "timeout:1", "--dns-option", "attempts:2")
"""torch asks for the name of every address that leaves it. A cluster knows at once that a pod has gone; here that
question may go to a server of the world outside, and be waited for."""
_FAST_S = 30.0
_SLOW_S = 120.0


def has_image(program: str, image: str, shell: Shell) -> bool:
    return bool(image) and shell.ask([program, "image", "inspect", image], timeout_s=_FAST_S).is_ok


class Containers:
    """Runs each pod as one container of one image."""

    can_cut = True

    def __init__(self, program: str, image: str, folders: Folders, names: Names, shell: Shell) -> None:
        self.name = program
        self.folders = folders
        self._image = image
        self._names = names
        self._shell = shell
        self._id = folders.root.name
        """The name of the network and, with a number, of each container."""
        self._subnet: ipaddress.IPv4Network | None = None
        self._addresses: dict[str, str] = {}
        self._started: list[str] = []  # Containers, made or about to be.

    def changes(self) -> list[Change]:
        return [Change("image", "of the manifest", f"{self._image}, run by {self.name}"),
                Change("unknown DNS names", "answered by the cluster", "time out after 2 s")]

    def begin(self) -> None:
        chosen = random.Random()  # not the run's: two rehearsals at one time must differ
        answer = CommandResult(1)
        for _ in range(TRIES):
            subnet = ipaddress.IPv4Network(f"10.{chosen.randrange(100, 250)}.{chosen.randrange(256)}.0/24")
            answer = self._change("network", "create", "--subnet", str(subnet), self._id)
            if answer.is_ok:
                self._subnet = subnet
                self._refuse_nameless()
                return
        raise Fault(f"{self.name} cannot create a network: {answer.err.strip()}", fix=f"try {self.name} network create")

    def start(self, start: Start) -> LineStream:
        pod = start.pod
        assert self._subnet is not None
        address = str(self._subnet[FIRST_ADDRESS + start.number % 200])
        self._addresses[start.key] = address
        self._started.append(self._called(start))
        words = [self.name, "run", "--name", self._called(start), "--hostname", pod.hostname, "--network", self._id,
                 "--ip", address, *DNS, *self._aliases(start), *self._mounts(start, address), *self._limits(start),
                 *self._may(start)]
        env = {name: value.replace(POD_IP, address) for name, value in pod.env.items()}
        # Set in the environment of the client: what is on a command line, everybody on the machine can read. Not those
        # that the client itself lives by.
        handed = {name: value for name, value in env.items() if name not in os.environ}
        words += [word for name, value in env.items()
                  for word in ("--env", name if name in handed else f"{name}={value}")]
        if pod.workdir:
            words += ["--workdir", pod.workdir]
        if pod.command:
            words += ["--entrypoint", pod.command[0]]
        words += [self._image, *(word.replace(POD_IP, address) for word in (*pod.command[1:], *pod.args))]
        # Where a container's memory ends, podman's monitor writes an empty file `oom` into the folder it was called in:
        # https://github.com/containers/conmon/issues/504
        return LineStream(words, folder=self.folders.root, env={**os.environ, **handed}, is_merged=True)

    def term(self, start: Start) -> None:
        self._change("kill", "--signal", "TERM", self._called(start))

    def kill(self, start: Start) -> None:
        self._change("kill", "--signal", "KILL", self._called(start))

    def sweep(self, start: Start) -> None:
        """Do nothing: a container ends with its first process."""

    def begin_fault(self, kind: str, start: Start) -> None:
        own = self._called(start)
        self._must(start, *(["pause", own] if kind == "pause" else ["network", "disconnect", self._id, own]))

    def end_fault(self, kind: str, start: Start) -> None:
        own, address = self._called(start), self._addresses[start.key]
        aliases = [word.replace("--network-alias", "--alias") for word in self._aliases(start)]
        self._must(start, *(["unpause", own] if kind == "pause" else
                            ["network", "connect", "--ip", address, *aliases, self._id, own]))

    def close(self, *, keep: bool) -> str:
        """Remove everything; return what is left and how to remove it, with `keep` or if the engine failed."""
        names = self._there()
        remove = ["rm", "--force", *(["--time", "0"] if self.name == "podman" else []), *names]
        network = ["network", "rm", self._id]
        if keep:
            for name in names:
                self._change("kill", name)
            return (f"{self.folders.root} and containers {self._id}-*; {self.name} {' '.join(remove)}; "
                    f"{self.name} {' '.join(network)}; rm -r {self.folders.root} removes them")
        commands = [*([remove] if names else []), *([network] if self._subnet is not None else [])]
        failed = [(words, done) for words in commands if not (done := self._change(*words)).is_ok]
        return "; ".join(f"{self.name} {' '.join(words)}: {(done.err or done.out).strip() or 'no answer'}"
                         for words, done in failed)

    def _there(self) -> list[str]:
        """Return the containers that exist: of several names to remove, podman removes none if one does not exist.

        If the engine does not answer, all that were started.
        """
        answer = self._shell.ask([self.name, "ps", "--all", "--filter", f"name={self._id}", "--format", "{{.Names}}"],
                               timeout_s=_SLOW_S)
        return answer.out.split() if answer.is_ok else self._started

    def _refuse_nameless(self) -> None:
        """Refuse networks of podman's older plugins, in which no name resolves."""
        answer = self._shell.ask([self.name, "network", "inspect", self._id], timeout_s=_FAST_S)
        if self.name == "podman" and '"dns_enabled": false' in answer.out:
            raise UserError("podman's networks have no names here",
                            fix="apt-get install -y netavark aardvark-dns; or --engine processes")

    def _called(self, start: Start) -> str:
        # Not the pod's own name, which would then resolve for others though no Service says so.
        return f"{self._id}-{start.number}"

    def _aliases(self, start: Start) -> list[str]:
        return [word for name in self._names.by_pod[start.pod.name] for word in ("--network-alias", name)]

    def _mounts(self, start: Start, address: str) -> list[str]:
        pod = start.pod
        words = ["--volume", f"{self._hosts(start, address)}:/etc/hosts:ro"]
        for mount in pod.mounts:
            path = mount.path.rstrip("/")
            if mount.kind == "memory":
                half = psutil.virtual_memory().total // 2
                size = min(mount.size_bytes or half, half)
                words += ["--shm-size", str(size)] if path == SHM else ["--tmpfs", f"{path}:rw,mode=1777,size={size}"]
            else:
                words += ["--volume", f"{self.folders.of(mount, start)}:{path}{':ro' if mount.is_read_only else ''}"]
        return words

    def _hosts(self, start: Start, address: str) -> Path:
        """Write /etc/hosts as the kubelet does: a pod knows itself by its full name, and gives that name to others."""
        pod = start.pod
        path = self.folders.root / "hosts" / start.key.replace("#", "-")
        path.parent.mkdir(parents=True, exist_ok=True)
        qualified = f"{pod.names[-1]} " if pod.names else ""
        path.write_text(f"127.0.0.1 localhost\n{address} {qualified}{pod.hostname}\n")
        return path

    def _limits(self, start: Start) -> list[str]:
        words: list[str] = []
        if start.pod.memory_bytes:
            words += ["--memory", str(start.pod.memory_bytes)]
        if start.pod.cpus:
            words += ["--cpus", f"{start.pod.cpus:g}"]
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if self.name == "podman" and 0 <= hard < WIDE_NOFILE:
            num_processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
            most = 4096 if num_processes < 0 else min(num_processes, 4096)
            words += ["--ulimit", f"nofile={hard}:{hard}", "--ulimit", f"nproc={most}:{most}"]
        return words

    def _may(self, start: Start) -> list[str]:
        may = start.pod.security
        words: list[str] = []
        if may.user is not None:
            words += ["--user", f"{may.user}:{may.group}" if may.group is not None else str(may.user)]
        words += [word for name in may.drops for word in ("--cap-drop", name)]
        words += [word for name in may.adds for word in ("--cap-add", name)]
        if not may.may_gain:
            words += ["--security-opt", "no-new-privileges"]
        return [*words, "--read-only"] if may.is_read_only else words

    def _must(self, start: Start, *words: str) -> None:
        done = self._change(*words)
        if not done.is_ok:
            raise Fault(f"{self.name} {words[0]} of {start.pod.name} failed: {(done.err or done.out).strip()}",
                        fix="try without this fault")

    def _change(self, *words: str) -> CommandResult:
        return self._shell.change([self.name, *words], timeout_s=_SLOW_S)


Engine = Processes | Containers  # Runs the pods on this machine, and injects the faults of a cloud.
