"""Machines to log in to: OpenSSH's own server on loopback, on a free port, with keys of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from limits import HANG_S

from embark.launch.supervisor_client import Host, ssh_words, write_known_hosts


@dataclass
class Server:
    """One machine: its server, and the folder that is its disk."""

    name: str
    folder: Path
    port: int
    config: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def host_key(self) -> str:
        return (self.folder / "host_key.pub").read_text().strip()

    def start(self) -> None:
        log = (self.folder / "sshd.log").open("ab")
        program = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
        # Its own path: it starts itself anew for each connection.
        self.process = subprocess.Popen([str(program), "-D", "-e", "-f", str(self.config)], stderr=log, stdout=log)
        log.close()
        until_s = time.monotonic() + HANG_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert self.process.poll() is None, (self.folder / "sshd.log").read_text()
            assert time.monotonic() < until_s
            time.sleep(0.02)

    def stop(self) -> None:
        """The server and every connection to it; what was started through it and detached lives on."""
        if self.process is not None:
            self.cut()
            self.process.terminate()
            self.process.wait(HANG_S)
            self.process = None

    def cut(self) -> None:
        """Ends the connections there are."""
        assert self.process is not None
        for pid in children_of(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def host(self, index: int, key: Path, known_hosts: Path, folder: Path | None = None) -> Host:
        words = ssh_words("127.0.0.1", user=getpass.getuser(), key=key, known_hosts=known_hosts, alias=self.name,
                          port=self.port)
        return Host(self.name, index, words, str(folder or self.folder / "run"))


@contextlib.contextmanager
def servers(folder: Path, *names: str) -> Iterator[tuple[list[Server], Path, Path]]:
    """Servers, the key that opens them, and the file of their host keys."""
    key, known_hosts = folder / "key", folder / "known_hosts"
    keygen(key)
    if os.geteuid() == 0:  # its server insists on the folder where it would leave root's rights
        Path("/run/sshd").mkdir(exist_ok=True, mode=0o755)
    made: list[Server] = []
    try:
        for name in names:
            made.append(_server(folder / name, name, key))
            made[-1].start()
        write_known_hosts(known_hosts, {server.name: server.host_key for server in made})
        yield made, key, known_hosts
    finally:
        for server in made:
            server.stop()


def keygen(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-t", "ed25519", "-N", "", "-q", "-f", str(path)], check=True, timeout=HANG_S)


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return [*found, *(grandchild for child in found for grandchild in children_of(child))]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _server(folder: Path, name: str, key: Path) -> Server:
    folder.mkdir()
    keygen(folder / "host_key")
    server = Server(name, folder, free_port(), folder / "sshd_config")
    server.config.write_text(f"""\
ListenAddress 127.0.0.1
Port {server.port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {key}.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
""")
    return server
