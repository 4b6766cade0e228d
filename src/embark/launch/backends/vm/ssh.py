"""A run on machines that are reached by ssh: handed over, looked at, read, told to end. No cloud is known here."""

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
from typing import Any, TypeVar

from embark.errors import EmbarkError, ExitCode, Fault, UserError
from embark.formatting import format_duration, pluralize, to_one_line
from embark.launch.backend import Notify, Replica, Status
from embark.launch.backends.kubernetes.reasons import explain_exit
from embark.launch.shell import CommandResult, LineStream, Shell
from embark.render.job import EXITS

CONNECT_S = 15
CALL_S = 90.0
"""For one remote command, its connection included."""
POLL_S = 1.0
MAX_AT_ONCE = 16
"""Connections that are made at the same time."""
WAIT_S = 15.0
MAX_FAULTS = 10
GOOD_S = 600.0
"""Work that lasted so long makes the faults before it forgotten."""
AWAY = 255
"""ssh's own exit code where the connection is at fault."""
_T = TypeVar("_T")


class Unreachable(Fault):
    """The machine does not answer."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, and the command that runs others on it."""

    name: str
    index: int
    words: tuple[str, ...]
    """A remote shell's line is added as the last word."""
    folder: str
    """Of the run, there. Absolute."""
    prefix: tuple[str, ...] = ()
    """`sudo -n` where the one who logs in is not root."""
    python: str = "python3"

    def command(self, line: str) -> tuple[str, ...]:
        return (*self.words, shlex.join([*self.prefix, "sh", "-c", line]))

    def keeper(self, verb: str, *rest: str) -> tuple[str, ...]:
        return self.command(self.keeper_line(verb, *rest))

    def keeper_line(self, verb: str, *rest: str) -> str:
        return "exec " + shlex.join([self.python, f"{self.folder}/keeper.py", verb, self.folder, *rest])


@dataclass(frozen=True, slots=True)
class SupervisorState:
    """What a machine's keeper says of its ranks."""

    is_alive: bool = False
    started_s: float | None = None
    phase: str = ""
    """`running`, or `waiting` between two attempts."""
    num_restarts: int = 0
    last_code: int = 0
    code: int | None = None
    """How it ended for good; None while it has not."""
    was_stopped: bool = False
    ended_s: float = 0.0

    @property
    def is_lost(self) -> bool:
        """It is not there, and did not end: the machine was started again or replaced, or the keeper killed."""
        return not self.is_alive and self.code is None


def ssh_words(
    address: str, *, user: str, key: Path, known_hosts: Path, alias: str, port: int = 22, proxy: str = "",
) -> tuple[str, ...]:
    """Of a connection that asks nothing and trusts no machine whose key is not in `known_hosts` under `alias`."""
    options = [
        "BatchMode=yes", "StrictHostKeyChecking=yes", f"UserKnownHostsFile={_quoted(known_hosts)}",
        "GlobalKnownHostsFile=/dev/null", "UpdateHostKeys=no", f"HostKeyAlias={alias}", "IdentitiesOnly=yes",
        "IdentityAgent=none", f"IdentityFile={_quoted(key)}", "PreferredAuthentications=publickey",
        f"ConnectTimeout={CONNECT_S}", "ServerAliveInterval=15", "ServerAliveCountMax=4", "LogLevel=ERROR",
    ]
    options += [f"ProxyCommand={proxy}"] if proxy else []
    # A config of the user's may forward things or run others; what is needed stands here.
    return ("ssh", "-F", "/dev/null", "-T", "-p", str(port), *(word for one in options for word in ("-o", one)),
            f"{user}@{address}")


def make_key(shell: Shell, path: Path, comment: str) -> str:
    """A key pair of the run's own, made once; its public half, as authorized_keys has it."""
    if shell.is_dry:
        shell.change(["ssh-keygen", "-t", "ed25519", "-N", "", "-q", "-C", comment, "-f", str(path)])
        return f"ssh-ed25519 KEY {comment}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        done = shell.change(["ssh-keygen", "-t", "ed25519", "-N", "", "-q", "-C", comment, "-f", str(path)])
        if not done.is_ok:
            raise Fault(f"ssh-keygen made no key: {to_one_line(done.err)[:300]}")
    return path.with_name(f"{path.name}.pub").read_text().strip()


def write_known_hosts(known_hosts: Path, keys: Mapping[str, str]) -> None:
    """Writes what ssh is to know: the public key of each machine, by its alias. Earlier keys of the same go."""
    kept = known_hosts.read_text().splitlines() if known_hosts.exists() else []
    kept = [line for line in kept if line.partition(" ")[0] not in keys]
    kept += [f"{alias} {' '.join(key.split()[:2])}" for alias, key in keys.items()]
    known_hosts.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    known_hosts.write_text("\n".join(kept) + "\n")


