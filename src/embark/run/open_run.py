"""Which directory a run goes into, and whether it is finished already."""

from collections.abc import Sequence
from typing import Any

from embark.errors import EmbarkError, UserError
from embark.events import Event, Sink, read_events
from embark.events.events import Change, changes_of
from embark.formatting import to_finite
from embark.run.hold_run import Opening, hold_run
from embark.run.identity import Identity, refuse_changes
from embark.run.stop import refuse_over_budget
from embark.run.trainer import Ranks
from embark.spec import RunSpec, TrainSpec
from embark.store import RunDir
from embark.store.checkpoint_store import EARLY_STOPPING


def open_run(
    spec: RunSpec, world: Ranks, opening: Opening, identity: Identity, num_steps: int, *, fresh: bool
) -> tuple[RunDir, int, list[Change]]:
    """A run's directory, which this run alone may write, the last step of a run in it that has nothing left to train,
    and the changes on its record. Rank 0 decides, and all ranks see it."""
    run_dir, finished_step = RunDir(""), 0
    changes: list[Change] = []
    refused: EmbarkError | None = None
    if world.is_first:
        try:
            run_dir = hold_run(spec, opening, fresh=fresh)
            finished_step, changes = _inspect(run_dir, spec, identity, num_steps)
        except EmbarkError as error:
            refused = error
    decided = (run_dir.uri, run_dir.attempt, finished_step, changes, refused)
    uri, attempt, finished_step, changes, refused = world.gathered(decided)[0]
    if refused:
        raise refused
    return run_dir if world.is_first else RunDir(uri, attempt=attempt, is_fresh=fresh), finished_step, changes


def _inspect(run_dir: RunDir, spec: RunSpec, identity: Identity, num_steps: int) -> tuple[int, list[Change]]:
    for file in (run_dir.spec, run_dir.plan, run_dir.events):
        if file.is_dir():
            raise UserError(f"{file} is a directory", fix="move it away; the run writes a file of this name")
    run_dir.fetch()
    events = life_events(run_dir)
    changes = changes_of(events)
    step = finished_step(events)
    refuse_changes(run_dir, identity, changes, spec.store.accept_changes, step)
    run_dir.store.check()
    if not step:
        refuse_over_budget(spec, run_dir)
    return step if is_complete(events, spec.train, num_steps) else 0, changes


def life_events(run_dir: RunDir) -> list[Event]:
    """When it started and ended, and what changed."""
    if not run_dir.events.is_file():
        return []
    return [event for event in read_events(run_dir.events) if event.kind in ("start", "end", "change")]


def finished_step(events: Sequence[Event]) -> int:
    """The last step of a run that has finished; 0 of any other."""
    ends = [event for event in events if event.kind in ("end", "start")]
    if not ends or ends[-1].kind != "end" or ends[-1].values.get("outcome") != "done":
        return 0
    return int(to_finite(ends[-1].values.get("step")) or 0)


def is_complete(events: Sequence[Event], train: TrainSpec, num_steps: int) -> bool:
    """A run that has finished has nothing left to train: no step is left, or early stopping ended it."""
    step = finished_step(events)
    state = next((e.values.get(EARLY_STOPPING) for e in reversed(events) if e.kind == "end"), None)
    if not step or not train.early_stopping_patience or not isinstance(state, dict):
        return bool(step) and step >= num_steps
    num_without = to_finite(state.get("num_without_improvement")) or 0
    return step >= num_steps or (state.get("metric") == train.early_stopping_metric
                                 and num_without >= train.early_stopping_patience)


def finished_before(run_dir: RunDir, step: int, spec: RunSpec, view: Sequence[Sink]) -> dict[str, Any]:
    """The end of a run that had finished already: what it returned then, from its events."""
    events = read_events(run_dir.events) if run_dir.events.is_file() else ()  # a remote run's are on rank 0's host only
    newest = {event.kind: event for event in events if event.kind in ("eval", "end")}
    newest["end"] = Event("end", {**newest["end"].values, "run_dir": run_dir.uri} if newest else
                          {"outcome": "done", "step": step, "run_dir": run_dir.uri})
    has_stopped_early = bool((newest["end"].values.get(EARLY_STOPPING) or {}).get("has_stopped"))
    for sink in view:
        ways_on = _ways_on(run_dir, spec.train, step, has_stopped_early=has_stopped_early)
        text = f"{run_dir.uri} is finished: {step} steps. {ways_on}"
        for event in (Event("note", {"level": "info", "text": text}), *newest.values()):
            sink.emit(event)
        sink.close()
    return {name: value for event in newest.values() for name, value in event.values.items()}


def _ways_on(run_dir: RunDir, train: TrainSpec, step: int, *, has_stopped_early: bool) -> str:
    again = "The same command with --fresh trains it again in a new directory"
    if not run_dir.checkpoints.committed():
        return f"{again}; it kept no checkpoint to continue from"
    more = f"--set train.num_steps={2 * step}" if train.num_steps else f"--set train.num_epochs={train.num_epochs + 1}"
    if has_stopped_early:
        more = f"--set train.early_stopping_patience={2 * train.early_stopping_patience}"
    if train.decay != "none" and not train.decay_steps:  # it ends with the run: a longer one has other rates
        more += " --accept-change train.decay_steps"
    return f"{again}; with {more} it continues"
