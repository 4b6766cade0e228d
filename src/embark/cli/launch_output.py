"""`embark launch`, `status`, `logs` and `cancel`: hand a run over, follow it, take it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from embark.cli.console import Console
from embark.errors import EmbarkError, ExitCode, Interrupted, UserError
from embark.formatting import format_duration, pluralize, to_one_line
from embark.launch.backend import CancelResult, LaunchRequest, LogLine, Notify, Resource, RunEvent, RunHandle, Status
from embark.launch.backend_selection import backend_for, backend_of
from embark.launch.run_registry import (
    RunRecord,
    delete_record,
    find_run,
    list_runs,
    location_hash,
    now_s,
    record_path,
    save_record,
)
from embark.launch.shell import DryRunShell, Shell
from embark.spec import RunSpec, to_toml

NUM_EVENTS = 5
"""Of the last that a place said, shown with a run's status."""


def launch_run(console: Console, spec: RunSpec, *, yes: bool, dry_run: bool, context: str = "") -> ExitCode:
    """Verdict, price, question, then the run is handed over. With `dry_run` every command is said and none is run."""
    shell = _shell(console, dry_run)
    place = backend_for(spec, shell, _teller(console), context=context)
    is_paid = bool(spec.place.machine or spec.place.cloud)
    told = _say_price(console, spec) if is_paid else {}
    with _nothing_made():
        handle = place.handle_of(spec)
        order = LaunchRequest(spec, handle)
        place.check(order)
    if is_paid and not yes and not dry_run and not console.confirm(_question(handle), "--yes"):
        raise Interrupted("nothing was launched", fix="")
    if dry_run:
        place.submit(order)
        console.data({**told, "commands": [list(words) for words in getattr(shell, "recorded", ())]})
        console.result(f"{to_one_line(handle.title)}: nothing was run or kept")
        return ExitCode.DONE
    run = RunRecord(handle, to_toml(spec), now_s(), is_submitted=False, path=record_path(handle))
    made: list[Resource] = []
    with _nothing_half_made(run, made):
        save_record(run)
        place.submit(replace(order, note=made.append))
        save_record(replace(run, is_submitted=True))
        console.data({"name": handle.name, "backend": handle.backend, "where": dict(handle.where),
                      "run": handle.run_uri, "usd_per_hour": handle.usd_per_hour, **told})
        console.result(f"{to_one_line(handle.title)}: handed over")
        console.text(f"embark status {handle.name}; embark logs {handle.name} --follow; embark cancel {handle.name}")
    return ExitCode.DONE


def status_run(console: Console, name: str, *, context: str = "") -> ExitCode:
    """One run in full, or all that were launched from here. Exit code 1 if the one has failed."""
    if not name:
        return _all(console, context)
    run = find_run(name, context)
    status = _look(console, run)
    _say_status(console, run, status, _last_events(console, run, status))
    return ExitCode.OTHER if status.state == "failed" else ExitCode.DONE


def logs_run(console: Console, name: str, *, follow: bool) -> ExitCode:
    """Every machine's lines, merged by time. With `follow` until the run ends; exit code 1 if it has failed."""
    run = find_run(name)
    place = backend_of(run.handle, Shell(), _teller(console))
    for line in place.logs(run.handle, follow=follow):
        console.raw(_json_line(line) if console.json else _log_text(line))
    if not follow:
        return ExitCode.DONE
    status = _look(console, run)
    console.text(_sentence(run, status), style="bold")
    return ExitCode.OTHER if status.state == "failed" else ExitCode.DONE


def cancel_run(console: Console, name: str, *, yes: bool, dry_run: bool) -> ExitCode:
    """Ends a run after a last checkpoint, and says what is left. Exit code 1 if it had not ended in time."""
    run = find_run(name)
    if not yes and not dry_run and not console.confirm(f"End {_title(run)}?", "--yes"):
        raise Interrupted("nothing was cancelled", fix="")
    place = backend_of(run.handle, _shell(console, dry_run), _teller(console))
    done = place.cancel(run.handle)
    if not dry_run and done.is_complete:
        if done.removed:
            save_record(replace(run, is_submitted=True, last_state="gone", last_reason="cancelled"))
        else:
            delete_record(run)
    _say_cancelled(console, run, done)
    return ExitCode.DONE if done.is_complete else ExitCode.OTHER


