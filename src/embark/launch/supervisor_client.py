"""Jobs that `supervisor.py` runs, here or on machines reached by ssh: start, inspect, read and stop them."""

from __future__ import annotations

import base64
import gzip
import io
import json
import shlex
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from embark.errors import EmbarkError, Fault, UserError
from embark.formatting import format_duration, pluralize, to_one_line
from embark.render.job import EXITS
from embark.values import frozen
from . import supervisor
from .backend import LogLine, LogSource, Replica, Status, explain_exit, time_ns
from .shell import CommandResult, Notify, Shell

PROGRAM = Path(supervisor.__file__)
WAIT_S = 15.0


def job_json(command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str = "", wait_s: float = WAIT_S,
             restarts: bool = True, after: Sequence[str] = ()) -> str:
    """Return the supervisor's job. Which exit codes are retried comes from the table of all controllers' failure
    policies.

    `after` is a command to run once the job has ended, unless it was stopped.
    """
    return json.dumps({
        "command": list(command), "env": dict(env or {}), "cwd": cwd, "wait_s": wait_s, "restarts": restarts,
        "final_codes": [int(row.code) for row in EXITS if not row.must_retry],
        "after": list(after)
    })


@frozen
class SupervisorState:
    """The state of a machine's ranks, as its supervisor reports it."""

    is_alive: bool = False
    pid: int = 0
    started_s: float | None = None
    phase: str = ""  # `running`, or `waiting` between two attempts.
    num_restarts: int = 0
    last_code: int = 0
    code: int | None = None  # Final exit code; None while the job has not ended.
    was_stopped: bool = False
    ended_s: float = 0.0

    @classmethod
    def parse(cls, out: str) -> SupervisorState:
        """Parse the last line that a command of the supervisor printed. Raises ValueError."""
        try:
            return cls(**json.loads(out.strip().splitlines()[-1]))
        except (IndexError, TypeError) as error:
            raise ValueError(str(error)) from error

    @property
    def is_lost(self) -> bool:
        """Whether it is gone without an end: the machine was rebooted or replaced, or the supervisor killed."""
        return not self.is_alive and self.code is None


def status_of(states: Mapping[int, SupervisorState | None], names: Mapping[int, str], run_uri: str) -> Status:
    """Return the run's status from the state of each of its machines; None is a machine that does not answer."""
    replicas = tuple(_replica(names[index], index, states[index]) for index in sorted(states))
    known = [one for one in states.values() if one is not None]
    since_s = min((one.started_s for one in known if one.started_s), default=None)
    num_restarts = max((one.num_restarts for one in known), default=0)

    ended_s = max((one.ended_s for one in known if one.code is not None), default=None)
    status = Status("running", replicas=replicas, since_s=since_s, ended_s=ended_s, num_restarts=num_restarts)
    lasted = format_duration(max(0.0, (ended_s or 0.0) - since_s)) if since_s else "a while"
    # All ranks make the last save together, so where one has ended well, all have trained to the end.
    if any(one.code == 0 for one in known):
        return status.become("succeeded", f"took {lasted}")
    for index, one in sorted(states.items()):
        if one is not None and one.code not in (None, 0) and not one.was_stopped:
            why = explain_exit(one.code or 0)
            return status.become("failed", f"{names[index]}: {why.text}, after {lasted}", why.fix)
    if any(one.was_stopped for one in known):
        return status.become("gone", f"stopped after {lasted}", f"its checkpoints are in {run_uri}")
    silent = [names[index] for index, one in sorted(states.items()) if one is None]
    if silent:
        return status.become("restarting", f"{', '.join(silent)} does not answer")
    troubled = [replica for replica in replicas if replica.state in ("lost", "restarting")]
    if troubled:
        return status.become("restarting", f"{troubled[0].name}: {troubled[0].why}")
    return status


def _replica(name: str, index: int, state: SupervisorState | None) -> Replica:
    if state is None:
        return Replica(name, index, "unreachable", "does not answer")
    if state.code is not None:
        return Replica(name, index, "ended", explain_exit(state.code).text if state.code else "")
    if state.is_lost:
        return Replica(name, index, "lost", "its ranks are gone: the machine was rebooted, or they were killed")
    if state.phase == "waiting":
        return Replica(name, index, "restarting", explain_exit(state.last_code).text)
    restarts = f"restarted {pluralize(state.num_restarts, 'time')}" if state.num_restarts else ""
    return Replica(name, index, "running", restarts)


CONNECT_S = 15
CALL_S = 90.0  # Limit of one remote command, its connection included.
POLL_S = 1.0
MAX_CONNECTIONS = 16
CONNECTION_FAILED = 255  # ssh's own exit code.
_T = TypeVar("_T")


class Unreachable(Fault):
    """The machine does not answer."""


def wait_while(trouble: Callable[[], str], limit_s: float, poll_s: float, notify: Notify) -> None:
    """Wait until `trouble` returns an empty text, and report its changes; raises `Unreachable` with it at the limit."""
    until_s, reported = time.monotonic() + limit_s, ""
    while text := trouble():
        if time.monotonic() > until_s:
            raise Unreachable(f"{text}, after {format_duration(limit_s)}", "embark launch --supervise tries again")
        if text != reported:
            notify(text)
            reported = text
        time.sleep(poll_s)


