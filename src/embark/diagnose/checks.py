"""Findings that several lines or events show together: the network NCCL uses and the rank it waits for, a
straggler, a slow loader, a NaN loss, an ignored checkpoint, a hot GPU, memory that is nearly full."""

import itertools
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from embark.catalog import Machine, load_catalog, machine_of_place
from embark.errors import UserError
from embark.events.events import parse_event, read_blocks, split_lines
from embark.events.monitoring import FULL, HOT_C, INPUT_SHARE, SLOW_RANK, SLOW_STEP
from embark.events.quality import Quality
from embark.formatting import format_step_time, to_finite, to_one_line
from embark.spec import RunSpec
from embark.values import JsonDict
from .scan import Evidence, Listener, RuleMatch, rule_named
from .source import DiagnosedFile

MAX_RANKS = 100_000
MAX_HOSTS = 20_000
_NETWORK = re.compile(r"(?:(?P<host>[\w.-]+):\d+:\d+ \[\d+\] )?NCCL INFO "
                      r"(?:Using network (?P<network>[\w ./-]+?)\s*$|NET/(?P<plain>Socket) : Using)")
_WORK = re.compile(r"(?:Rank (?P<rank>\d+)\].*)?last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed "
                   r"(?:NCCL )?work: (?P<completed>-?\d+)")
_TRANSPORTS = {"libfabric": "EFA", "verbs": "InfiniBand or RoCE", "tcpx": "GPUDirect-TCPX", "tcpxo": "GPUDirect-TCPXO"}


class NcclLog:
    """Collects NCCL's lines."""

    def __init__(self) -> None:
        self._sockets: Evidence | None = None
        self._fabric: str = ""  # The first network that is not sockets.
        self._by_host: dict[str, Evidence | None] = {}
        """The line that shows a host on sockets; None for one on another network, first or last."""
        self._work: dict[int, tuple[int, Evidence]] = {}

    @property
    def listeners(self) -> tuple[Listener, ...]:
        return ((b"nccl info using network", self._read_network), (b"nccl info net/socket : using", self._read_network),
                (b"last enqueued", self._read_work))

    def findings(self, spec: RunSpec | None) -> Iterator[RuleMatch]:
        if self._fabric:
            yield from self._some_without()
        elif self._sockets is not None and spec is not None:
            yield from self._slow_fabric(self._sockets, spec)
        yield from self._lagging()

    def _slow_fabric(self, sockets: Evidence, spec: RunSpec) -> Iterator[RuleMatch]:
        """Yield a match if NCCL uses sockets although the spec's machine has a fabric. Runs on one machine do not
        count: they send no traffic over sockets."""
        machine = machine_of(spec) if spec.place.max_nodes > 1 else None
        transport = _TRANSPORTS.get(machine.fabric.transport) if machine else None
        if machine is None or transport is None:
            return
        name = machine.fabric.kubernetes_resource
        pod = f"the pod's limits name {name}: {machine.num_fabric_devices}" if name and machine.num_fabric_devices \
            else f"the pod has {machine.fabric.title}'s annotations and sidecar"
        speed = "" if machine.fabric_gbit_per_s is None else f" at {machine.fabric_gbit_per_s:,.0f} Gb/s"
        cause = (f"NCCL uses plain TCP sockets between machines, although {machine.name} has {machine.fabric.title}"
                 f"{speed}: the run works, but is many times slower than it should be")
        fix = f"check that {pod}, and that the image has the NCCL plugin for {transport}; `embark render` writes both"
        yield RuleMatch(rule_named("tcp-instead-of-fabric"), sockets, cause=cause, fix=fix)

    def _some_without(self) -> Iterator[RuleMatch]:
        """Yield a match if one machine uses sockets while another in the same log uses a fabric. This needs no spec."""
        # Logs of several runs may lie together: hosts of one run have names that differ in their numbers alone.
        stems = {host: re.sub(r"\d+", "0", host) for host in self._by_host}
        joined = {stems[host] for host, line in self._by_host.items() if line is None}
        without = {host: line for host, line in self._by_host.items() if line is not None and stems[host] in joined}
        if not without:
            return
        hosts = ", ".join(sorted(without)[:8])
        cause = (f"NCCL uses plain TCP sockets on {hosts}, and {self._fabric} on the others: all ranks wait for the "
                 "slow one, or hang")
        first = min(without.values(), key=lambda line: line.order)
        yield RuleMatch(rule_named("tcp-instead-of-fabric"), first, num_lines=len(without), cause=cause)

    def _lagging(self) -> Iterator[RuleMatch]:
        """Yield a match for the rank that has enqueued the fewest collectives: the others wait for it."""
        counts = [count for count, _ in self._work.values()] or [0]
        least, most = min(counts), max(counts)
        behind = sorted(rank for rank, (count, _) in self._work.items() if count == least)
        if least == most or len(behind) * 2 > len(self._work):
            return
        ranks = ", ".join(map(str, behind[:8]))
        cause = (f"rank {ranks} had enqueued {least:,} collectives when the others had {most:,}: the others waited "
                 "for it")
        yield RuleMatch(rule_named("rank-behind"), self._work[behind[0]][1], ranks=frozenset(behind), cause=cause)

    def _read_network(self, text: str, evidence: Evidence) -> None:
        found = _NETWORK.search(text)
        if not found:
            return
        network, host = found["network"] or found["plain"], found["host"] or ""
        if network == "Socket":
            self._sockets = self._sockets or evidence
        else:
            self._fabric = self._fabric or network
        if host and (host in self._by_host or len(self._by_host) < MAX_HOSTS):
            self._by_host[host] = self._by_host.get(host, evidence) if network == "Socket" else None

    def _read_work(self, text: str, evidence: Evidence) -> None:
        found = _WORK.search(text)
        if found is None or len(self._work) >= MAX_RANKS:
            return
        rank = evidence.rank if found["rank"] is None else int(found["rank"])
        if rank is not None:
            self._work.setdefault(rank, (int(found["enqueued"]), evidence))