class Ssh:
    """Speaks to keepers."""

    def __init__(self, shell: Shell, *, tell: Notify) -> None:
        self._shell = shell
        self._tell = tell

    def wait_for(self, hosts: Sequence[Host], limit_s: float) -> None:
        """Until every one answers: a machine that was just made takes minutes."""
        waiting, until_s, said = list(hosts), time.monotonic() + limit_s, ""
        while waiting:
            answers = self._all(waiting, lambda host: self._shell.ask(host.command("exec true"), timeout_s=CALL_S))
            for _host, done in answers:
                if "Host key verification failed" in done.err:
                    raise _trouble(_host, done)
            waiting = [host for host, done in answers if not done.is_ok]
            if not waiting:
                return
            if time.monotonic() > until_s:
                last = next(done for host, done in answers if host is waiting[0])
                raise Unreachable(f"{', '.join(host.name for host in waiting)} did not answer within {format_duration(limit_s)}: "
                           f"{to_one_line(last.err)[:300]}", fix="embark status looks again, and goes on from there")
            now = f"{pluralize(len(waiting), 'machine')} of {len(hosts)} not there yet"
            if now != said:
                self._tell(now)
                said = now
            time.sleep(POLL_S * 3)

    def hand_over(self, hosts: Sequence[Host], files: Callable[[Host], Mapping[str, str]], *, is_fresh: bool) -> None:
        """Copies what each is to have, and starts its keeper where none is and the run has not ended there."""
        def one(host: Host) -> None:
            folder, start = shlex.quote(host.folder), host.keeper_line("start", *(["--fresh"] if is_fresh else []))
            line = f"mkdir -p {folder} && base64 -d | tar -xzf - -C {folder} && {start}"
            done = self._shell.change(host.command(line), stdin=pack_files(files(host)),
                                      stdin_name="the spec, its start script and the keeper", timeout_s=CALL_S)
            if not self._shell.is_dry and _seen(host, done).is_lost:
                raise Fault(f"{host.name}: the keeper did not start: {to_one_line(done.err)[:300]}",
                            fix=f"see {host.folder}/keeper.log there")

        self._all(hosts, one)

    def look(self, hosts: Sequence[Host]) -> dict[int, SupervisorState | None]:
        """By the machine's number; None of one that does not answer."""
        return {host.index: seen for host, seen in self._all(hosts, self._look)}

    def stop(self, hosts: Sequence[Host], grace_s: float) -> list[Host]:
        """SIGTERM to all at once, on which the trainer saves; returns those that had to be killed, or were not reached.

        Asked again and again, not waited for in one connection: that may be cut.
        """
        self._all(hosts, lambda host: self._shell.change(host.keeper("stop"), timeout_s=CALL_S))
        if self._shell.is_dry:
            return []
        ending, until_s = list(hosts), time.monotonic() + grace_s
        while ending and time.monotonic() < until_s:
            seen = self.look(ending)
            ending = [host for host in ending if (one := seen[host.index]) is None or one.is_alive]
            if ending:
                time.sleep(POLL_S)
        self._all(ending, lambda host: self._shell.change(host.keeper("kill"), timeout_s=CALL_S))
        return ending

    def again(self, hosts: Sequence[Host]) -> None:
        """Ends the attempt that runs, with its checkpoint, so that the next one finds the others where they are now."""
        self._all(hosts, lambda host: self._shell.change(host.keeper("again"), timeout_s=CALL_S))

    def read_log(self, host: Host, born: str, following_line: int, *, follow: bool) -> LineStream:
        """`born BORN`, then each line behind its number."""
        words = host.keeper("logs", born or "-", str(following_line), *(["--follow"] if follow else []))
        return self._shell.lines(words)

    def _look(self, host: Host) -> SupervisorState | None:
        done = self._shell.ask(host.keeper("status"), timeout_s=CALL_S)
        try:
            return _seen(host, done)
        except Unreachable:
            return None

    def _all(self, hosts: Sequence[Host], one: Callable[[Host], _T]) -> list[tuple[Host, _T]]:
        """The same on all of them, at once; in a dry run in order, so that it reads well."""
        if self._shell.is_dry or len(hosts) < 2:
            return [(host, one(host)) for host in hosts]
        with ThreadPoolExecutor(min(MAX_AT_ONCE, len(hosts))) as pool:
            return list(zip(hosts, pool.map(one, hosts), strict=True))


def job_json(words: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str = "",
               wait_s: float = WAIT_S, after: Sequence[str] = (), after_s: float = 0.0) -> str:
    """What a keeper is to run, and when to start it again: from the same table as every controller's rules.

    `after` is run so long after the end, unless someone ended it.
    """
    return json.dumps({
        "words": list(words), "env": dict(env or {}), "cwd": cwd, "wait_s": wait_s,
        "final_codes": [int(row.code) for row in EXITS if not row.must_retry],
        "preempted_code": int(ExitCode.PREEMPTED), "max_faults": MAX_FAULTS, "good_s": GOOD_S,
        "after": list(after), "after_s": after_s,
    })


