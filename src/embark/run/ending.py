"""How a run ends: its last save, what is told of it, and the error by which whoever started it knows why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from embark.errors import EmbarkError, Interrupted, OverBudget, Preempted
from embark.events import Event, Sink
from embark.run.budget import what_it_took
from embark.run.clock import Clock
from embark.run.logger import RunLogger
from embark.run.protocols import Ranks
from embark.run.saving import Saving
from embark.run.signals import stopped_by
from embark.run.stop import Decision
from embark.spec import RunSpec
from embark.store import RunDir


def end_run(
    spec: RunSpec, run_dir: RunDir, world: Ranks, logger: RunLogger, saving: Saving, clock: Clock, decision: Decision,
    evaluated: dict[str, Any], *, step: int, num_steps: int, peak_bytes: Callable[[], int],
) -> dict[str, Any]:
    """Save what is not saved yet and tell the end; raises where the run was stopped before its last step."""
    wants_last = spec.store.checkpoint_at_end or decision.is_save_due or bool(decision.stop)
    with clock.paused():
        saving.finish(step, evaluated, wants_last=wants_last)
    end = {"outcome": "done", "step": step, "run_dir": run_dir.uri, **clock.whole(), "step_s": clock.usual_step_s(),
           "peak_bytes": peak_bytes(), **(what_it_took(run_dir, decision.stop) if world.is_first else {})}
    if step < num_steps:
        logger.log("interrupt", {"step": step, "signal": decision.stop})
        logger.log("end", {**end, "outcome": "budget" if decision.stop == "budget" else "interrupted"})
        kept = f"; saved in {run_dir.uri}" if step else ""
        why = "the budget" if decision.stop == "budget" else decision.stop
        raise stopped_by(decision.stop, f"stopped by {why} at step {step} of {num_steps}{kept}")
    logger.log("end", end)
    return {**evaluated, **end}


def finished_before(run_dir: RunDir, step: int, view: Sequence[Sink]) -> dict[str, Any]:
    """The end of a run that had ended already."""
    text = (f"{run_dir.uri} is finished: {step} steps. --fresh runs it again in a new directory; "
            "a larger train.num_steps or train.num_epochs goes on")
    for sink in view:
        sink.emit(Event("note", {"level": "info", "text": text}))
        sink.close()
    return {"outcome": "done", "step": step, "run_dir": run_dir.uri}


@contextmanager
def recorded_errors(logger: RunLogger, explain: Callable[[RuntimeError], EmbarkError | None]) -> Iterator[None]:
    """What ends the run in here is in its record, and raised in our own words where `explain` has some."""
    try:
        yield
    except (EmbarkError, RuntimeError) as raised:
        error = raised if isinstance(raised, EmbarkError) else explain(raised)
        if not isinstance(error, Interrupted | Preempted | OverBudget):
            logger.record("error", {"text": str(error or raised)})  # whoever watches hears it from the exit
        if error is None or error is raised:
            raise
        raise error from raised