@contextmanager
def _nothing_made() -> Iterator[None]:
    """While only questions are asked."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("stopped by Ctrl-C; nothing was made") from None


@contextmanager
def _nothing_half_made(run: RunRecord, made: list[Resource]) -> Iterator[None]:
    """Whatever stops a launch, what may be there by then is said, with the commands that remove it."""
    try:
        yield
    except KeyboardInterrupt:
        if not made:
            delete_record(run)
            raise Interrupted("stopped by Ctrl-C; nothing was made") from None
        raise Interrupted(f"stopped by Ctrl-C; {_may_be_there(made)}", fix=_removal(made)) from None
    except EmbarkError as error:
        if not made:
            delete_record(run)
            raise
        fix = "; ".join(part for part in (error.fix, f"to remove: {_removal(made)}") if part)
        raise type(error)(f"{error.what}; {_may_be_there(made)}", fix=fix) from error


def _may_be_there(made: list[Resource]) -> str:
    return "there may be by now: " + ", ".join(thing.what for thing in made)


def _removal(made: list[Resource]) -> str:
    return ", then ".join(dict.fromkeys(thing.remove for thing in reversed(made)))


def _say_price(console: Console, spec: RunSpec) -> dict[str, object]:
    """The same for a program."""
    from embark.launch.price import estimate_launch

    told = estimate_launch(spec)
    if not told.fits:
        raise UserError(told.sentence, fix="nothing was launched. embark plan says more; embark render writes the "
                                           "files for those who know better")
    console.text(told.sentence)
    console.text(told.price, style="bold")
    return {"verdict": told.sentence, "price": told.price, "usd_per_hour": told.usd_per_hour,
            "total_usd": told.total_usd}


def _question(handle: RunHandle) -> str:
    where = f" in {handle.where['context']}" if handle.where.get("context") else ""
    return f"Launch {to_one_line(handle.title)}{where}?"


def _look(console: Console, run: RunRecord, *, is_hasty: bool = False) -> Status:
    """How it stands now; remembered, since clusters forget."""
    status = backend_of(run.handle, Shell(), _teller(console), is_hasty=is_hasty).status(run.handle)
    if status.state == "gone":
        if not run.is_submitted:
            return replace(status, reason="its launch was cut off before it was made",
                           fix=f"embark launch it again, or embark cancel {run.handle.name}")
        if run.last_state not in ("", "gone"):
            ended = f"{run.last_state}: {run.last_reason}" if run.last_reason else run.last_state
            return replace(status, reason=f"{status.reason}; when last seen it had {_seen_words(ended)}")
        return status
    save_record(replace(run, is_submitted=True, last_state=status.state, last_reason=status.reason))
    return status


def _seen_words(ended: str) -> str:
    return ended if ended.startswith(("succeeded", "failed")) else f"been {ended}"


def _all(console: Console, context: str) -> ExitCode:
    shelf = list_runs(context)
    names = [run.handle.name for run in shelf.runs]
    rows = []
    for run in shelf.runs:
        state, why = f"was {run.last_state}" if run.last_state else "not known", ""
        try:
            status = _look(console, run, is_hasty=True)
            state, why = str(status.state), status.reason
        except EmbarkError as error:  # one cluster that is away does not hide the others
            why = error.what
        twice = names.count(run.handle.name) > 1
        rows.append({
            "name": f"{run.handle.name}@{location_hash(run.handle)}" if twice else run.handle.name,
            "state": state, "launched": f"{format_duration(now_s() - run.submitted_s)} ago",
            "usd_per_hour": run.handle.usd_per_hour, "what": to_one_line(run.handle.title), "why": why,
        })
    headings = {"name": "name", "state": "state", "launched": "launched", "usd_per_hour": "$ an hour", "what": "what",
                "why": "why"}
    console.table(rows, headings)
    for path in shelf.broken:
        console.warning(f"{path} cannot be read and is passed over")
    return ExitCode.DONE


def _last_events(console: Console, run: RunRecord, status: Status) -> list[RunEvent]:
    """What its place said of it last, where it can be asked."""
    if status.state == "gone":
        return []
    try:
        return backend_of(run.handle, Shell(), _teller(console), is_hasty=True).events(run.handle)[-NUM_EVENTS:]
    except EmbarkError:  # the state was told, and is what was asked for
        return []


def _say_status(console: Console, run: RunRecord, status: Status, events: list[RunEvent]) -> None:
    parts = [{"name": p.name, "index": p.index, "state": p.state, "why": p.why} for p in status.parts]
    console.data({
        "name": run.handle.name, "backend": run.handle.backend, "state": status.state, "reason": status.reason,
        "fix": status.fix, "num_restarts": status.num_restarts, "since_s": status.since_s, "parts": parts,
        "usd_per_hour": run.handle.usd_per_hour, "run": run.handle.run_uri, "events": [asdict(e) for e in events],
    })
    if console.json:
        return
    console.result(_sentence(run, status))
    if status.fix:
        console.text(f"  fix: {status.fix}", style="green")
    if parts:
        console.table(parts, {"name": "part", "index": "machine", "state": "state", "why": "why"})
    if events:
        rows = [{"at": _clock(e.time_s), "source": to_one_line(e.source), "reason": e.reason, "text": e.text}
                for e in events]
        console.table(rows, {"at": "at", "source": "about", "reason": "event", "text": "what its place said last"})
    if not run.is_submitted and status.state != "gone":
        console.warning(f"its launch was cut off: embark cancel {run.handle.name} takes away what is there")


def _sentence(run: RunRecord, status: Status) -> str:
    since = f" for {format_duration(now_s() - status.since_s)}" if status.since_s and status.state == "running" else ""
    reason = f": {status.reason}" if status.reason else ""
    return f"{_title(run)}: {status.state}{since}{reason}"


def _title(run: RunRecord) -> str:
    return to_one_line(run.handle.title or run.handle.name)


def _say_cancelled(console: Console, run: RunRecord, done: CancelResult) -> None:
    saved = _last_checkpoint(run.handle)
    console.data({
        "name": run.handle.name, "removed": list(done.removed), "is_complete": done.is_complete,
        "remains": [{"what": thing.what, "remove": thing.remove} for thing in done.remains], "last_checkpoint": saved,
    })
    if console.json:
        return
    if not done.is_complete:
        console.result(f"{_title(run)}: told to end, and not gone yet; embark cancel {run.handle.name} waits again")
    else:
        console.result(f"{_title(run)}: removed {', '.join(done.removed)}" if done.removed
                       else f"{_title(run)}: was not there, and is forgotten now")
    if saved:
        console.text(f"its last whole checkpoint: {saved}")
    console.text(f"{pluralize(len(done.remains), 'thing')} left:")
    for thing in done.remains:
        console.text(f"  {thing.what}: {thing.remove}")


def _last_checkpoint(handle: RunHandle) -> str:
    """Its name; empty where none can be seen from here."""
    from embark.store import CheckpointStore, open_store
    from embark.store.retry_policy import RetryPolicy

    # It is beside the point of what was asked, so a store that does not answer is not waited for.
    hasty = RetryPolicy(max_retries=1, connect_s=5.0, silence_s=10.0, request_s=20.0, give_up_s=10.0)
    try:
        names = [checkpoint.name for checkpoint in CheckpointStore(open_store(f"{handle.run_uri}/checkpoints", hasty)).committed()]
    except (EmbarkError, ImportError):
        return ""
    return max(names, default="")


def _json_line(line: LogLine) -> str:
    import json

    told: dict[str, Any] = {"time_s": line.time_ns / 1e9, "source": line.source, "index": line.index, "text": line.text}
    return json.dumps(told) + "\n"


def _log_text(line: LogLine) -> str:
    from embark.formatting import strip_control_chars

    return f"{_clock(line.time_ns / 1e9)} {to_one_line(line.source)} | {strip_control_chars(line.text)}\n"


def _clock(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%H:%M:%S") if time_s else "--:--:--"


def _shell(console: Console, dry_run: bool) -> Shell:
    return DryRunShell(lambda words: console.raw(f"{words}\n") if not console.json else None) if dry_run else Shell()


def _teller(console: Console) -> Notify:
    """What takes its time is told to stderr, which a reader of JSON does not read."""
    return console.warning