def supervisor_text() -> str:
    """The program that travels."""
    return Path(__file__).with_name("supervisor.py").read_text(encoding="utf-8")


def pack_files(files: Mapping[str, str]) -> str:
    """A tar of them, as text. None is secret: a container's user reads the spec."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for name, text in files.items():
            data = text.encode()
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755 if text.startswith("#!") else 0o644
            tar.addfile(info, io.BytesIO(data))
    return base64.b64encode(gzip.compress(held.getvalue(), mtime=0)).decode()


def status_of(seen: Mapping[int, SupervisorState | None], names: Mapping[int, str], run_uri: str) -> Status:
    """How the run stands, of what each of its machines says."""
    parts = tuple(_part(names[index], index, seen[index]) for index in sorted(seen))
    there = [one for one in seen.values() if one is not None]
    since_s = min((one.started_s for one in there if one.started_s), default=None)
    num_restarts = max((one.num_restarts for one in there), default=0)
    done = [one for one in there if one.code == 0]
    if done:  # the last save is made by all together, so where one has ended well, all have trained to the end
        took = max(one.ended_s for one in done) - (since_s or 0.0)
        return Status("succeeded", f"took {format_duration(took)}" if since_s else "", "", parts, since_s, num_restarts)
    failed = [(index, one) for index, one in sorted(seen.items())
              if one is not None and one.code not in (None, 0) and not one.was_stopped]
    if failed:
        index, one = failed[0]
        why = explain_exit(one.code or 0, "")
        return Status("failed", f"{names[index]}: {why.text}", why.fix, parts, since_s, num_restarts)
    if any(one.was_stopped for one in there):
        return Status("gone", "it was told to end, and has", f"its checkpoints are in {run_uri}", parts, since_s,
                      num_restarts)
    away = [names[index] for index, one in sorted(seen.items()) if one is None]
    if away:
        return Status("restarting", f"{', '.join(away)} does not answer", "", parts, since_s, num_restarts)
    troubled = [part for part in parts if part.state in ("lost", "restarting")]
    if troubled:
        return Status("restarting", f"{troubled[0].name}: {troubled[0].why}", "", parts, since_s, num_restarts)
    return Status("running", "", "", parts, since_s, num_restarts)


def _part(name: str, index: int, seen: SupervisorState | None) -> Replica:
    if seen is None:
        return Replica(name, index, "away", "does not answer")
    if seen.code is not None:
        return Replica(name, index, "ended", "well" if seen.code == 0 else explain_exit(seen.code, "").text)
    if seen.is_lost:
        return Replica(name, index, "lost", "its ranks are gone: the machine was started again, or they were killed")
    if seen.phase == "waiting":
        return Replica(name, index, "restarting", explain_exit(seen.last_code, "").text)
    return Replica(name, index, "running", f"started {pluralize(seen.num_restarts, 'time')} again" if seen.num_restarts else "")


def _seen(host: Host, done: CommandResult) -> SupervisorState:
    if not done.is_ok:
        if "can't open file" in done.err:  # a machine that was replaced, and has not been handed the run yet
            return SupervisorState()
        raise _trouble(host, done)
    try:
        told: dict[str, Any] = json.loads(done.out.strip().splitlines()[-1])
        started, state, ended = told["started"] or {}, told["state"], told["ended"] or {}
        return SupervisorState(
            is_alive=bool(told["is_alive"]), started_s=started.get("time_s"), phase=str(state.get("phase", "")),
            num_restarts=int(state.get("num_restarts", 0)), last_code=int(state.get("last_code", 0)),
            code=ended.get("code"), was_stopped=bool(ended.get("was_stopped", False)),
            ended_s=float(ended.get("time_s", 0.0)))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise Fault(f"{host.name} answered what is no status: {to_one_line(done.out)[:200]}") from error


def _trouble(host: Host, done: CommandResult) -> EmbarkError:
    told = to_one_line(done.err)[:300]
    if "Host key verification failed" in done.err:
        return UserError(f"{host.name} shows another host key than the one that was asked of its cloud: {told}",
                         fix="if the machine was replaced by hand, embark cancel and launch again; if not, someone "
                             "stands between")
    if done.code == AWAY or done.has_timed_out:
        return Unreachable(f"{host.name} does not answer: {told}", fix="embark status looks again")
    return Fault(f"{host.name}: {told or f'ended with {done.code}'}", fix="log in there and see")


def names_of(hosts: Iterable[Host]) -> dict[int, str]:
    return {host.index: host.name for host in hosts}


def _quoted(path: Path) -> str:
    """For ssh's own options, which know spaces and percent signs."""
    return '"' + str(path).replace("%", "%%") + '"'
