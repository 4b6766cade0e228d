"""What NCCL's own lines say beyond one line: which network it took, and which rank the others wait for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from embark.catalog import Catalog, find
from embark.diagnose.finding import Evidence, Seen
from embark.diagnose.rule import rule_named
from embark.diagnose.scan import Listen
from embark.errors import UserError
from embark.spec import RunSpec

MAX_RANKS = 100_000
MAX_HOSTS = 20_000
_NETWORK = re.compile(r"(?:(?P<host>[\w.-]+):\d+:\d+ \[\d+\] )?NCCL INFO "
                      r"(?:Using network (?P<network>[\w ./-]+?)\s*$|NET/(?P<plain>Socket) : Using)")
_WORK = re.compile(r"(?:Rank (?P<rank>\d+)\].*)?last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed "
                   r"(?:NCCL )?work: (?P<completed>-?\d+)")
_TRANSPORTS = {"libfabric": "EFA", "verbs": "InfiniBand or RoCE", "tcpx": "GPUDirect-TCPX", "tcpxo": "GPUDirect-TCPXO"}


class NcclLog:
    """Hears NCCL's lines."""

    def __init__(self) -> None:
        self._sockets: Evidence | None = None
        self._fabric: str = ""
        """A network that is no socket, where one was taken."""
        self._by_host: dict[str, Evidence | None] = {}
        """The line that says a host took sockets; None of one that took another network, first or last."""
        self._work: dict[int, tuple[int, Evidence]] = {}

    @property
    def listeners(self) -> tuple[Listen, ...]:
        return ((b"nccl info using network", self._hear_network), (b"nccl info net/socket : using", self._hear_network),
                (b"last enqueued", self._hear_work))

    def findings(self, spec: RunSpec | None, catalog: Catalog | None) -> Iterator[Seen]:
        """What the lines come to."""
        if self._fabric:
            yield from self._some_without()
        elif self._sockets is not None and spec is not None and catalog is not None:
            yield from self._slow_fabric(self._sockets, spec, catalog)
        yield from self._lagging()

    def _slow_fabric(self, sockets: Evidence, spec: RunSpec, catalog: Catalog) -> Iterator[Seen]:
        """Within one machine, sockets carry nothing."""
        if spec.place.nodes < 2 or not spec.place.machine:
            return
        try:
            machine = find(catalog, spec.place.machine)
        except UserError:
            return
        wanted = _TRANSPORTS.get(machine.fabric.transport)
        if wanted is None:
            return
        asked = machine.fabric.kubernetes_resource
        pod = f"the pod's limits name {asked}: {machine.num_fabric_devices}" if asked and machine.num_fabric_devices \
            else f"the pod has {machine.fabric.title}'s annotations and sidecar"
        cause = (f"NCCL talks over plain TCP sockets between machines, and {machine.name} has {machine.fabric.title}"
                 f"{_speed(machine.fabric_gbit_per_s)}: the run works, and is many times slower than it should be")
        fix = f"see that {pod}, and that the image holds the NCCL plugin for {wanted}; `embark render` writes both"
        yield Seen(rule_named("tcp-instead-of-fabric"), sockets, cause=cause, fix=fix)

    def _some_without(self) -> Iterator[Seen]:
        """A machine that took sockets where another of the same log has a fabric: no spec is needed to see it."""
        # Logs of several runs may lie together: hosts of one run have names that differ in their numbers alone.
        joined = {_stem(host) for host, line in self._by_host.items() if line is None}
        without = {host: line for host, line in self._by_host.items() if line is not None and _stem(host) in joined}
        if not without:
            return
        told = ", ".join(sorted(without)[:8])
        cause = (f"NCCL talks over plain TCP sockets on {told}, and the others take {self._fabric}: all ranks wait for "
                 "the slow one, or hang")
        yield Seen(rule_named("tcp-instead-of-fabric"), min(without.values(), key=lambda line: line.order), cause=cause,
                   num_lines=len(without))

    def _lagging(self) -> Iterator[Seen]:
        """The rank that has enqueued the fewest collectives is the one that did not come."""
        if len(self._work) < 2:
            return
        least = min(count for count, _ in self._work.values())
        most = max(count for count, _ in self._work.values())
        behind = sorted(rank for rank, (count, _) in self._work.items() if count == least)
        if least == most or len(behind) * 2 > len(self._work):
            return
        told = ", ".join(map(str, behind[:8]))
        cause = (f"rank {told} had enqueued {least:,} collectives when the others had {most:,}: it is the one they "
                 "waited for")
        yield Seen(rule_named("rank-behind"), self._work[behind[0]][1], ranks=frozenset(behind), cause=cause)

    def _hear_network(self, text: str, evidence: Evidence) -> None:
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

    def _hear_work(self, text: str, evidence: Evidence) -> None:
        found = _WORK.search(text)
        rank = evidence.rank if found and found["rank"] is None else int(found["rank"]) if found else None
        if found and rank is not None and len(self._work) < MAX_RANKS:
            self._work.setdefault(rank, (int(found["enqueued"]), evidence))


def _stem(host: str) -> str:
    return re.sub(r"\d+", "0", host)


def _speed(gbit_per_s: float | None) -> str:
    return "" if gbit_per_s is None else f" at {gbit_per_s:,.0f} Gb/s"
