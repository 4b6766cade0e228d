"""Which directory a run goes into, its lease, and whether the run is finished already."""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from embark.errors import EmbarkError, Interrupted, OverBudget, Preempted, RunInUse, UserError
from embark.events import Event, EventLog, Sink, read_events
from embark.events.events import Change, changes_of, uptime_s
from embark.events.spending import BUDGET
from embark.formatting import to_finite
from embark.spec import RunSpec, TrainSpec
from embark.store import EVENTS, RunDir, first_free_run, run_uri
from embark.store.atomic_file import make_directory
from embark.store.checkpoint_store import EARLY_STOPPING
from embark.store.errors import explain
from embark.store.lease import FOLDER, MAX_TTL_S, TTL_S, acquire, current_holder, process_mark
from embark.values import JsonDict
from .budget import PROCESS, refuse_over_budget, usd_per_hour
from .identity import refuse_changes
from .resolve import ResolvedRun, resolve_run
from .signals import StopSignals, stopped_by
from .trainer import Ranks

TTL = "EMBARK_LEASE_S"  # Seconds to wait for a process on another machine that gives no sign of life.


@dataclass(slots=True)
class RunOpener:
    """Opens runs for a process: whom to notify, what may interrupt it, and what to do at its end."""

    signals: StopSignals
    view: Sequence[Sink]
    at_end: ExitStack
    begun: RunDir | EmbarkError | None = None

    def notify(self, text: str) -> None:
        for sink in self.view:
            sink.emit(Event("note", {"level": "info", "text": text}))

    def pause(self, seconds: float) -> None:
        """Sleep; raises if the process was asked to stop meanwhile."""
        time.sleep(seconds)
        if name := self.signals.look():
            raise stopped_by(name, f"stopped by {name} while it waited for another process")

    def begin(self, spec: RunSpec, *, fresh: bool) -> None:
        """Acquire the run on its first rank and record that this start has begun, so that it is counted even if it is
        killed while it loads. A refusal is raised in `open_run`, where all ranks see it."""
        try:
            run_dir = self.begun = self.acquire_run(spec, fresh=fresh)
            for file in (run_dir.spec, run_dir.plan, run_dir.events):
                if file.is_dir():
                    raise UserError(f"{file} is a directory", "move it away; the run writes a file of this name")
            run_dir.fetch()
            is_first = run_dir.attempt == 1 and not run_dir.events.exists()
            previous = run_dir.lease.previous if run_dir.lease else None
            record_event(run_dir, Event("begin", {
                "name": spec.name, "run_dir": run_dir.uri, "attempt": run_dir.attempt, "age_s": PROCESS.uncounted_s(),
                "boot": process_mark(os.getpid()).rpartition(" ")[0], "uptime_s": uptime_s(),
                "usd_per_hour": usd_per_hour(), "budget_usd": spec.place.budget_usd, "is_spot": spec.place.spot,
                **({"previous_began_s": previous.since_s, "previous_ended_s": previous.ended_s} if previous else {})}))
            num_bytes = run_dir.events.stat().st_size
            self.at_end.push(lambda _, error, __: self._record_end(run_dir, num_bytes, error, is_first=is_first))
            if not last_finished_step(life_events(run_dir)):
                refuse_over_budget(spec, run_dir)
        except EmbarkError as error:
            self.begun = error
            if os.getenv("WORLD_SIZE", "1") == "1":
                raise

    def _record_end(self, run_dir: RunDir, num_bytes: int, error: BaseException | None, *, is_first: bool) -> None:
        """Record why a start ended that has logged nothing since it began. Where it was the first one, was refused, and
        has no price, nothing is left of it."""
        with suppress(EmbarkError, OSError):
            if error is None or run_dir.events.stat().st_size != num_bytes:
                return
            if is_first and isinstance(error, UserError) and usd_per_hour() is None:
                _remove_begun(run_dir)
                return
            event = Event("error", {"text": str(error)})
            if isinstance(error, KeyboardInterrupt | Interrupted | Preempted | OverBudget):
                signal = BUDGET if isinstance(error, OverBudget) else self.signals.caught or "SIGINT"
                event = Event("interrupt", {"signal": signal})
            record_event(run_dir, event)

    def acquire_run(self, spec: RunSpec, *, fresh: bool) -> RunDir:
        """Return the run's directory with its lease, acquired before anything in it is read and released at the end;
        with `fresh`, the first directory that no start has ever held."""
        root, ttl_s = spec.store.root, lease_ttl_s(spec)
        while True:
            run_dir = first_free_run(root, spec.name) if fresh else RunDir(run_uri(root, spec.name))
            make_run_directory(run_dir.path)
            with suppress(*([RunInUse] if fresh else [])):  # another start has made the same directory just now
                lease = acquire(run_dir.store, ttl_s, self.notify, pause=self.pause)
                if not fresh or lease.token == 1:
                    self.at_end.callback(lease.release)
                    return replace(run_dir, lease=lease, attempt=lease.token, is_fresh=fresh)
                lease.release()


