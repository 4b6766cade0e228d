"""An account in a process of its own, and shell commands that run in it as they would in a user's shell."""

import json
import marshal
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from cloudsim.account import AccountReport, Record
from cloudsim.server import REPORT
from embark.errors import Fault

START_S = 120.0
REPORT_S = 120.0
NEVER_ENDED = 124  # The code of timeout(1).
STATE = "shell_state"


class AccountSession:
    """`with AccountSession("aws", folder) as session: session.bash("./storage.sh", folder)`."""

    server: Sequence[str] = ("-m", "cloudsim.server")  # Arguments of Python; the cloud and a folder follow.

    def __init__(self, cloud: str, folder: Path) -> None:
        self._folder = folder
        self._log = (folder / "server.log").open("w+")
        # In a session of its own, so that Ctrl-C ends the shell's commands first.
        self._process = subprocess.Popen(
            [sys.executable, *self.server, cloud, str(folder)], stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True)

    def __enter__(self) -> Self:
        until = time.monotonic() + START_S
        while not (self._folder / "ready").exists():
            if self._process.poll() is not None or time.monotonic() > until:
                self._process.kill()
                raise Fault(f"the account did not start: {(self._folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.05)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.kill()
        self._log.close()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of a shell whose programs are the account's."""
        given: Mapping[str, str] = json.loads((self._folder / "environment.json").read_text())
        path = os.pathsep.join([str(self._folder / "programs"), str(Path(sys.executable).parent),
                                os.environ.get("PATH", "/usr/bin:/bin")])
        kept = {name: value for name, value in os.environ.items()
                if not name.startswith(("AWS_", "AZURE_", "GOOGLE_", "CLOUDSDK_", "KUBECONFIG"))}
        return {**kept, "HOME": str(self._folder), **given, "PATH": path}

    def bash(self, text: str, folder: Path, *, output: int | None = subprocess.PIPE, timeout_s: float = 3600.0
             ) -> subprocess.CompletedProcess[str]:
        """Run lines as if typed one after the other, up to the first that fails. Exported variables and the current
        folder last until the next call; what runs in the background ends with this one. Commands that have not ended
        at the limit are ended; the code is then `NEVER_ENDED`, and the last line names the command that was waiting."""
        state = self._folder / STATE
        script = "\n".join([
            "set -eo pipefail", "trap 'for job in $(jobs -p); do kill $job || true; done 2>/dev/null; wait' EXIT",
            f'if [ -f "{state}" ]; then . "{state}"; fi', text,
            f'{{ export -p; printf "cd %q\\n" "$PWD"; }} >"{state}.new" && mv "{state}.new" "{state}"'])
        words = ["bash", "-c", script]
        with subprocess.Popen(words, cwd=folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=output,
                              stderr=subprocess.STDOUT if output else None, text=True, start_new_session=True
                              ) as process:
            try:
                out, _ = process.communicate(timeout=timeout_s)
                code = process.returncode
            except subprocess.TimeoutExpired:
                waiting = newest_command(process.pid)
                os.killpg(process.pid, signal.SIGKILL)
                out = ""
                with suppress(subprocess.TimeoutExpired):  # A process outside of the group may hold the pipe.
                    out, _ = process.communicate(timeout=10)
                out = (f"{out or ''}\n{waiting} waits for ever: nothing in the account will end it "
                       f"(stopped after {timeout_s:g} s)\n")
                code = NEVER_ENDED
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(words, code, out)

    def report(self) -> AccountReport:
        port, token = json.loads((self._folder / "server.json").read_text())
        with socket.create_connection(("127.0.0.1", port), REPORT_S) as link:
            link.sendall("".join(f"{field}\0" for field in ("5", token, REPORT, "", "", "0")).encode())
            raw = marshal.loads(link.makefile("rb").read())
        records: Sequence[Mapping[str, object]] = raw["records"]
        return AccountReport(raw["cloud"], tuple(Record(**{**one, "words": tuple(one["words"])})  # type: ignore[arg-type]
                                                 for one in records),
                             tuple(raw["paid"]), tuple(raw["not_modelled"]), raw["elapsed_s"], tuple(raw["causes"]))


def newest_command(group: int) -> str:
    """Return the newest command of a process group, as a user would type it."""
    listed = subprocess.run(["ps", "-A", "-o", "pgid=,pid=,ppid=,args="], capture_output=True, text=True, check=True)
    own = [line.split(None, 3) for line in listed.stdout.splitlines() if line.split(None, 1)[0] == str(group)]
    parents = {parent for _, _, parent, _ in own}
    words = next((args.split() for _, pid, _, args in reversed(own) if pid not in parents), ["bash"])
    while len(words) > 1 and Path(words[0]).name.startswith(("bash", "python")) and not words[1].startswith("-"):
        words = words[1:]
    return " ".join([Path(words[0]).name, *words[1:]])
