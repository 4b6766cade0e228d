"""Which directory a run goes into, and whether it is finished already."""

from collections.abc import Sequence
from typing import Any

from embark.errors import EmbarkError, UserError
from embark.events import Event, Sink, read_events
from embark.events.changes import Change, changes_of
from embark.formatting import to_finite
from embark.run.hold_run import Opening, hold_run
from embark.run.identity import Identity, refuse_changes
from embark.run.stop import refuse_over_budget
from embark.run.trainer import Ranks
from embark.spec import RunSpec, TrainSpec
from embark.store import RunDir


def open_run(
    spec: RunSpec, world: Ranks, opening: Opening, identity: Identity, *, fresh: bool
) -> tuple[RunDir, int, list[Change]]:
    """A run's directory, which this run alone may write, the last step of a run in it that has finished, and the
    changes on its record. Rank 0 decides, and all ranks see it."""
    run_dir, finished_step = RunDir(""), 0
    changes: list[Change] = []
    refused: EmbarkError | None = None
    if world.is_first:
        try:
            run_dir = hold_run(spec, opening, fresh=fresh)
            finished_step, changes = _inspect(run_dir, spec, identity)
        except EmbarkError as error:
            refused = error
    decided = (run_dir.uri, run_dir.attempt, finished_step, changes, refused)
    uri, attempt, finished_step, changes, refused = world.gathered(decided)[0]
    if refused:
        raise refused
    return run_dir if world.is_first else RunDir(uri, attempt=attempt), finished_step, changes


def _inspect(run_dir: RunDir, spec: RunSpec, identity: Identity) -> tuple[int, list[Change]]:
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
    return step, changes


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


def finished_before(run_dir: RunDir, step: int, spec: RunSpec, view: Sequence[Sink]) -> dict[str, Any]:
    """The end of a run that had finished already: what it returned then, from its events."""
    events = read_events(run_dir.events) if run_dir.events.is_file() else ()  # a remote run's are on rank 0's host only
    newest = {event.kind: event for event in events if event.kind in ("eval", "end")}
    newest["end"] = Event("end", {**newest["end"].values, "run_dir": run_dir.uri} if newest else
                          {"outcome": "done", "step": step, "run_dir": run_dir.uri})
    for sink in view:
        text = f"{run_dir.uri} is finished: {step} steps. {_ways_on(run_dir, spec.train, step)}"
        for event in (Event("note", {"level": "info", "text": text}), *newest.values()):
            sink.emit(event)
        sink.close()
    return {name: value for event in newest.values() for name, value in event.values.items()}


def _ways_on(run_dir: RunDir, train: TrainSpec, step: int) -> str:
    again = "The same command with --fresh trains it again in a new directory"
    if not run_dir.checkpoints.committed():
        return f"{again}; it kept no checkpoint to continue from"
    more = f"--set train.num_steps={2 * step}" if train.num_steps else f"--set train.num_epochs={train.num_epochs + 1}"
    if train.decay != "none" and not train.decay_steps:  # it ends with the run: a longer one has other rates
        more += " --accept-change train.decay_steps"
    return f"{again}; with {more} it continues"
