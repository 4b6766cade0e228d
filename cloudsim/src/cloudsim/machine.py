"""The first start of a plain machine: bash runs its script and finds only the programs that the machine would have."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import yaml

from cloudsim.account import Account, AnsweredBy, Call, Program
from cloudsim.server import AccountServer
from cloudsim.state import Refusal

QUIET = ("apt-get", "chown", "docker-credential-gcr", "lsblk", "mdadm", "mkfs.ext4", "mount", "nvidia-smi", "sleep",
         "systemctl", "tee", "usermod")
"""Programs of the machine's image that do nothing here and succeed."""
REAL = ("awk", "cat", "chmod", "mkdir", "seq", "true")
OWN = ("/etc/embark", "/var/lib/embark", "/opt/embark", "/usr/local/bin", "/var/log")
"""Folders that the programs of a machine write; here they are below one folder."""
CLOUD_CONFIG = "#cloud-config"
SPEC = "/etc/embark/spec.toml"
FIRST_START_S = 60.0  # Time limit on this computer, where all programs answer at once.


class ImageRights(Protocol):
    """The rights of one machine at the cloud's registries. Each method returns an error, or an empty text."""

    def login_error(self, host: str, user: str, password: str) -> str: ...

    def pull_error(self, image: str, logins: set[str]) -> str: ...


@dataclass(slots=True)
class FirstStart:
    """The log of a first start and the program that it left running."""

    log: str = ""
    words: tuple[str, ...] = ()  # The command that trains; empty if none was started.
    image: str = ""  # The image of its container; empty if it has none.
    spec: str = ""

    @property
    def is_training(self) -> bool:
        return bool(self.words)

    @property
    def trouble(self) -> str:
        """The last line of the log if nothing trains, else an empty text."""
        lines = [line for line in self.log.splitlines() if line.strip()]
        return "" if self.words else lines[-1] if lines else "the machine's programs start no training"


@dataclass(slots=True)
class MachineDocker:
    """Docker on one machine."""

    rights: ImageRights
    name: str = "docker"
    answered_by: AnsweredBy = "stand-in"
    logins: set[str] = field(default_factory=set)
    pulled: set[str] = field(default_factory=set)
    running: str = ""
    words: tuple[str, ...] = ()  # The command of the container.

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
        raise Refusal(f"docker: '{verb}' is not a docker command.")

    def _login(self, words: list[str], password: str) -> str:
        user = next((after for word, after in pairwise(words) if word in ("--username", "-u")), "")
        host = words[-1].removeprefix("https://").rstrip("/")
        if why := self.rights.login_error(host, user, password):
            raise Refusal(why)
        self.logins.add(host)
        return "Login Succeeded\n"

    def _pull(self, image: str) -> str:
        if why := self.rights.pull_error(image, self.logins):
            raise Refusal(f"Error response from daemon: {why}")
        self.pulled.add(image)
        return f"Status: Downloaded newer image for {image}\n"

    def _run(self, words: list[str]) -> str:
        """Start a container. Its image is the word that was pulled; docker pulls one that is missing, with the same
        rights."""
        image = next((word for word in words if word in self.pulled), "")
        if not image:
            image = next((word for word in words if "/" in word and not word.startswith("-") and ":/" not in word), "")
            self._pull(image)
        self.running, self.words = image, tuple(words[words.index(image) + 1:]) or (image,)
        return ""


@dataclass(slots=True)
class FunctionProgram:
    """A program that one function answers."""

    name: str
    answer: Callable[[Call], str]
    answered_by: AnsweredBy = "stand-in"

    def run(self, call: Call) -> str:
        return self.answer(call)