@frozen
class Host:
    """A machine, and the words that run a command on it."""

    name: str
    index: int
    words: tuple[str, ...]  # A remote shell's line is added as the last word.
    folder: str  # The run's folder there, an absolute path.
    prefix: tuple[str, ...] = ()  # `sudo -n` where the login user is not root.

    def command(self, line: str) -> tuple[str, ...]:
        return (*self.words, shlex.join([*self.prefix, "sh", "-c", line]))

    def supervisor(self, command: str, *rest: str) -> str:
        """Return the shell line that calls the machine's supervisor."""
        return "exec " + shlex.join(["python3", f"{self.folder}/{PROGRAM.name}", command, self.folder, *rest])


def ssh_words(
    address: str, *, user: str, key: Path, known_hosts: Path, alias: str, port: int = 22, proxy: str = ""
) -> tuple[str, ...]:
    """Return an ssh connection that never prompts and trusts only the key of `alias` in `known_hosts`."""
    options = [
        "BatchMode=yes", "StrictHostKeyChecking=yes", f"UserKnownHostsFile={_quoted(known_hosts)}",
        "GlobalKnownHostsFile=/dev/null", "UpdateHostKeys=no", f"HostKeyAlias={alias}", "IdentitiesOnly=yes",
        "IdentityAgent=none", f"IdentityFile={_quoted(key)}", "PreferredAuthentications=publickey",
        f"ConnectTimeout={CONNECT_S}", "ServerAliveInterval=15", "ServerAliveCountMax=4", "LogLevel=ERROR",
        *([f"ProxyCommand={proxy}"] if proxy else [])
    ]
    # The user's own config may forward ports or run commands, so it is not read.
    return ("ssh", "-F", "/dev/null", "-T", "-p", str(port), *(word for one in options for word in ("-o", one)),
            f"{user}@{address}")


def make_key(shell: Shell, path: Path, comment: str) -> None:
    """Create a key pair for this run alone, unless it exists."""
    if not shell.is_dry:
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    done = shell.change(["ssh-keygen", "-t", "ed25519", "-N", "", "-q", "-C", comment, "-f", str(path)])
    if not done.is_ok:
        raise Fault(f"ssh-keygen made no key: {to_one_line(done.err)[:300]}")


def write_known_hosts(known_hosts: Path, keys: Mapping[str, str]) -> None:
    """Add the public key of each machine by its alias, in place of earlier ones."""
    lines = known_hosts.read_text().splitlines() if known_hosts.exists() else []
    lines = [line for line in lines if line.partition(" ")[0] not in keys]
    lines += [f"{alias} {' '.join(key.split()[:2])}" for alias, key in keys.items()]
    known_hosts.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    known_hosts.write_text("\n".join(lines) + "\n")


@dataclass
class SupervisorClient:
    """Controls the supervisors of a run's machines."""

    shell: Shell
    notify: Notify

    def wait_for(self, hosts: Sequence[Host], limit_s: float) -> None:
        """Wait until every machine answers: a new one takes minutes."""
        def trouble() -> str:
            results = self._all(hosts, lambda host: self.shell.ask(host.command("exec true"), timeout_s=CALL_S))
            failed = [(host, done) for host, done in results if not done.is_ok]
            for host, done in failed:
                if "Host key verification failed" in done.err:
                    raise _error(host, done)
            names = ", ".join(names_of(host for host, _ in failed).values())
            return f"{names} not reachable yet: {to_one_line(failed[0][1].err)[:300]}" if failed else ""

        wait_while(trouble, limit_s, POLL_S * 3, self.notify)

    def start(
        self, hosts: Sequence[Host], files: Callable[[Host], Mapping[str, str | bytes]], *, is_fresh: bool
    ) -> None:
        """Copy each host's files and start its supervisor, unless it runs or the run has ended there."""
        def one(host: Host) -> None:
            folder, start = shlex.quote(host.folder), host.supervisor("start", *(["--fresh"] if is_fresh else []))
            line = f"mkdir -p {folder} && base64 -d | tar -xzf - -C {folder} && {start}"
            done = self.shell.change(host.command(line), stdin=pack_files(files(host)),
                                      stdin_name="the spec, its start script and the supervisor", timeout_s=CALL_S)
            if not self.shell.is_dry and _state(host, done).is_lost:
                raise Fault(f"{host.name}: the supervisor did not start: {to_one_line(done.err)[:300]}",
                            f"see {host.folder}/supervisor.log there")

        self._all(hosts, one)

    def states(self, hosts: Sequence[Host]) -> dict[int, SupervisorState | None]:
        """Return states by the machine's index; None for a machine that does not answer."""
        def one(host: Host) -> SupervisorState | None:
            try:
                return _state(host, self.shell.ask(host.command(host.supervisor("status")), timeout_s=CALL_S))
            except Unreachable:
                return None

        return {host.index: state for host, state in self._all(hosts, one)}

    def stop(self, hosts: Sequence[Host], grace_s: float) -> list[Host]:
        """Send SIGTERM to all at once, on which the trainer saves; return those that were killed or not reached.

        It polls instead of waiting in one connection, which may be cut.
        """
        self._send(hosts, "stop")
        if self.shell.is_dry:
            return []
        ending, until_s = list(hosts), time.monotonic() + grace_s
        while ending and time.monotonic() < until_s:
            states = self.states(ending)
            ending = [host for host in ending if (one := states[host.index]) is None or one.is_alive]
            if ending:
                time.sleep(POLL_S)
        self._send(ending, "kill")
        return ending

    def restart(self, hosts: Sequence[Host]) -> None:
        """End the current attempt after a checkpoint; the next one finds rank 0 at its new address."""
        self._send(hosts, "restart")

    def log_sources(self, hosts: Sequence[Host], positions: dict[int, LogPosition]) -> list[LogSource]:
        return [self._log_source(host, positions.setdefault(host.index, LogPosition())) for host in hosts]

    def _log_source(self, host: Host, position: LogPosition) -> LogSource:
        def on_failure(done: CommandResult) -> None:
            if not position.has_failed:
                position.has_failed = True
                self.notify(f"the connection to {host.name} was cut: {to_one_line(done.err)[:200]}; reconnecting")

        stream = self.shell.lines(host.command(position.tail_line(host.folder)))
        return LogSource(stream, lambda text: position.parse(host, text), on_failure)

    def _send(self, hosts: Sequence[Host], command: str) -> None:
        self._all(hosts, lambda host: self.shell.change(host.command(host.supervisor(command)), timeout_s=CALL_S))

    def _all(self, hosts: Sequence[Host], one: Callable[[Host], _T]) -> list[tuple[Host, _T]]:
        """Call `one` for all hosts at once; on a dry run in order, so that the output reads well."""
        if self.shell.is_dry or len(hosts) < 2:
            return [(host, one(host)) for host in hosts]
        with ThreadPoolExecutor(min(MAX_CONNECTIONS, len(hosts))) as pool:
            return list(zip(hosts, pool.map(one, hosts), strict=True))


