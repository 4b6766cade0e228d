"""Pods as containers of the image, on a network of their own where the Services' names resolve: podman or docker."""

import ipaddress
import os
import random
import resource
from pathlib import Path

import psutil

from embark.errors import Fault, UserError
from embark.launch.shell import CommandResult, LineStream, Shell
from embark.rehearse.downscale import Change
from embark.rehearse.manifest import POD_IP
from embark.rehearse.pods import Names
from embark.rehearse.processes import Folders, Processes, Start

FIRST_ADDRESS = 10
TRIES = 20
WIDE_NOFILE = 1_048_576  # What podman asks for by itself; where the hard limit is lower, a container would not start.
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
    """One container a pod, of one image."""

    can_cut = True

    def __init__(self, program: str, image: str, folders: Folders, names: Names, shell: Shell) -> None:
        self.name = program
        self.folders = folders
        self._image = image
        self._names = names
        self._shell = shell
        self._id = folders.root.name
        """Of the network and, with a number, of each container: what belongs together is called alike."""
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
        # By the environment of the client: what is on a command line, everybody on the machine can read. Not those
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
        """A container ends with its first process: nothing is left of it."""

    def begin_fault(self, kind: str, start: Start) -> None:
        own = self._called(start)
        self._must(start, *(["pause", own] if kind == "pause" else ["network", "disconnect", self._id, own]))

    def end_fault(self, kind: str, start: Start) -> None:
        own, address = self._called(start), self._addresses[start.key]
        aliases = [word.replace("--network-alias", "--alias") for word in self._aliases(start)]
        self._must(start, *(["unpause", own] if kind == "pause" else
                            ["network", "connect", "--ip", address, *aliases, self._id, own]))

    def close(self, *, keep: bool) -> str:
        """What is left and how to remove it: with `keep`, or where the engine could not remove it."""
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
        """The containers that were made: of several names to remove, podman removes none where one is not there. All
        that were started, if the engine does not say."""
        answer = self._shell.ask([self.name, "ps", "--all", "--filter", f"name={self._id}", "--format", "{{.Names}}"],
                               timeout_s=_SLOW_S)
        return answer.out.split() if answer.is_ok else self._started

    def _refuse_nameless(self) -> None:
        """Podman with its older network plugins makes networks where no name resolves."""
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
        """As the kubelet writes it: a pod knows itself by its whole name, and says that name to others."""
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


Engine = Processes | Containers  # What runs the pods here, and does to them what a cloud does.
