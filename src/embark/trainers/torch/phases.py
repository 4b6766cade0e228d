"""Splits a step's time into phases: a few steps under torch's profiler, by the names of what ran."""

import os
import re
import time
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PHASES = ("input", "copy", "lookup", "all_to_all", "dense", "optimizer", "other")
NUM_STEPS = 3
_NOTHING = nullcontext()
STEP_NAME = "embark::step"
INPUT_NAME = "embark::input"

RULES = {
    where: [(phase, re.compile(pattern)) for phase, pattern in patterns.items()]
    for where, patterns in tomllib.loads(Path(__file__).with_name("phases.toml").read_text(encoding="utf-8")).items()
}
BEHIND = ("all_to_all", "copy", "input")
"""On a device these count only where nothing else runs: what is hidden behind work costs nothing."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation or kernel that ran."""

    name: str
    start_ns: int
    end_ns: int


class Profiler:
    """Profiles a few steps on request. A failure in here ends the profiling, never the run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile: Any = None
        self._left = 0
        self._began_s = self._input_s = 0.0
        self._result: dict[str, float] | None = None
        self.problem = ""  # Why there will be no more profiles.

    @property
    def is_active(self) -> bool:
        return self._left > 0

    @property
    def is_at_last_step(self) -> bool:
        """Whether the step just done is the last of this profile."""
        return self._left == 1

    def wait_for_device(self) -> None:
        """Wait before a profile and at its end, so that it covers complete steps. The wait counts as training."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def begin(self, input_s: float) -> None:
        """Profile the next steps; `input_s` is the time waited for batches so far."""
        if self._left or self.problem:
            return
        # The profiler's own library writes to the terminal when it starts and stops; it reads this as it first does.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        try:
            is_gpu = self._device.type == "cuda"
            # Not torch.profiler.profile, which imports torch's compiler when it starts, in the middle of the run.
            profile = torch.autograd.profiler.profile(
                use_cpu=not is_gpu, use_device="cuda" if is_gpu else None, use_kineto=True)
            profile.__enter__()
        except Exception as error:
            self._give_up(error)
            return
        self._profile, self._left = profile, NUM_STEPS
        self._input_s, self._began_s = input_s, time.perf_counter()

    def step(self) -> AbstractContextManager[Any]:
        """Profile the enclosed step."""
        return torch.autograd.profiler.record_function(STEP_NAME) if self._left else _NOTHING

    def stepped(self, input_s: float) -> None:
        """Finish a profile after its last step, outside the timed part."""
        if not self._left:
            return
        self._left -= 1
        if self._left:
            return
        profile, self._profile = self._profile, None
        try:
            wall_s = time.perf_counter() - self._began_s
            profile.__exit__(None, None, None)
            waited_s = max(0.0, input_s - self._input_s)
            by_phase = self._read(profile.kineto_results.events(), wall_s, waited_s)
            self._result = {phase: round(seconds / NUM_STEPS, 9) for phase, seconds in by_phase.items()}
        except Exception as error:
            self._give_up(error)

    def take(self) -> dict[str, float] | None:
        """Return the seconds of each phase in a step, once a profile is done."""
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        """Drop a profile during which the run ended."""
        profile, self._profile, self._left = self._profile, None, 0
        if profile is not None:
            try:
                profile.__exit__(None, None, None)
            except Exception as error:
                self._give_up(error)

    def _read(self, events: Sequence[Any], wall_s: float, input_s: float) -> dict[str, float]:
        if self._device.type == "cuda":
            kernels = [e for e in events
                       if e.device_type() == torch.autograd.DeviceType.CUDA and not e.is_user_annotation()]
            if not kernels:
                raise RuntimeError("the profiler saw no kernel")
            return device_phases(map(_ran, kernels), wall_s, input_s)
        thread = next(e.start_thread_id() for e in events if e.name() == STEP_NAME)
        return host_phases(_ran(e) for e in events if e.start_thread_id() == thread)

    def _give_up(self, error: Exception) -> None:
        self._left = 0
        self.problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]