MIN_SAMPLES = 3
MAX_SAMPLES = 4096
GIB = 1024.0**3

_VALUE = r"\s*[=:]?\s*(?P<value>\d+(?:\.\d+)?)\s*(?P<unit>ms|s)?(?![\w.])"
_STEP_S = re.compile(rf"(?i)\bstep(?:[_ ]?time|_s)\b{_VALUE}")
_LOADER_S = re.compile(rf"(?i)\b(?:data|loader|dataloader|input)(?:[_ ]?(?:wait|time))(?:_s)?\b{_VALUE}")
_QUOTED_KEYS = ("event", "rank", "step", "loss", "log_loss", "auc", "normalized_entropy", "calibration",
                "step_s", "input_s", "own_s", "first_step")


class StepTimes:
    """Collects lines and events that carry step times or machine readings."""

    def __init__(self) -> None:
        self._by_rank: dict[int, list[float]] = {}
        self._own: dict[int, list[float]] = {}
        """Each rank's time, less its wait for the others, as rank 0 gathered it."""
        self._profiled: dict[int, list[float]] = {}
        """Each rank's own time from profiled steps, which also show the waits within a step."""
        self._loader: list[tuple[float, float, Evidence]] = []
        self._first: dict[int, Evidence] = {}
        self._predicted: JsonDict = {}
        self._steps: list[tuple[float, Evidence]] = []
        self._hot: dict[tuple[str, str], list[tuple[float, Evidence]]] = {}
        """The first readings that are too high, by machine and GPU."""
        self._memory: dict[str, tuple[float, float, Evidence]] = {}
        """The last reading of each machine: bytes in use, bytes in all."""
        self._found: list[RuleMatch] = []
        self._quality = Quality()
        self._last_figures: Evidence | None = None

    @property
    def listeners(self) -> tuple[Listener, ...]:
        return tuple((needle, self._read_line) for needle in (b"step_s", b"step time", b"step_time"))

    def read_events(self, source: DiagnosedFile, order: int) -> Iterator[tuple[str, Evidence]]:
        """Read a run's events; yield the texts of errors among them, for rules to look at."""
        saved = last = 0
        is_nan = False
        with source.open() as file:
            for number, line in enumerate(split_lines(read_blocks(file)), 1):
                event = parse_event(line)
                if event is None:
                    continue
                self._quality.add(event)
                values = {"event": event.kind, "rank": event.rank, **event.values}
                text = json.dumps({name: values[name] for name in _QUOTED_KEYS if name in values})
                evidence = Evidence(source.name, number, text, (order, number), rank=event.rank)
                if event.kind in ("eval", "step", "traffic") or self._last_figures is None:
                    self._last_figures = evidence
                step = int(to_finite(values.get("step")) or 0)
                if event.kind == "start":
                    first = int(to_finite(values.get("first_step")) or 0)
                    if saved and first == 0 and last >= saved:
                        self._found.append(RuleMatch(rule_named("checkpoint-ignored"), evidence,
                                                     values={"saved": f"{saved:,}"}))
                    last = first
                elif event.kind == "step":
                    last = step or last
                    self._read_step(values, evidence)
                    if "loss" in values and values["loss"] is None and not is_nan:
                        is_nan = True
                        self._found.append(RuleMatch(rule_named("loss-not-a-number"), evidence))
                elif event.kind == "ranks":
                    self._read_ranks(values, evidence)
                elif event.kind == "phases":
                    self._add_all(self._profiled, values.get("own_s"), evidence)
                elif event.kind == "save":
                    saved = step
                elif event.kind == "predict":
                    self._predicted = values
                elif event.kind == "error" and isinstance(values.get("text"), str):
                    text = f"error: {' '.join(values['text'].split())}"  # The command that wrote it prints it so.
                    yield text, replace(evidence, text=text)

    def findings(self) -> Iterator[RuleMatch]:
        yield from self._found
        if self._last_figures is not None:
            for one in self._quality.findings():
                yield RuleMatch(rule_named(one.name), self._last_figures, cause=one.cause, command=one.command)
        # A step's complete time is the same on all ranks: the fast wait for the slow.
        yield from itertools.islice(itertools.chain(self._slow_rank(self._profiled),
                                                    self._slow_rank(self._own or self._by_rank)), 1)
        yield from self._slow_loader()
        yield from self._slower_than_planned()
        yield from self._hot_gpu()
        yield from self._full_memory()

    def _slow_rank(self, by_rank: Mapping[int, list[float]]) -> Iterator[RuleMatch]:
        medians = {rank: statistics.median(times) for rank, times in by_rank.items() if len(times) >= MIN_SAMPLES}
        usual_s = statistics.median(medians.values()) if len(medians) > 2 else math.inf
        slow = sorted(rank for rank, time_s in medians.items() if time_s > SLOW_RANK * usual_s)
        if slow and len(slow) <= len(medians) // 3:
            worst = max(slow, key=lambda rank: medians[rank])
            cause = (f"rank {worst} needs {format_step_time(medians[worst])} for what the others do in "
                     f"{format_step_time(usual_s)}: all ranks wait for it in every step")
            yield RuleMatch(rule_named("straggler"), self._first[worst], ranks=frozenset(slow), cause=cause)

    def _slow_loader(self) -> Iterator[RuleMatch]:
        if len(self._loader) < MIN_SAMPLES:
            return
        share = statistics.median(wait_s / step_s for wait_s, step_s, _ in self._loader)
        if share >= INPUT_SHARE:
            cause = f"{share:.0%} of a step is spent waiting for data: the loader, not the device, sets the pace"
            yield RuleMatch(rule_named("slow-loader"), self._loader[0][2], cause=cause)

    def _slower_than_planned(self) -> Iterator[RuleMatch]:
        planned_s = to_finite(self._predicted.get("step_s"))
        if planned_s is None or not self._predicted.get("is_calibrated") or len(self._steps) < MIN_SAMPLES:
            return
        usual_s = statistics.median(time_s for time_s, _ in self._steps[1:])
        if usual_s >= SLOW_STEP * planned_s:
            cause = (f"a step takes {format_step_time(usual_s)}; the plan predicted {format_step_time(planned_s)} on "
                     "this kind of machine: the loader, another process or the network slows it down")
            yield RuleMatch(rule_named("slower-than-planned"), self._steps[-1][1], cause=cause)

    def _hot_gpu(self) -> Iterator[RuleMatch]:
        hot = {where: readings for where, readings in self._hot.items() if len(readings) >= MIN_SAMPLES}
        if hot:
            (host, gpu), readings = max(hot.items(), key=lambda item: max(degrees for degrees, _ in item[1]))
            cause = (f"GPU {gpu} of {host} is at {max(degrees for degrees, _ in readings):.0f} °C and throttles: "
                     "every rank waits for it")
            yield RuleMatch(rule_named("gpu-throttled"), readings[0][1], len(readings), cause=cause)

    def _full_memory(self) -> Iterator[RuleMatch]:
        full = {host: last for host, last in self._memory.items() if last[0] >= FULL * last[1]}
        if full:
            host, (used, total, evidence) = max(full.items(), key=lambda item: item[1][0] / item[1][1])
            cause = (f"{host} uses {used / GIB:,.1f} of its {total / GIB:,.1f} GiB at the last reading: when memory "
                     "is full the kernel kills a rank, and the run ends without a message")
            yield RuleMatch(rule_named("host-memory-nearly-full"), evidence, len(full), cause=cause)

    def _read_step(self, event: JsonDict, evidence: Evidence) -> None:
        step_s = to_finite(event.get("step_s"))
        if step_s is None or step_s <= 0:
            return
        self._add(self._by_rank, evidence.rank or 0, step_s, evidence)
        if len(self._steps) < MAX_SAMPLES:
            self._steps.append((step_s, evidence))
        self._add_wait(to_finite(event.get("input_s")), step_s, evidence)

    def _read_line(self, text: str, evidence: Evidence) -> None:
        step_s = _seconds(_STEP_S.search(text))
        if not step_s:
            return
        if evidence.rank is not None:
            self._add(self._by_rank, evidence.rank, step_s, evidence)
        self._add_wait(_seconds(_LOADER_S.search(text)), step_s, evidence)

    def _read_ranks(self, event: JsonDict, evidence: Evidence) -> None:
        self._add_all(self._own, event.get("step_s"), evidence)
        pairs = [(to_finite(wait), to_finite(step)) for wait, step in zip(
            _list(event.get("input_s")), _list(event.get("step_s")), strict=False)]
        if known := [(wait, step) for wait, step in pairs if wait is not None and step]:
            self._add_wait(*max(known), evidence)
        for system in _list(event.get("systems")):
            self._read_system(system, evidence)

    def _read_system(self, system: object, evidence: Evidence) -> None:
        if not isinstance(system, dict) or not isinstance(system.get("host"), str):
            return
        host = to_one_line(system["host"])
        used, total = to_finite(system.get("host_used_bytes")), to_finite(system.get("host_bytes"))
        if used is not None and total and (host in self._memory or len(self._memory) < MAX_SAMPLES):
            self._memory[host] = used, total, evidence
        for gpu in _list(system.get("gpus")):
            degrees = to_finite(gpu.get("temperature_c")) if isinstance(gpu, dict) else None
            if degrees is None or degrees < HOT_C or len(self._hot) >= MAX_SAMPLES:
                continue
            readings = self._hot.setdefault((host, str(gpu.get("index", "?"))), [])
            if len(readings) < MAX_SAMPLES:
                readings.append((degrees, evidence))

    def _add_wait(self, wait_s: float | None, step_s: float, evidence: Evidence) -> None:
        if wait_s is not None and len(self._loader) < MAX_SAMPLES:
            self._loader.append((wait_s, step_s, evidence))

    def _add_all(self, by_rank: dict[int, list[float]], values: object, evidence: Evidence) -> None:
        for rank, value in enumerate(_list(values)):
            if step_s := to_finite(value):
                self._add(by_rank, rank, step_s, replace(evidence, rank=rank))

    def _add(self, by_rank: dict[int, list[float]], rank: int, step_s: float, evidence: Evidence) -> None:
        times = by_rank.setdefault(rank, []) if len(by_rank) < MAX_SAMPLES else by_rank.get(rank, [])
        if len(times) < MAX_SAMPLES:
            times.append(step_s)
        self._first.setdefault(rank, evidence)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _seconds(found: re.Match[str] | None) -> float | None:
    return float(found["value"]) * (1e-3 if found["unit"] == "ms" else 1.0) if found else None


def machine_of(spec: RunSpec) -> Machine | None:
    """Return the machine that the spec names; None if it names none, or one that the catalog does not have."""
    try:
        return machine_of_place(load_catalog(), spec.place) if spec.place.machine else None
    except UserError:
        return None
