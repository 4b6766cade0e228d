"""A plain machine's first start: bash runs what its cloud-config says, and finds only the machine's own programs."""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import yaml

from embark.rehearse.account.account import Account, AnsweredBy, Call, Program
from embark.rehearse.account.server import AccountServer, write_shims
from embark.rehearse.account.state import Refused

SYSTEM = ("apt-get", "awk", "chmod", "chown", "lsblk", "mdadm", "mkdir", "mkfs.ext4", "mount", "nvidia-smi", "sleep",
          "systemctl", "tee", "true", "usermod")
"""Programs of the machine's own image, which do nothing here and succeed."""
FIRST_START_S = 60.0  # Of this computer's time: the programs answer at once.


class ImageRights(Protocol):
    """Of one machine at the cloud's registries. A text is the error; empty means yes."""

    def login_error(self, host: str, user: str, password: str) -> str: ...

    def pull_error(self, image: str, logins: set[str]) -> str: ...


@dataclass(slots=True)
class FirstStart:
    """How it went."""

    log: str = ""
    image: str = ""  # Of the container that trains; empty where none was started.

    @property
    def is_training(self) -> bool:
        return bool(self.image)


@dataclass(slots=True)
class MachineDocker:
    """Docker of one machine."""

    rights: ImageRights
    name: str = "docker"
    answered_by: AnsweredBy = "stand-in"
    logins: set[str] = field(default_factory=set)
    pulled: set[str] = field(default_factory=set)
    running: str = ""

    def run(self, call: Call) -> str:
        verb, words = call.words[0], list(call.words[1:])
        if verb == "login":
            return self._login(words, call.stdin)
        if verb == "pull":
            return self._pull(words[-1])
        if verb == "run":
            return self._run(words)
        if verb in ("rm", "stop", "ps", "info", "version"):
            return ""
        raise Refused(f"docker: '{verb}' is not a docker command.")

    def _login(self, words: list[str], password: str) -> str:
        user = next((after for word, after in pairwise(words) if word in ("--username", "-u")), "")
        host = words[-1].removeprefix("https://").rstrip("/")
        if why := self.rights.login_error(host, user, password):
            raise Refused(why)
        self.logins.add(host)
        return "Login Succeeded\n"

    def _pull(self, image: str) -> str:
        if why := self.rights.pull_error(image, self.logins):
            raise Refused(f"Error response from daemon: {why}")
        self.pulled.add(image)
        return f"Status: Downloaded newer image for {image}\n"

    def _run(self, words: list[str]) -> str:
        """The image is the word that was pulled; docker pulls one that is not there, with the same rights."""
        image = next((word for word in words if word in self.pulled), "")
        if not image:
            image = next((word for word in words if "/" in word and not word.startswith("-") and ":/" not in word), "")
            self._pull(image)
        self.running = image
        return ""


@dataclass(slots=True)
class _Quiet:
    """A program of the machine's image."""

    name: str
    answered_by: AnsweredBy = "stand-in"

    def run(self, call: Call) -> str:
        return ""


@dataclass(slots=True)
class Answering:
    """A program that one function answers."""

    name: str
    answer: Callable[[Call], str]
    answered_by: AnsweredBy = "stand-in"

    def run(self, call: Call) -> str:
        return self.answer(call)


def first_start(cloud_config: str, docker: MachineDocker, programs: Sequence[Program]) -> FirstStart:
    """Runs the commands of a cloud-config in their order, and the service that they enable."""
    config = yaml.safe_load(cloud_config) or {}
    files = {str(one["path"]): str(one["content"]) for one in config.get("write_files") or ()}
    start = FirstStart()
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        machine = Account("machine", folder)
        machine.add_programs([*(_Quiet(name) for name in SYSTEM), docker, *programs])
        write_shims(machine, folder / "bin", folder / "socket")
        server = AccountServer(machine, folder / "socket")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            for command in config.get("runcmd") or ():
                words = command if isinstance(command, list) else str(command).split()
                program = _service(words, files) if words[0] == "systemctl" else words[0]
                if program is None:
                    continue
                if program not in files:
                    start.log += f"{program}: No such file or directory\n"
                    break
                done = _bash(files[program], folder)
                start.log += done.stdout
                if done.returncode:
                    start.log += f"{program} ended with code {done.returncode}\n"
                    break
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
    start.image = docker.running
    return start


def _service(words: list[str], files: dict[str, str]) -> str | None:
    """The program of a unit that is enabled and started."""
    if "--now" not in words and "start" not in words:
        return None
    unit = files.get(f"/etc/systemd/system/{words[-1]}", "")
    return next((line.removeprefix("ExecStart=").split()[0] for line in unit.splitlines()
                 if line.startswith("ExecStart=")), f"{words[-1]}: unit not found")


def _bash(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "script.sh"
    # The image's own folders are not here.
    script.write_text("cd() { :; }\n" + text)
    return subprocess.run(["/bin/bash", str(script)], cwd=folder, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=FIRST_START_S, check=False,
                          env={"PATH": str(folder / "bin"), "HOME": "/root", "HOSTNAME": "machine"})
