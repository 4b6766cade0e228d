"""How a run stands, in a word and in a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embark.formatting import format_count, format_duration, to_finite, to_one_line
from embark.report.liveness import LEAST_SILENCE_FAR_S, LEAST_SILENCE_S, MANY_GAPS
from embark.report.record import Record

State = Literal["empty", "running", "done", "stopped", "failed", "killed"]
WORDS: dict[State, str] = {
    "empty": "not begun", "running": "running", "done": "finished", "stopped": "stopped", "failed": "failed",
    "killed": "killed",
}
STARTING_S = 900.0
"""Before its first step it loads and compiles, and says nothing."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run is."""

    state: State
    silent_s: float
    """Since its last event."""

    @property
    def word(self) -> str:
        return WORDS[self.state]


def standing(record: Record, now_s: float, *, is_remote: bool = False) -> Standing:
    """Events do not say that a process was killed: a long silence does. Of a run far away they come when it saves."""
    if not record.has_begun or record.last_s is None:
        return Standing("failed" if record.error else "empty", 0.0)
    silent_s = max(0.0, now_s - record.last_s)
    attempt = record.attempts[-1]
    if attempt.outcome:
        return Standing("done" if attempt.outcome == "done" else "failed" if attempt.outcome == "failed" else "stopped",
                        silent_s)
    if record.error:
        return Standing("failed", silent_s)
    has_stepped = attempt.last_step > attempt.first_step
    patience_s = max(LEAST_SILENCE_S, MANY_GAPS * record.usual_gap_s, 1.5 * record.longest_gap_s)
    if is_remote:
        patience_s = max(patience_s, LEAST_SILENCE_FAR_S)
    if not has_stepped:
        patience_s = max(patience_s, STARTING_S)
    return Standing("killed" if silent_s > patience_s else "running", silent_s)


def sentence(record: Record, now: Standing) -> str:
    """How it went, or how it goes: the same words as at the end of the run itself."""
    if now.state == "empty":
        return "Nothing has happened yet: the run has told of no start."
    if now.state in ("done", "stopped"):
        from embark.events import summary as closing

        return closing.sentence(record.history)
    of = f" of {format_count(record.num_steps)}" if record.num_steps else ""
    at = f"step {format_count(record.steps_done)}{of}"
    if now.state == "running":
        left_s = to_finite(record.history.seconds_left)
        return f"Running: {at}" + (f", about {format_duration(left_s)} to go." if left_s else ".")
    if now.state == "failed":
        why = to_one_line(record.error.splitlines()[0] if record.error else "").rstrip(".")
        return f"Failed at {at}{f': {why}' if why else ''}.{_saved(record)}"
    return f"Died without a word at {at}; silent for {format_duration(now.silent_s)}.{_saved(record)}"


def _saved(record: Record) -> str:
    if not record.saves:
        return " Nothing was saved."
    return f" Saved at step {format_count(record.saves[-1].step)}: start it again and it goes on from there."