def host_phases(ran: Iterable[Operation]) -> dict[str, float]:
    """Return seconds by phase of operations of one thread, which lie within one another, inside of steps."""
    seconds = dict.fromkeys(PHASES, 0.0)
    enclosing: list[tuple[int, str]] = []  # end and phase of each open operation; the first is the step
    at_ns = 0

    def advance_to(now_ns: int) -> None:
        nonlocal at_ns
        while enclosing and enclosing[-1][0] <= now_ns:
            end_ns, phase = enclosing.pop()
            seconds[phase or "other"] += max(0, end_ns - at_ns) / 1e9
            at_ns = max(at_ns, end_ns)
        if enclosing:
            seconds[enclosing[-1][1] or "other"] += max(0, now_ns - at_ns) / 1e9
        at_ns = max(at_ns, now_ns)

    for one in sorted(ran, key=lambda one: (one.start_ns, -one.end_ns)):
        advance_to(one.start_ns)
        if enclosing:
            inherited = enclosing[-1][1]
            phase = _phase(one.name, RULES["host"]) or inherited or _phase(one.name, RULES["lone"])
            enclosing.append((min(one.end_ns, enclosing[-1][0]), phase))
        elif one.name == STEP_NAME:
            enclosing.append((one.end_ns, ""))
    advance_to(enclosing[0][0] if enclosing else at_ns)
    return seconds


def device_phases(ran: Iterable[Operation], wall_s: float, input_s: float) -> dict[str, float]:
    """Return seconds by phase of kernels of all streams: where several run at once, one that computes counts."""
    seconds = dict.fromkeys(PHASES, 0.0)
    edges: list[tuple[int, int, str]] = []
    for one in ran:
        phase = _phase(one.name, RULES["device"]) or "other"
        edges += [(one.start_ns, 1, phase), (one.end_ns, -1, phase)]
    running = dict.fromkeys(PHASES, 0)
    order = [*(p for p in PHASES if p not in BEHIND), *BEHIND]
    before_ns = 0
    for at_ns, change, phase in sorted(edges):
        shown = next((p for p in order if running[p]), None)
        if shown:
            seconds[shown] += (at_ns - before_ns) / 1e9
        running[phase] += change
        before_ns = at_ns
    idle_s = max(0.0, wall_s - sum(seconds.values()))
    seconds["input"] += min(input_s, idle_s)
    seconds["other"] += max(0.0, idle_s - input_s)
    return seconds


def _phase(name: str, rules: Sequence[tuple[str, re.Pattern[str]]]) -> str:
    return next((phase for phase, pattern in rules if pattern.search(name)), "")


def _ran(event: Any) -> Operation:
    start_ns = event.start_ns()
    return Operation(event.name(), start_ns, start_ns + event.duration_ns())


LOOKED_AT_S = 50e-6  # A shorter wait of the host is none.
MAX_PENDING = 1024


class InputWaits:
    """Counts the seconds in which there was no batch.

    On a CPU that is the time `next` took, under a name that a profile shows. A GPU works while the host waits, most
    often for the GPU itself to give a buffer back; there only the gap counts that the wait left in the GPU's own
    stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._total_s = 0.0
        self._batches: Iterator[Any] = iter(())
        self._gaps = _DeviceGaps(device) if device.type == "cuda" else None

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Time an iterator. This object is the iterator, one for the whole run: TorchRec's pipeline tells data by its
        iterator."""
        self._batches = batches
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def total_s(self) -> float:
        """Return the seconds so far; on a GPU, those of the steps that are done."""
        if self._gaps is not None:
            self._total_s += self._gaps.take_done_s()
        return self._total_s

    def __next__(self) -> Any:
        if self._gaps is not None:
            self._gaps.begin()
        began = time.perf_counter()
        batch = _named(self._batches) if torch.autograd._profiler_enabled() else next(self._batches)
        waited_s = time.perf_counter() - began
        if self._gaps is None:
            self._total_s += waited_s
        elif waited_s > LOOKED_AT_S:
            self._gaps.end()
        return batch


def _named(batches: Iterator[Any]) -> Any:
    """Run under a name that a profile shows; outside of a profile that would cost more than all the rest here."""
    with torch.autograd.profiler.record_function(INPUT_NAME):
        return next(batches)


class _DeviceGaps:
    """Pairs of events in the stream that trains, which are as far apart as the stream ran dry in between."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._free: list[Any] = []
        self._begun: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()

    def begin(self) -> None:
        if self._begun is None:
            self._begun = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        self._begun.record(self._stream)

    def end(self) -> None:
        ended = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        ended.record(self._stream)
        if len(self._pending) >= MAX_PENDING:
            self._free += self._pending.popleft()
        self._pending.append((self._begun, ended))
        self._begun = None

    def take_done_s(self) -> float:
        """Return the gaps that are known, without waiting for the device."""
        total_s = 0.0
        while self._pending and self._pending[0][1].query():
            begun, ended = self._pending.popleft()
            total_s += begun.elapsed_time(ended) / 1000
            self._free += (begun, ended)
        return total_s
