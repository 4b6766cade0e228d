"""Whether a run lives: what it said last, and how long ago."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embark.formatting import format_count, format_duration, to_one_line
from embark.report.timeline import Story

State = Literal["waiting", "running", "finished", "stopped", "failed", "killed", "deleted"]
MANY_GAPS = 10
"""So many of its usual intervals without a word, and a run is taken for killed."""
LEAST_SILENCE_S = 30.0
LEAST_SILENCE_BEFORE_STEPS_S = 900.0
"""Kernels are compiled, data is read and other machines are waited for before the first step."""
LEAST_SILENCE_FAR_S = 1800.0
"""A run far away is heard of when it saves."""


@dataclass(frozen=True, slots=True)
class Life:
    """A run's state, and one sentence about it."""

    state: State
    words: str
    last_s: float | None
    """Unix time of the last sign of life."""


def life_of(story: Story, now_s: float, *, is_gone: bool, is_remote: bool, heard_s: float | None = None) -> Life:
    """`heard_s`: when its file was last seen to grow, by our own clock."""
    last_s = max((time_s for time_s in (story.last_s, heard_s) if time_s is not None), default=None)
    if is_gone:
        return Life("deleted", "Its files are gone; what is shown was read before.", last_s)
    if not story.num_events:
        return Life("waiting", "Nothing has been told yet: the first event comes when training starts.", last_s)
    if story.end:
        return _ended(story, last_s)
    if story.error:
        return Life("failed", to_one_line(story.error.get("text", "")).partition(" fix: ")[0], last_s)
    if last_s is None:
        return Life("running", "All its times lie in the future: a clock is wrong.", None)
    silence_s = now_s - last_s
    if silence_s > patience_s(story, is_remote=is_remote):
        usual = story.usual_save_gap_s if is_remote else story.usual_gap_s
        often = f", and it used to speak every {format_duration(usual)}" if usual else ""
        return Life("killed", f"No sign of life for {format_duration(silence_s)}{often}.", last_s)
    return Life("running", "", last_s)


def patience_s(story: Story, *, is_remote: bool) -> float:
    """How long it may be silent: an evaluation or a save may take as long as one did before, and half as long again."""
    if is_remote:
        return max(LEAST_SILENCE_FAR_S, MANY_GAPS * (story.usual_save_gap_s or 0.0))
    least_s = LEAST_SILENCE_S if story.step else LEAST_SILENCE_BEFORE_STEPS_S
    return max(least_s, MANY_GAPS * (story.usual_gap_s or 0.0), 1.5 * story.longest_gap_s)


def _ended(story: Story, last_s: float | None) -> Life:
    outcome = story.end.get("outcome")
    if outcome == "done":
        return Life("finished", f"All {format_count(story.steps_done)} steps are done.", last_s)
    saved = story.save.get("step")
    kept = f" Saved at step {format_count(saved)}: started again, it goes on from there." if saved is not None else ""
    if outcome == "failed":
        return Life("failed", f"Failed at step {format_count(story.steps_done)}.{kept}", last_s)
    why = "its budget is spent" if outcome == "budget" else to_one_line(story.interrupt.get("signal", ""))
    of = f" of {format_count(story.num_steps)}" if story.num_steps else ""
    return Life("stopped", f"Stopped at step {format_count(story.steps_done)}{of}{f' ({why})' if why else ''}.{kept}", last_s)