@dataclass(slots=True)
class _Python:
    """Python with its virtual environments and pip, and systemd-run if it starts Python."""

    shims: Path
    words: tuple[str, ...] = ()

    def programs(self) -> list[Program]:
        return [FunctionProgram(name, answer) for name, answer in (
            ("python3", self._python), ("python3.11", self._python), ("python", self._python), ("pip", self._pip),
            ("systemd-run", self._service))]

    def _python(self, call: Call) -> str:
        if call.words[:2] == ("-m", "venv"):
            folder = Path(call.words[2], "bin")
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("pip", "python"):
                shutil.copy(self.shims / name, folder / name)
        elif call.words[0] != "-c":
            self.words = ("python", *call.words)
        return ""

    def _pip(self, call: Call) -> str:
        for word in call.words:
            file = word.partition("[")[0]
            if file.endswith(".whl") and not Path(file).is_file():
                raise Refusal(f"ERROR: {file}: no such file")
            if word.startswith("embark-rec"):
                raise Refusal(f"ERROR: No matching distribution found for {word}")
        return ""

    def _service(self, call: Call) -> str:
        program = [word for word in call.words if not word.startswith("--") or "=" not in word]
        self.words = ("python", *program[1:]) if program else ()
        return ""


def first_start(given: str, docker: MachineDocker, programs: Sequence[Program], name: str = "machine") -> FirstStart:
    """Run the commands of a cloud-config in order and the service that they enable, or a startup script."""
    start = FirstStart()
    with tempfile.TemporaryDirectory() as kept:
        root = Path(kept)
        python = _Python(root / "bin")
        machine = Account("machine", root)
        quiet = [FunctionProgram(program, lambda _: "") for program in QUIET]
        machine.add_programs([*quiet, docker, *python.programs(), *programs])
        server = AccountServer(machine)
        server.write_shims(root / "bin")
        for one in REAL:
            (root / "bin" / one).symlink_to(shutil.which(one) or f"/bin/{one}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            _run_all(given, root, name, start)
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
        spec = root / SPEC.lstrip("/")
        start.spec = spec.read_text() if spec.is_file() else ""
    start.log = start.log.replace(str(root), "")
    start.words = tuple(word.replace(str(root), "") for word in docker.words or python.words)
    start.image = docker.running
    return start


def _run_all(given: str, root: Path, name: str, start: FirstStart) -> None:
    """Run the commands up to the first that fails."""
    if given.startswith(CLOUD_CONFIG):
        config = yaml.safe_load(given) or {}
        files = {str(one["path"]): str(one["content"]) for one in config.get("write_files") or ()}
        commands = [one if isinstance(one, list) else str(one).split() for one in config.get("runcmd") or ()]
    else:
        files, commands = {"/usr/local/bin/startup-script": given}, [["/usr/local/bin/startup-script"]]
    for folder in OWN:
        (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        _write(root, path, content)
    for words in commands:
        program = _service(words, files) if words[0] == "systemctl" else words[0]
        if program is None:
            continue
        if program not in files:
            start.log += f"{program}: No such file or directory\n"
            return
        done = subprocess.run(["/bin/bash", str(root / program.lstrip("/"))], cwd=root, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                              timeout=FIRST_START_S, check=False,
                              env={"PATH": str(root / "bin"), "HOME": "/root", "HOSTNAME": name})
        start.log += done.stdout
        if done.returncode:
            start.log += "" if done.stdout.strip() else f"{program} ended with code {done.returncode}\n"
            return


def _service(words: Sequence[str], files: Mapping[str, str]) -> str | None:
    """Return the program of a unit that is being started."""
    if "--now" not in words and "start" not in words:
        return None
    unit = files.get(f"/etc/systemd/system/{words[-1]}", "")
    return next((line.removeprefix("ExecStart=").split()[0] for line in unit.splitlines()
                 if line.startswith("ExecStart=")), f"{words[-1]}: unit not found")


def _write(root: Path, path: str, content: str) -> None:
    """Write a file, and redirect the machine's folders in a script to those below `root`."""
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(re.sub(rf"(?<![\w.-])({'|'.join(map(re.escape, OWN))})(?=[/\s\"':\]]|-wheels)",
                           lambda found: f"{root}{found[1]}", content) if content.startswith("#!") else content)
