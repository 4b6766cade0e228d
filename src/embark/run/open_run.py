"""Which directory a run goes into, and whether it is finished already."""

from collections.abc import Sequence
from typing import Any

from embark.errors import EmbarkError, UserError
from embark.events import Event, Sink, read_events
from embark.run.hold_run import Opening, hold_run
from embark.run.stop import refuse_over_budget
from embark.run.trainer import Ranks
from embark.spec import RunSpec, load_spec
from embark.store import RunDir


def open_run(spec: RunSpec, world: Ranks, opening: Opening, *, fresh: bool) -> tuple[RunDir, int]:
    """A run's directory, which this run alone may write, and the last step of a run in it that has finished. Rank 0
    decides, and all ranks see it."""
    run_dir, finished_step = RunDir(""), 0
    refused: EmbarkError | None = None
    if world.is_first:
        try:
            run_dir = hold_run(spec, opening, fresh=fresh)
            finished_step = _inspect(run_dir, spec)
        except EmbarkError as error:
            refused = error
    uri, attempt, finished_step, refused = world.gathered((run_dir.uri, run_dir.attempt, finished_step, refused))[0]
    if refused:
        raise refused
    return run_dir if world.is_first else RunDir(uri, attempt=attempt), finished_step


def _inspect(run_dir: RunDir, spec: RunSpec) -> int:
    run_dir.fetch()
    if run_dir.spec.is_file():
        _refuse_another_run(run_dir, spec)
    run_dir.store.check()
    finished_step = _finished_step(run_dir)
    if not finished_step:
        refuse_over_budget(spec, run_dir)
    return finished_step


def _refuse_another_run(run_dir: RunDir, spec: RunSpec) -> None:
    """Resuming with other tables or other data would corrupt both runs."""
    before = load_spec(str(run_dir.spec))
    free = {"cache_gb", "cache_dir", "prepare"}  # affect neither what is read nor in which order
    must_match = {
        "model": list(type(spec.model).model_fields),
        "data": [name for name in type(spec.data).model_fields if name not in free],
        "train": ["batch_size", "optimizer", "dense_optimizer", "table_dtype", "seed"],
    }
    other = [
        f"{section}.{name}"
        for section, names in must_match.items() for name in names
        if getattr(getattr(before, section), name) != getattr(getattr(spec, section), name)
    ]
    if other:
        raise UserError(
            f"{run_dir.uri} holds a run with a different {', '.join(other)}",
            fix="--fresh starts in a new directory beside it; or choose another name with --set name=…",
        )


def _finished_step(run_dir: RunDir) -> int:
    if not run_dir.events.is_file():
        return 0
    ends = [e for e in read_events(run_dir.events) if e.kind in ("end", "start")]
    if not ends or ends[-1].kind != "end" or ends[-1].values.get("outcome") != "done":
        return 0
    return int(ends[-1].values["step"])


def finished_before(run_dir: RunDir, step: int, view: Sequence[Sink]) -> dict[str, Any]:
    """The end of a run that had finished already: what it returned then, from its events."""
    text = (f"{run_dir.uri} is finished: {step} steps. --fresh runs it again in a new directory; "
            "a larger train.num_steps or train.num_epochs continues it")
    events = read_events(run_dir.events) if run_dir.events.is_file() else ()  # a remote run's are on rank 0's host only
    newest = {event.kind: event for event in events if event.kind in ("eval", "end")}
    newest["end"] = Event("end", {**newest["end"].values, "run_dir": run_dir.uri} if newest else
                          {"outcome": "done", "step": step, "run_dir": run_dir.uri})
    for sink in view:
        for event in (Event("note", {"level": "info", "text": text}), *newest.values()):
            sink.emit(event)
        sink.close()
    return {name: value for event in newest.values() for name, value in event.values.items()}