def make_run_directory(path: Path) -> None:
    try:
        make_directory(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", "set store.root to a writable directory") from error


def _remove_begun(run_dir: RunDir) -> None:
    """Remove what `RunOpener.begin` has written. Whoever waits for the lease takes it when its file is gone."""
    assert run_dir.lease is not None
    run_dir.check_lease()
    run_dir.events.unlink()
    run_dir.store.delete(EVENTS)
    run_dir.lease.withdraw()
    for folder in (run_dir.path / FOLDER, run_dir.path, run_dir.path.parent):
        with suppress(OSError):  # others' files are in it
            folder.rmdir()


def record_event(run_dir: RunDir, event: Event) -> None:
    """Append an event to a run that is not open, also in its remote store."""
    try:
        log = EventLog(run_dir.events, check=run_dir.check_lease)
    except OSError as error:
        raise explain(error, "write", str(run_dir.events)) from None
    log.emit(event)
    log.close()
    if run_dir.is_remote:
        run_dir.store.write(EVENTS, run_dir.events.read_bytes())


def lease_ttl_s(spec: RunSpec) -> float:
    """Return how long a lease is valid: at most half of what the other ranks wait for the first one, which may have to
    wait for the lease to expire."""
    text = os.getenv(TTL, "")
    try:
        seconds = float(text) if text else TTL_S
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TTL_S:
        raise UserError(f"the environment's {TTL} is {text!r}", f"a number of seconds up to {MAX_TTL_S:.0f}")
    return min(seconds, spec.place.timeout_s / 2)


def open_run(run: ResolvedRun, world: Ranks, opener: RunOpener, *, fresh: bool) -> tuple[RunDir, int, list[Change]]:
    """Return a run's directory, which this run alone may write, the last step if nothing is left to train, and the
    changes on its record. Rank 0 decides, and all ranks see it."""
    run_dir, last_step = RunDir(""), 0
    changes: list[Change] = []
    refused: EmbarkError | None = None
    if world.is_first:
        try:
            if opener.begun is None:
                opener.begin(run.spec, fresh=fresh)
            if isinstance(opener.begun, EmbarkError):
                raise opener.begun
            run_dir = opener.begun or run_dir
            last_step, changes = _inspect(run_dir, run)
        except EmbarkError as error:
            refused = error
    decided = (run_dir.uri, run_dir.attempt, last_step, changes, refused)
    uri, attempt, last_step, changes, refused = world.gathered(decided)[0]
    if refused:
        raise refused
    return run_dir if world.is_first else RunDir(uri, attempt=attempt, is_fresh=fresh), last_step, changes


def _inspect(run_dir: RunDir, run: ResolvedRun) -> tuple[int, list[Change]]:
    events = life_events(run_dir)
    changes = changes_of(events)
    step = last_finished_step(events)
    refuse_changes(run_dir, run.identity, changes, run.accepted, step)
    run_dir.store.check()
    if not is_complete(events, run.spec.train, run.num_steps):
        return 0, changes
    end = next(event for event in reversed(events) if event.kind == "end")
    record_event(run_dir, Event("end", end.values))  # this start is over as well
    return step, changes


def finished_result(spec: RunSpec, view: Sequence[Sink]) -> JsonDict | None:
    """Return what a run in a local directory returned when it finished, before torch or jax is loaded.

    None if there is something to train, or to wait for, and under torchrun, whose ranks decide together. Raises, as the
    run itself would, if another model was trained there.
    """
    run_dir = RunDir(run_uri(spec.store.root, spec.name))
    if run_dir.is_remote or os.getenv("WORLD_SIZE", "1") != "1" or not run_dir.events.is_file():
        return None
    events = life_events(run_dir)
    step = last_finished_step(events)
    if not step or current_holder(run_dir.store) is not None:
        return None
    run = resolve_run(spec)
    refuse_changes(run_dir, run.identity, changes_of(events), run.accepted, step)
    complete = is_complete(events, run.spec.train, run.num_steps)
    return replay_finished(run_dir, step, run.spec, view) if complete else None


def life_events(run_dir: RunDir) -> list[Event]:
    """Read when the run started and ended, and what changed."""
    if not run_dir.events.is_file():
        return []
    try:
        return [event for event in read_events(run_dir.events) if event.kind in ("start", "end", "change")]
    except OSError as error:
        raise explain(error, "read", str(run_dir.events)) from None


def last_finished_step(events: Sequence[Event]) -> int:
    """Return the last step of a run that has finished; 0 for any other."""
    ends = [event for event in events if event.kind in ("end", "start")]
    if not ends or ends[-1].kind != "end" or ends[-1].values.get("outcome") != "done":
        return 0
    return int(to_finite(ends[-1].values.get("step")) or 0)


def is_complete(events: Sequence[Event], train: TrainSpec, num_steps: int) -> bool:
    """Tell whether a finished run has nothing left to train: no step is left, or early stopping ended it."""
    step = last_finished_step(events)
    state = next((e.values.get(EARLY_STOPPING) for e in reversed(events) if e.kind == "end"), None)
    if not step or not train.early_stopping_patience or not isinstance(state, dict):
        return bool(step) and step >= num_steps
    num_without = to_finite(state.get("num_without_improvement")) or 0
    return step >= num_steps or (state.get("metric") == train.early_stopping_metric
                                 and num_without >= train.early_stopping_patience)


def replay_finished(run_dir: RunDir, step: int, spec: RunSpec, view: Sequence[Sink]) -> JsonDict:
    """Show the end of a run that had finished, and return what it returned then, from its events."""
    events = read_events(run_dir.events) if run_dir.events.is_file() else ()  # a remote run's are on rank 0's host only
    newest = {event.kind: event for event in events if event.kind in ("eval", "end")}
    newest["end"] = Event("end", {**newest["end"].values, "run_dir": run_dir.uri} if newest else
                          {"outcome": "done", "step": step, "run_dir": run_dir.uri})
    state = newest["end"].values.get(EARLY_STOPPING)
    has_stopped_early = isinstance(state, dict) and bool(state.get("has_stopped"))
    for sink in view:
        options = _how_to_continue(run_dir, spec.train, step, has_stopped_early=has_stopped_early)
        text = f"{run_dir.uri} is finished: {step} steps. {options}"
        for event in (Event("note", {"level": "info", "text": text}), *newest.values()):
            sink.emit(event)
        sink.close()
    return {name: value for event in newest.values() for name, value in event.values.items()}


def _how_to_continue(run_dir: RunDir, train: TrainSpec, step: int, *, has_stopped_early: bool) -> str:
    again = "The same command with --fresh trains it again in a new directory"
    if not run_dir.checkpoints.committed():
        return f"{again}; it kept no checkpoint to continue from"
    more = f"--set train.num_steps={2 * step}" if train.num_steps else f"--set train.num_epochs={train.num_epochs + 1}"
    if has_stopped_early:
        more = f"--set train.early_stopping_patience={2 * train.early_stopping_patience}"
    if train.decay != "none" and not train.decay_steps:  # it ends with the run: a longer one has other rates
        more += " --accept-change train.decay_steps"
    return f"{again}; with {more} it continues"
