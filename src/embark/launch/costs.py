"""What a run has cost and will: from its events, from what its place says of its machines, and the price."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from embark.catalog import SpecPrice, price_spec
from embark.errors import EmbarkError
from embark.events import Event, read_events
from embark.events.attempts import attempts
from embark.events.spending import Spending, spending
from embark.formatting import format_duration
from embark.launch.backend import Notify, Status
from embark.launch.backend_selection import backend_of
from embark.launch.run_registry import RunNotLaunchedHere, RunRecord
from embark.launch.run_registry import find_run as find_launched
from embark.launch.shell import Shell
from embark.spec import RunSpec, load_spec
from embark.store import RunDir
from embark.store import find_run as find_dir

ALIVE_S = 300.0
"""A run that nobody launched from here, and that said something so lately, is taken to be under way."""


@dataclass(frozen=True, slots=True)
class RunCost:
    """All that is known."""

    name: str
    title: str
    is_up: bool
    spending: Spending | None
    """From the run's own events; None where they cannot be seen."""
    lead_s: float
    """Its machines were there so long before its first process: the image was pulled. With no events, all there is."""
    usd_per_hour: float | None
    price: str
    """Where the price is from, and of what day."""
    predicted_usd: float | None
    """What the plan says of the whole run."""
    budget_usd: float | None
    notes: tuple[str, ...] = ()
    """What could not be counted."""
    can_be_stopped: bool = False
    """It was launched from here, and has not ended."""

    @property
    def held_s(self) -> float:
        return self.lead_s + (self.spending.held_s if self.spending else 0.0)

    @property
    def spent_usd(self) -> float | None:
        lead = None if self.usd_per_hour is None else self.usd_per_hour * self.lead_s / 3600
        if self.spending is None:
            return lead
        return None if self.spending.usd is None else self.spending.usd + (lead or 0.0)

    @property
    def left_s(self) -> float | None:
        return self.spending.left_s if self.spending else None

    @property
    def left_usd(self) -> float | None:
        return None if self.left_s is None or self.usd_per_hour is None else self.usd_per_hour * self.left_s / 3600

    @property
    def total_usd(self) -> float | None:
        return None if self.spent_usd is None or self.left_usd is None else self.spent_usd + self.left_usd


def run_cost(word: str, tell: Notify, *, now_s: float | None = None) -> RunCost:
    """Of a run's directory, its name under ./runs, its uri, or the name it was launched by."""
    now_s = time.time() if now_s is None else now_s
    launched = _launched(word)
    notes: list[str] = []
    status = _status(launched, tell, notes)
    run_dir = _run_dir(word, launched)
    events = _events(run_dir, notes, is_only=launched is None)
    spec = _spec(run_dir, launched)
    priced = _Price.of(spec, launched.handle.usd_per_hour if launched else None)
    found = spending(events, usd_per_hour=priced.usd_per_hour)
    is_fresh = launched is None and found is not None and now_s - found.last_s < ALIVE_S and not found.outcome
    is_up = status.state == "running" if status else is_fresh
    if is_up:
        found = spending(events, usd_per_hour=priced.usd_per_hour, now_s=now_s)
    if found is not None and found.usd_per_hour is not None and found.usd_per_hour != priced.usd_per_hour:
        priced = _Price(found.usd_per_hour, "as the run was told when it started")
    return RunCost(
        name=launched.handle.name if launched else (run_dir.uri if run_dir else word),
        title=launched.handle.title if launched else (run_dir.uri if run_dir else word),
        is_up=is_up, spending=found, lead_s=_lead_s(events, status, now_s, notes), usd_per_hour=priced.usd_per_hour,
        price=priced.source, predicted_usd=_predicted_usd(spec),
        budget_usd=spec.place.budget_usd if spec else None, notes=tuple(notes),
        can_be_stopped=status is not None and not status.has_ended,
    )


@dataclass(frozen=True, slots=True)
class _Price:
    usd_per_hour: float | None
    source: str

    @classmethod
    def of(cls, spec: RunSpec | None, remembered: float | None) -> _Price:
        """Of the machines that the spec names, as the catalog has it now; else what the launch remembered."""
        price = _spec_price(spec)
        now = price.usd_per_hour if price else None
        if remembered is not None and remembered != now:
            return cls(remembered, "the catalog's on the day of the launch")
        if price is None or now is None or price.origin is None:
            return cls(None, "")
        return cls(now, f"the catalog's of {price.origin.date} for {price.region}, from {price.origin.source}")


def _launched(word: str) -> RunRecord | None:
    try:
        return find_launched(word)
    except RunNotLaunchedHere:
        return None


def _run_dir(word: str, launched: RunRecord | None) -> RunDir | None:
    if launched is not None:
        return RunDir(launched.handle.run_uri) if launched.handle.run_uri else None
    return find_dir(word)


def _status(launched: RunRecord | None, tell: Notify, notes: list[str]) -> Status | None:
    if launched is None:
        return None
    try:
        return backend_of(launched.handle, Shell(), tell, is_hasty=True).status(launched.handle)
    except EmbarkError as error:
        notes.append(f"how it stands is not known, so nothing is counted since its last event: {error.what}")
        return None


def _events(run_dir: RunDir | None, notes: list[str], *, is_only: bool) -> list[Event]:
    if run_dir is None:
        return []
    try:
        run_dir.fetch()
    except EmbarkError as error:
        if is_only:
            raise
        notes.append(f"its events cannot be read from here: {error.what}")
        return []
    return list(read_events(run_dir.events)) if run_dir.events.is_file() else []


def _spec(run_dir: RunDir | None, launched: RunRecord | None) -> RunSpec | None:
    if launched is not None:
        import tomllib

        from embark.spec import resolve

        try:
            return resolve(tomllib.loads(launched.spec_toml))
        except (EmbarkError, ValueError):
            return None
    try:
        return load_spec(str(run_dir.spec)) if run_dir is not None and run_dir.spec.is_file() else None
    except EmbarkError:  # of another version: hours are told all the same
        return None


def _spec_price(spec: RunSpec | None) -> SpecPrice | None:
    try:
        return None if spec is None else price_spec(spec)
    except EmbarkError:
        return None


def _lead_s(events: Sequence[Event], status: Status | None, now_s: float, notes: list[str]) -> float:
    """From when the machines were there to the first process; where there are no events, to now."""
    if status is None:
        return 0.0
    since = [part.since_s for part in status.parts if part.since_s is not None]
    tries = attempts(events)
    if tries:
        # After a restart the pods that are there are not those that came first.
        return max(0.0, tries[0].began_s - min(since)) if since and not status.num_restarts else 0.0
    if status.has_ended or status.state == "pending":
        return 0.0
    began_s = min(since) if since and not status.num_restarts else status.since_s
    if began_s is None:
        return 0.0
    if status.num_restarts:
        notes.append(f"it was restarted {status.num_restarts} times, and what it waited for machines is counted too")
    notes.append(f"counted from {format_duration(now_s - began_s)} ago, when its machines took it: it has no events yet")
    return max(0.0, now_s - began_s)


def _predicted_usd(spec: RunSpec | None) -> float | None:
    if spec is None or _spec_price(spec) is None:
        return None
    from embark.launch.price import estimate_launch

    try:
        return estimate_launch(spec).total_usd
    except EmbarkError:
        return None
