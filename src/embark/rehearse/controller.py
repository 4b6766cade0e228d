"""The pods of one rehearsal from start to end: what a controller, a kubelet, a cloud and injected faults do to them."""

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from embark.errors import UserError
from embark.events.events import LineSplitter, parse_event, read_blocks
from embark.kubernetes.failure_policies import Decision, FailurePolicy, PodEnd
from embark.kubernetes.pods import Pod
from embark.launch.backend import split_rank
from embark.launch.shell import CommandResult, LineMultiplexer, LineStream
from embark.store import EVENTS
from embark.values import JsonMap, frozen
from .processes import Processes, Start
from .workload import Workload


@frozen
class Resume:
    """One resumption of the run."""

    step: int  # Step of the checkpoint.
    lost_steps: int  # Trained before, and trained again.


@dataclass(slots=True)
class Progress:
    """The run so far, from its events."""

    world_sizes: list[int] = field(default_factory=list)  # One for each time the ranks met.
    num_steps: int = 0
    step: int = 0
    saved: list[int] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict, repr=False)
    """The loss of each step; of a step that was trained twice, the later one."""
    is_done: bool = False
    errors: list[str] = field(default_factory=list)

    @property
    def final_loss(self) -> float | None:
        return self.losses.get(self.num_steps) if self.num_steps else None

    @property
    def phase(self) -> str:
        """The run's phase, for a person."""
        if not self.world_sizes:
            return "waiting for the ranks to meet"
        if self.is_done:
            return f"trained {self.step} steps"
        saved = f", saved step {self.saved[-1]}" if self.saved else ""
        return f"{self.world_sizes[-1]} ranks have met; step {self.step} of {self.num_steps}{saved}"

    def take(self, kind: str, event: JsonMap) -> None:
        if kind == "start":
            self.world_sizes.append(int(event["world_size"]))
            self.num_steps = int(event["num_steps"])
            if self.step and not event.get("first_step"):  # nothing was saved: all over again
                self.resumes.append(Resume(0, self.step))
                self.step = 0
        elif kind == "resume":
            self.resumes.append(Resume(int(event["step"]), max(0, self.step - int(event["step"]))))
            self.step = int(event["step"])
        elif kind == "step":
            self.step = int(event["step"])
            if isinstance(event.get("loss"), (int, float)):
                self.losses[self.step] = float(event["loss"])
        elif kind == "save":
            self.saved.append(int(event["step"]))
        elif kind == "end":
            self.is_done = event.get("outcome") == "done"
        elif kind == "error":
            self.errors.append(str(event.get("text", "")))


class EventReader:
    """Reads new events of `events.jsonl` as it grows."""

    def __init__(self, folder: Path | None) -> None:
        self.progress = Progress()
        self.has_no_run = folder is None  # There is no run whose events could be read.
        self._folder = folder
        self._offset = 0
        self._splitter = LineSplitter()

    def read(self) -> Progress:
        path = self._folder / EVENTS if self._folder is not None else None
        if path is None or not path.exists():
            return self.progress
        with path.open("rb") as file:
            file.seek(self._offset)
            for block in read_blocks(file):
                self._offset += len(block)
                for event in filter(None, map(parse_event, self._splitter.lines(block))):
                    with suppress(LookupError, TypeError, ValueError, OverflowError):  # a damaged one
                        self.progress.take(event.kind, event.values)
        return self.progress


FaultKind = Literal["preempt", "kill", "lose"]
_FAULT = re.compile(r"(?P<pod>\d+)@(?:step(?P<step>\d+)|(?P<at>\d\S*))")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


@frozen
class Fault:
    """A fault that is injected into one pod."""

    kind: FaultKind
    pod: int
    at_s: float | None  # Seconds since the pods were started; None if a step is given.
    at_step: int | None = None

    def __str__(self) -> str:
        when = f"step{self.at_step}" if self.at_step is not None else f"{self.at_s:g}s"
        return f"--{self.kind} {self.pod}@{when}"

    def is_due(self, elapsed_s: float, step: int) -> bool:
        if self.at_step is not None:
            return step >= self.at_step
        return self.at_s is not None and elapsed_s >= self.at_s


def read_faults(kind: FaultKind, words: Sequence[str], num_pods: int) -> list[Fault]:
    """Parse the values of a fault's flag."""
    found = []
    for word in words:
        match, flag = _FAULT.fullmatch(word), f"--{kind}"
        if match is None:
            raise UserError(f"{flag} {word}: not POD@TIME", f"{flag} 1@30s, or 1@step20")
        if int(match["pod"]) >= num_pods:
            raise UserError(f"{flag} {word}: there is no pod {match['pod']}",
                            f"pods are numbered 0 to {num_pods - 1}")
        at_s = read_duration(match["at"], flag) if match["at"] else None
        found.append(Fault(kind, int(match["pod"]), at_s, int(match["step"]) if match["step"] else None))
    return found


