"""The status of a run: a state and one sentence."""

from dataclasses import dataclass
from typing import Literal

from embark.events.summary import outcome_sentence, resume_hint
from embark.formatting import format_count, format_duration, to_one_line
from embark.report.record import Record

State = Literal["waiting", "running", "finished", "stopped", "failed", "killed", "deleted"]
LABELS: dict[State, str] = {"waiting": "not started", "deleted": "files deleted"}
MANY_GAPS = 10
"""After so many of its usual intervals without an event, a run counts as killed."""
LEAST_SILENCE_S = 30.0
LEAST_SILENCE_BEFORE_STEPS_S = 900.0
"""Before the first step kernels are compiled, data is read and other machines are waited for."""
LEAST_SILENCE_REMOTE_S = 1800.0
"""The events of a remote run arrive when it saves."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where a run is."""

    state: State
    sentence: str
    last_s: float | None
    """Unix time of the last sign of life."""
    silent_s: float
    """Since then."""

    @property
    def label(self) -> str:
        return LABELS.get(self.state, self.state)


def status_of(
    record: Record, now_s: float, *, is_remote: bool = False, is_deleted: bool = False, heard_s: float | None = None
) -> RunStatus:
    """`heard_s`: when the file was last seen to grow, by our own clock. Events do not say that a process was killed:
    a long silence does."""
    last_s = max((time_s for time_s in (record.last_s, heard_s) if time_s is not None), default=None)
    silent_s = 0.0 if last_s is None else max(0.0, now_s - last_s)
    state: State = "running"
    if is_deleted:
        state = "deleted"
    elif not record.num_events:
        state = "waiting"
    elif record.end:
        outcome = record.end.get("outcome")
        state = "finished" if outcome == "done" else "failed" if outcome == "failed" else "stopped"
    elif record.error:
        state = "failed"
    elif silent_s > max_silence_s(record, is_remote=is_remote):
        state = "killed"
    return RunStatus(state, _sentence(record, state, silent_s, is_remote=is_remote), last_s, silent_s)


def max_silence_s(record: Record, *, is_remote: bool) -> float:
    """A save or an evaluation may take as long as one did before, and half as long again."""
    if is_remote:
        return max(LEAST_SILENCE_REMOTE_S, MANY_GAPS * record.usual_save_gap_s)
    least_s = LEAST_SILENCE_S if record.step else LEAST_SILENCE_BEFORE_STEPS_S
    return max(least_s, MANY_GAPS * record.usual_gap_s, 1.5 * record.longest_gap_s)


def _sentence(record: Record, state: State, silent_s: float, *, is_remote: bool) -> str:
    if state == "deleted":
        return "Its files were deleted; this is what was read before."
    if state == "waiting":
        return "No events yet: the first comes when training starts."
    if state in ("finished", "stopped"):
        return outcome_sentence(record)
    at = f"step {format_count(record.steps_done)}"
    if record.num_steps:
        at += f" of {format_count(record.num_steps)}"
    if state == "running":
        left_s = record.seconds_left
        return f"Running: {at}" + (f", about {format_duration(left_s)} left." if left_s else ".")
    hint = resume_hint(record.save.get("step"))
    if state == "failed":
        why = to_one_line(record.error_text.partition("\n")[0].partition(" fix: ")[0]).rstrip(".")
        return f"Failed at {at}{f': {why}' if why else ''}. {hint}"
    gap_s = record.usual_save_gap_s if is_remote else record.usual_gap_s
    usual = f" (usually an event every {format_duration(gap_s)})" if gap_s else ""
    return f"No sign of life for {format_duration(silent_s)}{usual}, at {at}. {hint}"
