"""Jobs run by `supervisor.py`, here or on machines reached by ssh: what it is given and what it reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embark.errors import ExitCode
from embark.formatting import format_duration, pluralize
from embark.launch import supervisor
from embark.launch.backend import Replica, State, Status
from embark.launch.explanations import explain_exit
from embark.render.job import EXITS

PROGRAM = Path(supervisor.__file__)
WAIT_S = 15.0
MAX_FAULTS = 10
GOOD_S = 600.0
"""An attempt that lasted so long resets the count of faults."""


def job_json(command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str = "", wait_s: float = WAIT_S,
             restarts: bool = True, after: Sequence[str] = (), after_s: float = 0.0) -> str:
    """The supervisor's job. Which exit codes are retried comes from the table of all controllers' failure policies.

    `after` is run so long after the end, unless the job was stopped.
    """
    return json.dumps({
        "command": list(command), "env": dict(env or {}), "cwd": cwd, "wait_s": wait_s, "restarts": restarts,
        "final_codes": [int(row.code) for row in EXITS if not row.must_retry],
        "preempted_code": int(ExitCode.PREEMPTED), "max_faults": MAX_FAULTS, "good_s": GOOD_S,
        "after": list(after), "after_s": after_s,
    })


@dataclass(frozen=True, slots=True)
class SupervisorState:
    """What a machine's supervisor reports of its ranks."""

    is_alive: bool = False
    pid: int = 0
    started_s: float | None = None
    phase: str = ""
    """`running`, or `waiting` between two attempts."""
    num_restarts: int = 0
    last_code: int = 0
    code: int | None = None
    """How it ended for good; None while it has not."""
    was_stopped: bool = False
    ended_s: float = 0.0

    @classmethod
    def parse(cls, out: str) -> SupervisorState:
        """Of its `status` line. Raises ValueError."""
        try:
            found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
            started, state, ended = found["started"] or {}, found["state"], found["ended"] or {}
            return cls(
                is_alive=bool(found["is_alive"]), pid=int(started.get("pid", 0)), started_s=started.get("time_s"),
                phase=str(state.get("phase", "")), num_restarts=int(state.get("num_restarts", 0)),
                last_code=int(state.get("last_code", 0)), code=ended.get("code"),
                was_stopped=bool(ended.get("was_stopped", False)), ended_s=float(ended.get("time_s", 0.0)))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(str(error)) from error

    @property
    def is_lost(self) -> bool:
        """It is not there, and did not end: the machine was rebooted or replaced, or the supervisor killed."""
        return not self.is_alive and self.code is None


def status_of(states: Mapping[int, SupervisorState | None], names: Mapping[int, str], run_uri: str) -> Status:
    """The run's status from what each of its machines reports; None: it does not answer."""
    replicas = tuple(_replica(names[index], index, states[index]) for index in sorted(states))
    known = [one for one in states.values() if one is not None]
    since_s = min((one.started_s for one in known if one.started_s), default=None)
    num_restarts = max((one.num_restarts for one in known), default=0)

    def status(state: State, reason: str = "", fix: str = "") -> Status:
        return Status(state=state, reason=reason, fix=fix, replicas=replicas, since_s=since_s,
                      num_restarts=num_restarts)

    done = [one.ended_s for one in known if one.code == 0]
    lasted = format_duration(max((one.ended_s for one in known), default=0.0) - since_s) if since_s else "a while"
    if done:  # all ranks make the last save together, so where one has ended well, all have trained to the end
        return status("succeeded", f"took {lasted}")
    for index, one in sorted(states.items()):
        if one is not None and one.code not in (None, 0) and not one.was_stopped:
            why = explain_exit(one.code or 0)
            return status("failed", f"{names[index]}: {why.text}, after {lasted}", why.fix)
    if any(one.was_stopped for one in known):
        return status("gone", f"cancelled after {lasted}", f"its checkpoints are in {run_uri}")
    silent = [names[index] for index, one in sorted(states.items()) if one is None]
    if silent:
        return status("restarting", f"{', '.join(silent)} does not answer")
    troubled = [replica for replica in replicas if replica.state in ("lost", "restarting")]
    if troubled:
        return status("restarting", f"{troubled[0].name}: {troubled[0].why}")
    return status("running")


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
