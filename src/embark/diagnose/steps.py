"""What the times of steps say: a rank that is slower than the others, a loader that cannot keep up, a loss that is no
number, a restart that forgot where it was."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from embark.diagnose.finding import Evidence, Seen
from embark.diagnose.rule import rule_named
from embark.diagnose.scan import Listen
from embark.diagnose.source import Source
from embark.diagnose.systems import Systems
from embark.events.alerts import INPUT_SHARE, SLOW_RANK, SLOW_STEP
from embark.formatting import format_duration, to_finite

MIN_STEPS = 3
MAX_KEPT = 4096

_STEP_S = re.compile(r"(?i)\bstep(?:[_ ]?time|_s)\b\s*[=:]?\s*(?P<value>\d+(?:\.\d+)?)\s*(?P<unit>ms|s)?(?![\w.])")
_LOADER_S = re.compile(r"(?i)\b(?:data|loader|dataloader|input)(?:[_ ]?(?:wait|time))(?:_s)?\b\s*[=:]?\s*"
                       r"(?P<value>\d+(?:\.\d+)?)\s*(?P<unit>ms|s)?(?![\w.])")


class Steps:
    """Hears lines and events that tell how long steps take."""

    def __init__(self) -> None:
        self._by_rank: dict[int, list[float]] = {}
        self._own: dict[int, list[float]] = {}
        """As rank 0 gathered them from all: each rank's, less its wait for the others."""
        self._looks: dict[int, list[float]] = {}
        """The same, from looks at where a step's time goes, which also see the waits within a step."""
        self._loader: list[tuple[float, float, Evidence]] = []
        self._first: dict[int, Evidence] = {}
        self._predicted: dict[str, Any] = {}
        self._slow: list[tuple[float, Evidence]] = []
        self._found: list[Seen] = []
        self._systems = Systems()

    @property
    def listeners(self) -> tuple[Listen, ...]:
        return ((b"step_s", self._hear), (b"step time", self._hear), (b"step_time", self._hear))

    def read_events(self, source: Source, order: int) -> Iterator[tuple[str, Evidence]]:
        """Take a run's events in; yields the texts of errors among them, for rules to look at."""
        saved = last = 0
        is_nan = False
        file = source.open()
        with file:
            for number, line in enumerate(file, 1):
                event = _event(line)
                if event is None:
                    continue
                kind = event["event"]
                evidence = Evidence(source.name, number, _short(event), (order, number), rank=_rank(event))
                step = int(to_finite(event.get("step")) or 0)
                if kind == "start":
                    first = int(to_finite(event.get("first_step")) or 0)
                    if saved and first == 0 and last >= saved:
                        self._found.append(Seen(rule_named("checkpoint-ignored"), evidence, values={
                            "saved": f"{saved:,}"}))
                    last = first
                elif kind == "step":
                    last = step or last
                    self._take_step(event, evidence)
                    if "loss" in event and event["loss"] is None and not is_nan:
                        is_nan = True
                        self._found.append(Seen(rule_named("loss-not-a-number"), evidence))
                elif kind == "ranks":
                    self._take_ranks(event, evidence)
                    self._systems.take(event.get("systems"), evidence)
                elif kind == "phases":
                    self._keep_all(self._looks, event.get("own_s"), evidence)
                elif kind == "save":
                    saved = step
                elif kind == "predict":
                    self._predicted = event
                elif kind == "error" and isinstance(event.get("text"), str):
                    text = " ".join(event["text"].split())
                    yield text, Evidence(source.name, number, text, (order, number), rank=_rank(event))

    def findings(self) -> Iterator[Seen]:
        yield from self._found
        yield from self._straggler()
        yield from self._slow_loader()
        yield from self._slower_than_planned()
        yield from self._systems.findings()

    def _straggler(self) -> Iterator[Seen]:
        # A step's whole time, as each rank alone tells it, is the same for all: the fast wait for the slow.
        found = [one for times in (self._looks, self._own or self._by_rank) for one in self._slow_rank(times)]
        yield from found[:1]

    def _slow_rank(self, by_rank: Mapping[int, list[float]]) -> Iterator[Seen]:
        medians = {rank: statistics.median(times) for rank, times in by_rank.items() if len(times) >= MIN_STEPS}
        if len(medians) < 3:
            return
        usual_s = statistics.median(medians.values())
        slow = sorted(rank for rank, time_s in medians.items() if time_s > SLOW_RANK * usual_s)
        if not slow or len(slow) > len(medians) // 3:
            return
        worst = max(slow, key=lambda rank: medians[rank])
        cause = (f"rank {worst} takes {format_duration(medians[worst])} for what takes the others {format_duration(usual_s)}: all "
                 "ranks wait for it in every step")
        yield Seen(rule_named("straggler"), self._first[worst], ranks=frozenset(slow), cause=cause)

    def _slow_loader(self) -> Iterator[Seen]:
        if len(self._loader) < MIN_STEPS:
            return
        share = statistics.median(wait_s / step_s for wait_s, step_s, _ in self._loader)
        if share < INPUT_SHARE:
            return
        yield Seen(rule_named("slow-loader"), self._loader[0][2],
                   cause=f"{share:.0%} of a step is spent waiting for data: the loader, not the device, sets the pace")

    def _slower_than_planned(self) -> Iterator[Seen]:
        planned_s = to_finite(self._predicted.get("step_s"))
        if planned_s is None or not self._predicted.get("is_calibrated") or len(self._slow) < MIN_STEPS:
            return
        usual_s = statistics.median(time_s for time_s, _ in self._slow[1:])
        if usual_s < SLOW_STEP * planned_s:
            return
        cause = (f"a step takes {format_duration(usual_s)} where the plan foresaw {format_duration(planned_s)} on this very kind of "
                 "machine: the loader, another process or the network holds it back")
        yield Seen(rule_named("slower-than-planned"), self._slow[-1][1], cause=cause)

    def _take_step(self, event: dict[str, Any], evidence: Evidence) -> None:
        step_s = to_finite(event.get("step_s"))
        if step_s is None or step_s <= 0:
            return
        self._keep(self._by_rank, evidence.rank or 0, step_s, evidence)
        if len(self._slow) < MAX_KEPT:
            self._slow.append((step_s, evidence))
        wait_s = to_finite(event.get("input_s"))
        if wait_s is not None and len(self._loader) < MAX_KEPT:
            self._loader.append((wait_s, step_s, evidence))

    def _hear(self, text: str, evidence: Evidence) -> None:
        found = _STEP_S.search(text)
        if not found:
            return
        step_s = _seconds(found)
        if step_s <= 0:
            return
        if evidence.rank is not None:
            self._keep(self._by_rank, evidence.rank, step_s, evidence)
        waited = _LOADER_S.search(text)
        if waited and len(self._loader) < MAX_KEPT:
            self._loader.append((_seconds(waited), step_s, evidence))

    def _take_ranks(self, event: dict[str, Any], evidence: Evidence) -> None:
        self._keep_all(self._own, event.get("step_s"), evidence)
        waits, times = event.get("input_s"), event.get("step_s")
        if not isinstance(waits, list) or not isinstance(times, list) or len(self._loader) >= MAX_KEPT:
            return
        pairs = [(to_finite(wait), to_finite(step)) for wait, step in zip(waits, times, strict=False)]
        known = [(wait, step) for wait, step in pairs if wait is not None and step]
        if known:
            self._loader.append((*max(known), evidence))

    def _keep_all(self, by_rank: dict[int, list[float]], told: object, evidence: Evidence) -> None:
        for rank, value in enumerate(told if isinstance(told, list) else ()):
            step_s = to_finite(value)
            if step_s:
                self._keep(by_rank, rank, step_s, replace(evidence, rank=rank))

    def _keep(self, by_rank: dict[int, list[float]], rank: int, step_s: float, evidence: Evidence) -> None:
        times = by_rank.setdefault(rank, []) if len(by_rank) < MAX_KEPT else by_rank.get(rank, [])
        if len(times) < MAX_KEPT:
            times.append(step_s)
        self._first.setdefault(rank, evidence)


def _event(line: bytes) -> dict[str, Any] | None:
    """A line cut short by a kill is passed over."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _rank(event: dict[str, Any]) -> int | None:
    rank = event.get("rank")
    return rank if isinstance(rank, int) else None


def _short(event: dict[str, Any]) -> str:
    """What of an event a person wants to see."""
    names = ("event", "rank", "step", "loss", "step_s", "input_s", "own_s", "first_step")
    return json.dumps({name: event[name] for name in names if name in event})


def _seconds(found: re.Match[str]) -> float:
    return float(found["value"]) * (1e-3 if found["unit"] == "ms" else 1.0)
