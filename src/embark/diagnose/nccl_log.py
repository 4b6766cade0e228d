"""What NCCL's lines show together: which network it uses, and which rank the others wait for."""

import re
from collections.abc import Iterator

from embark.diagnose.finding import Evidence, RuleMatch
from embark.diagnose.memory_advice import machine_of
from embark.diagnose.rule import rule_named
from embark.diagnose.scan import Listener
from embark.spec import RunSpec

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
        self._fabric: str = ""
        """The first network that is not sockets."""
        self._by_host: dict[str, Evidence | None] = {}
        """The line that shows a host on sockets; None for one on another network, first or last."""
        self._work: dict[int, tuple[int, Evidence]] = {}

    @property
    def listeners(self) -> tuple[Listener, ...]:
        return ((b"nccl info using network", self._read_network), (b"nccl info net/socket : using", self._read_network),
                (b"last enqueued", self._read_work))

    def findings(self, spec: RunSpec | None) -> Iterator[RuleMatch]:
        """What the lines show."""
        if self._fabric:
            yield from self._some_without()
        elif self._sockets is not None and spec is not None:
            yield from self._slow_fabric(self._sockets, spec)
        yield from self._lagging()

    def _slow_fabric(self, sockets: Evidence, spec: RunSpec) -> Iterator[RuleMatch]:
        """Within one machine, no traffic goes over sockets."""
        machine = machine_of(spec) if spec.place.nodes > 1 else None
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
        """A machine on sockets where another of the same log has a fabric: this needs no spec."""
        # Logs of several runs may lie together: hosts of one run have names that differ in their numbers alone.
        joined = {_stem(host) for host, line in self._by_host.items() if line is None}
        without = {host: line for host, line in self._by_host.items() if line is not None and _stem(host) in joined}
        if not without:
            return
        hosts = ", ".join(sorted(without)[:8])
        cause = (f"NCCL uses plain TCP sockets on {hosts}, and {self._fabric} on the others: all ranks wait for the "
                 "slow one, or hang")
        first = min(without.values(), key=lambda line: line.order)
        yield RuleMatch(rule_named("tcp-instead-of-fabric"), first, num_lines=len(without), cause=cause)

    def _lagging(self) -> Iterator[RuleMatch]:
        """The rank that has enqueued the fewest collectives is the one that did not come."""
        if len(self._work) < 2:
            return
        least = min(count for count, _ in self._work.values())
        most = max(count for count, _ in self._work.values())
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
        rank = evidence.rank if found and found["rank"] is None else int(found["rank"]) if found else None
        if found and rank is not None and len(self._work) < MAX_RANKS:
            self._work.setdefault(rank, (int(found["enqueued"]), evidence))


def _stem(host: str) -> str:
    return re.sub(r"\d+", "0", host)