@dataclass(slots=True)
class LogPosition:
    """The position up to which one machine's log was read."""

    log_id: str = ""  # Inode and time of birth: a machine that was replaced has another log.
    num_read: int = 0
    has_failed: bool = False  # Its stream has failed since its last line.

    def tail_line(self, folder: str) -> str:
        """Return the shell line that prints `log ID`, then the lines that were not read yet."""
        return (f"cd {shlex.quote(folder)} && [ -e {supervisor.LOG} ] || exit 0; id=$(stat -c %i.%W {supervisor.LOG}); "
                f"echo log $id; first=1; if [ $id = {self.log_id or '-'} ]; then first={self.num_read + 1}; fi; "
                f"exec tail --lines=+$first {supervisor.LOG}")

    def parse(self, host: Host, text: str) -> LogLine | None:
        stamp, _, rest = text.partition(" ")
        if stamp == "log":
            if rest != self.log_id:
                self.log_id, self.num_read = rest, 0
            return None
        self.num_read += 1
        self.has_failed = False
        at_ns = time_ns(stamp)
        return LogLine.of(at_ns, host.name, rest if at_ns else text, host.index)


def pack_files(files: Mapping[str, str | bytes]) -> str:
    """Return the files and the supervisor as a tar in base64. Nothing in it is secret: a container's user reads the
    spec."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, text in {PROGRAM.name: PROGRAM.read_text(encoding="utf-8"), **files}.items():
            data = text.encode() if isinstance(text, str) else text
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755 if data.startswith(b"#!") else 0o644
            tar.addfile(info, io.BytesIO(data))
    return base64.b64encode(gzip.compress(packed.getvalue(), mtime=0)).decode()


def names_of(hosts: Iterable[Host]) -> dict[int, str]:
    return {host.index: host.name for host in hosts}


def _state(host: Host, done: CommandResult) -> SupervisorState:
    if not done.is_ok:
        if "can't open file" in done.err:  # a replaced machine that has not been given the job yet
            return SupervisorState()
        raise _error(host, done)
    try:
        return SupervisorState.parse(done.out)
    except ValueError as error:
        raise Fault(f"{host.name}: not a supervisor's status: {to_one_line(done.out)[:200]}") from error


def _error(host: Host, done: CommandResult) -> EmbarkError:
    said = to_one_line(done.err)[:300]
    if "Host key verification failed" in done.err:
        return UserError(f"{host.name} shows another host key than the one its cloud reported: {said}",
                         "if the machine was replaced by hand, embark cancel and launch again; if not, the "
                             "connection may be intercepted")
    if done.code == CONNECTION_FAILED or done.has_timed_out:
        return Unreachable(f"{host.name} does not answer: {said}", "embark status checks again")
    return Fault(f"{host.name}: {said or f'exit code {done.code}'}", "log in there and look")


def _quoted(path: Path) -> str:
    """Quote a path for ssh's options, which interpret spaces and percent signs."""
    return '"' + str(path).replace("%", "%%") + '"'