def read_duration(text: str, flag: str) -> float:
    """Return the seconds of `10m`, `90s` or `1h`."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise UserError(f"{flag} {text}: not a duration", f"{flag} 10m")
    return float(match[1]) * _UNITS[match[2]]


RESTART_S = 1.0  # Wait before a pod is restarted. A cluster waits 10 s, doubled each time.
TAKE_S = 0.1
READ_S = 0.1
SAY_S = 3.0  # Between two notes on progress.
MAX_TAIL = 2000
END_S = 5.0  # Time for the last lines of pods that were killed.
Finish = Literal["succeeded", "failed", "too long"]


@frozen
class Observer:
    """Receives output and notes as they come."""

    line: Callable[[str, str, str], None]  # Pod, which of its processes or nothing, text.
    note: Callable[[str], None]  # Receives sentences about the controller's actions and the pods.
    check: Callable[[], None] = lambda: None  # Raises an error if the rehearsal is to end; called every moment.


@frozen
class Outcome:
    """Everything that happened in a rehearsal."""

    finish: Finish
    reason: str  # The controller's last message.
    progress: Progress
    ends: tuple[PodEnd, ...]
    running: tuple[str, ...]  # Pods that had not ended when the time was over.
    tails: dict[str, tuple[str, ...]]  # The last lines of each pod.
    faults_done: tuple[Fault, ...]
    faults_left: tuple[Fault, ...]
    elapsed_s: float


@dataclass(slots=True)
class _Slot:
    """A pod of the job and its current container."""

    pod: Pod
    generation: int = 0
    start: Start | None = None
    lines: LineStream | None = None
    is_preempted: bool = False
    is_deleted: bool = False  # The controller deleted it to restart all: its end does not count.
    kill_at_s: float | None = None
    is_lost: bool = False  # Its machine is lost, and there is no other.
    start_at_s: float | None = 0.0
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_TAIL))

    @property
    def runs(self) -> bool:
        return self.start is not None


class Controller:
    """Runs a workload's pods until they end, or the time limit passes."""

    def __init__(
        self, workload: Workload, policy: FailurePolicy, processes: Processes, reader: EventReader, observer: Observer,
        *, faults: Sequence[Fault] = (), limit_s: float
    ) -> None:
        self._slots = {pod.name: _Slot(pod) for pod in workload.pods}
        self._by_index = {pod.index: pod.name for pod in workload.pods}
        self._policy = policy
        self._processes = processes
        self._reader = reader
        self._observer = observer
        self._faults = list(faults)
        self._done_faults: list[Fault] = []
        self._limit_s = limit_s
        self._deadline_s = workload.deadline_s
        self._arriving = LineMultiplexer()
        self._starts: dict[str, _Slot] = {}
        self._num_starts = 0
        self._ends: list[PodEnd] = []
        self._final: tuple[Finish, str] | None = None
        self._began_s = time.monotonic()
        self._read_s = 0.0
        self._said = ("", 0.0)

    def run(self) -> Outcome:
        self._began_s = time.monotonic()
        try:
            while self._final is None:
                self._observer.check()
                self._start_due()
                self._take(TAKE_S)
                self._sweep()
                for key, done in self._arriving.ended():
                    self._ended(self._starts[key], done)
                self._watch()
                self._faults_due()
                self._kill_due()
                if self._final is None:
                    self._check_time()
            progress = self._reader.read()
            running = tuple(name for name, slot in self._slots.items() if slot.runs)
        finally:
            self._end_all()
        finish, reason = self._final
        return Outcome(finish, reason, progress, tuple(self._ends), running,
                       {name: tuple(slot.tail) for name, slot in self._slots.items()}, tuple(self._done_faults),
                       tuple(self._faults), self._now)

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began_s

    def _check_time(self) -> None:
        if self._deadline_s is not None and self._now > self._deadline_s:
            self._final = ("failed", f"DeadlineExceeded: activeDeadlineSeconds is {self._deadline_s:g}")
        elif self._now > self._limit_s:
            self._final = ("too long", f"still running after {self._limit_s:g} s")

    def _end_all(self) -> None:
        """Kill what still runs, since a rehearsal saves nothing, and read its last lines."""
        for slot in self._slots.values():
            if slot.start is not None:
                self._processes.kill(slot.start)
        until_s = self._now + END_S
        while self._arriving.is_busy and self._now < until_s:
            self._take(TAKE_S)
            self._arriving.ended()
        self._arriving.close()

    def _start_due(self) -> None:
        for slot in self._slots.values():
            if slot.runs or slot.start_at_s is None or self._now < slot.start_at_s:
                continue
            slot.start = Start(slot.pod, self._num_starts, slot.generation)
            self._num_starts += 1
            slot.start_at_s, slot.is_preempted, slot.is_deleted = None, False, False
            slot.lines = self._processes.start(slot.start)
            self._starts[slot.start.key] = slot
            self._arriving.add(slot.start.key, slot.lines)

    def _take(self, wait_s: float) -> None:
        for key, text in self._arriving.take(wait_s):
            slot = self._starts[key]
            rank, said = split_rank(text)
            slot.tail.append(said)
            self._observer.line(slot.pod.name, rank, said)

    def _sweep(self) -> None:
        """End pods whose first process has ended, and kill their other processes."""
        for slot in self._slots.values():
            if slot.start is not None and slot.lines is not None and slot.lines.code is not None:
                self._processes.kill(slot.start)

    def _ended(self, slot: _Slot, done: CommandResult) -> None:
        if self._final is not None:  # which pods end in the moment after the decision is chance
            return
        code = done.code if done.code >= 0 else 128 - done.code
        slot.start = slot.lines = slot.kill_at_s = None
        end = PodEnd(slot.pod, code, slot.is_preempted, slot.is_deleted, self._now)
        self._ends.append(end)
        if slot.is_deleted:
            if not any(one.runs for one in self._slots.values()):
                self._restart_all()
            return
        self._apply(slot, self._policy.decide(end))

    def _apply(self, slot: _Slot, decision: Decision) -> None:
        if decision.action == "succeed":
            self._final = ("succeeded", decision.text)
            return
        if decision.action in ("done", "fail"):
            self._observer.note(decision.text)
            if decision.action == "fail":
                self._final = ("failed", decision.text)
            return
        self._observer.note(f"{decision.text}; restarting")
        if decision.action == "replace":
            stays = slot.pod.restart_policy in ("OnFailure", "Always") and not slot.is_preempted
            slot.generation += 0 if stays else 1
            slot.start_at_s = None if slot.is_lost else self._now + RESTART_S
            return
        others = [one for one in self._slots.values() if one.runs]
        for one in others:
            one.is_deleted = True
            self._terminate(one)
        if not others:
            self._restart_all()

    def _restart_all(self) -> None:
        for slot in self._slots.values():
            slot.generation += 1
            slot.start_at_s = None if slot.is_lost else self._now + RESTART_S

    def _terminate(self, slot: _Slot) -> None:
        assert slot.start is not None
        self._processes.term(slot.start)
        slot.kill_at_s = self._now + slot.pod.grace_s

    def _kill_due(self) -> None:
        for slot in self._slots.values():
            if slot.start is not None and slot.kill_at_s is not None and self._now >= slot.kill_at_s:
                slot.kill_at_s = None
                self._observer.note(f"{slot.pod.name} is killed: its grace period of {slot.pod.grace_s:g} s is over")
                self._processes.kill(slot.start)

    def _watch(self) -> None:
        if self._reader.has_no_run or self._now - self._read_s < READ_S:
            return
        self._read_s = self._now
        phase = self._reader.read().phase
        said, at_s = self._said
        is_news = phase.partition(";")[0] != said.partition(";")[0]
        if phase != said and (is_news or self._now - at_s >= SAY_S):
            self._said = (phase, self._now)
            self._observer.note(phase)

    def _faults_due(self) -> None:
        step = self._reader.progress.step
        for fault in list(self._faults):
            slot = self._slots[self._by_index[fault.pod]]
            if slot.start is None or not fault.is_due(self._now, step):
                continue
            self._faults.remove(fault)
            self._done_faults.append(fault)
            self._do(fault, slot, step)

    def _do(self, fault: Fault, slot: _Slot, step: int) -> None:
        assert slot.start is not None
        where = f" at step {step}" if step else ""
        if fault.kind == "preempt":
            self._observer.note(f"{slot.pod.name} is preempted{where}: SIGTERM, and SIGKILL in {slot.pod.grace_s:g} s")
            slot.is_preempted = True
            self._terminate(slot)
        else:
            slot.is_lost = fault.kind == "lose"
            self._observer.note(f"{slot.pod.name} is killed{where}, as when its machine dies"
                                f"{', and there is no other' if slot.is_lost else ''}")
            slot.is_preempted = True
            self._processes.kill(slot.start)
