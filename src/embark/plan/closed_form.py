"""Where the tables go, without torch and in milliseconds: TorchRec's way of searching, over sums instead of shards."""

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from embark.model.placement import Cluster, Placement, Shard, TooLarge, all_table_bytes
from embark.model.sharding import (
    MAX_GRID,
    NUM_STRIDES,
    Option,
    Options,
    allowed_shardings,
    num_groups,
    options_of,
    ranks_per_group,
    search_rounds,
    stride_ends,
    table_capacity,
    tables_alike,
)
from embark.spec import RunSpec, StoredTable
from embark.values import frozen

FASTER = 1 - 1e-9
"""A smaller gain is a rounding error. Of equal placements the first is kept, which has the fewest bytes on the host."""

ROUNDING = 1 + 1e-9  # Sums in another order come out a little different.

ON_ALL_RANKS = ("row_wise", "data_parallel")
Choice = tuple[int, ...]  # The chosen option of each table.


def closed_form(spec: RunSpec, cluster: Cluster, known: Options | None = None) -> Placement:
    """Return where the trainer puts the tables.

    The cluster's own rates do not count, since the trainer's planner does not know them. `known` is as `options_of` has
    it.
    """
    cluster = replace(cluster, intra_gbyte_per_s=0.0, inter_gbyte_per_s=0.0, fabric="")
    tables, (kinds, numbers) = spec.model.stored_tables(), tables_alike(spec.model)
    for search in search_rounds(spec, cluster):
        of_kind = [
            options_of(kind, search.shardings[kind.name], spec, cluster, may_spill=search.may_spill, known=known)
            for kind in kinds]
        if not _could_fit(of_kind, numbers, spec, cluster):
            continue
        options = [of_kind[number] for number in numbers]
        found = _best(_proposals(options, is_long=search.is_long), options, spec, cluster)
        if found is not None:
            return _placement(tables, found, cluster)
    raise TooLarge(_why(spec, cluster))


def _could_fit(of_kind: list[list[Option]], numbers: Sequence[int], spec: RunSpec, cluster: Cluster) -> bool:
    """Return whether the options that take the least memory fit all together, though perhaps not part by part."""
    counts = Counter(numbers)
    device, host = table_capacity(spec, cluster)
    return all(
        sum(counts[number] * min(map(size, of)) for number, of in enumerate(of_kind)) <= room * cluster.num_ranks
        for size, room in ((attrgetter("all_device_bytes"), device * ROUNDING),
                           (attrgetter("all_host_bytes"), host * ROUNDING)))


class CachedPlanner:
    """A planner for one spec on many clusters.

    The closed form looks neither at the links' rates nor, where the devices hold all tables, at the hosts' memory; what
    a table takes, cut in some way, does not depend on the memory.
    """

    def __init__(self) -> None:
        self._on_devices: dict[Cluster, Placement] = {}
        self._with_hosts: dict[Cluster, Placement] = {}
        self._options: defaultdict[Cluster, Options] = defaultdict(dict)

    def __call__(self, spec: RunSpec, cluster: Cluster) -> Placement:
        cluster = replace(cluster, intra_gbyte_per_s=0.0, inter_gbyte_per_s=0.0, fabric="")
        device_only = replace(cluster, host_bytes=0.0)
        known = self._on_devices.get(device_only) or self._with_hosts.get(cluster)
        if known is None:
            known = closed_form(spec, cluster, self._options[replace(device_only, device_bytes=0.0)])
            if known.is_on_host or cluster.device == "cpu":
                self._with_hosts[cluster] = known
            else:
                self._on_devices[device_only] = known
        return known


@frozen
class _Found:
    options: list[Option]
    ranks: list[Sequence[int]]  # The rank of each part of each table.
    step_s: float  # Time of the busiest rank.


def _best(proposals: Iterator[Choice], options: list[list[Option]], spec: RunSpec, cluster: Cluster) -> _Found | None:
    best: _Found | None = None
    seen: set[Choice] = set()
    device, host = table_capacity(spec, cluster)
    room = device * cluster.num_ranks * ROUNDING, host * cluster.num_ranks * ROUNDING
    for choice in proposals:
        if choice in seen:
            continue
        seen.add(choice)
        chosen = [of[index] for of, index in zip(options, choice, strict=True)]
        below_s = math.inf if best is None else best.step_s * FASTER
        if _may_win(chosen, room, cluster.num_ranks, below_s):
            best = _Packing(spec, cluster, below_s=below_s).place(chosen) or best
    return best


def _may_win(options: list[Option], room: tuple[float, float], num_ranks: int, below_s: float) -> bool:
    """Return whether all of it together fits, and an equal share of it is fast enough.

    Most tries end here, in a fraction of the time that packing them takes.
    """
    device = host = all_s = 0.0
    for option in options:
        device += option.all_device_bytes
        host += option.all_host_bytes
        all_s += option.all_s
    return device <= room[0] and host <= room[1] and all_s <= below_s * num_ranks * ROUNDING


def _proposals(options: list[list[Option]], *, is_long: bool) -> Iterator[Choice]:
    if is_long:
        yield from _greedy(options, by_sum=False, num_strides=NUM_STRIDES["part"])
        yield from _greedy(options, by_sum=True, num_strides=NUM_STRIDES["sum"])
        return
    if math.prod(len(of) for of in options) <= MAX_GRID:
        yield from itertools.product(*(_ordered(of, by_sum=False) for of in options))
    yield from _greedy(options, by_sum=False)
    yield from _greedy(options, by_sum=True)
    for kind in {option.sharding: None for of in options for option in of}:
        orders = [_ordered(of, by_sum=False) for of in options]
        # Not every table has a way of each kind: a sequence's rows stay whole.
        yield tuple(next((i for i in order if of[i].sharding == kind), order[0])
                    for of, order in zip(options, orders, strict=True))


def _greedy(options: list[list[Option]], *, by_sum: bool, num_strides: int = 0) -> Iterator[Choice]:
    """Try each table's fastest way first, then again and again the next way of the table that takes the most memory."""
    orders = [_ordered(of, by_sum=by_sum) for of in options]
    current = [0] * len(options)
    heap: list[tuple[float, float, float, float, int]] = []

    def push(table: int) -> None:
        if current[table] + 1 < len(orders[table]):
            held = options[table][orders[table][current[table]]]
            heapq.heappush(heap, (-held.device_bytes, -held.all_device_bytes, -held.host_bytes, -held.all_host_bytes,
                                  table))

    for table in range(len(options)):
        push(table)
    yield tuple(order[0] for order in orders)
    num_steps = sum(len(of) - 1 for of in options)
    done = 0
    for end in stride_ends(num_steps, num_strides) if num_strides else range(1, num_steps + 1):
        while done < end:
            table = heapq.heappop(heap)[-1]
            current[table] += 1
            done += 1
            push(table)
        yield tuple(order[index] for order, index in zip(orders, current, strict=True))


def _ordered(options: list[Option], *, by_sum: bool) -> list[int]:
    return sorted(range(len(options)), key=lambda i: options[i].all_s if by_sum else options[i].part_s)


class _Packing:
    """One attempt to place all tables: the memory that each rank has left, and the step time it has reached."""

    def __init__(self, spec: RunSpec, cluster: Cluster, *, below_s: float) -> None:
        self.below_s = below_s  # Packing stops once the step takes this long.
        self.longest_s = 0.0
        self.num_ranks = cluster.num_ranks
        self.group = ranks_per_group(cluster)
        device, host = table_capacity(spec, cluster)
        self.device_left = [device] * self.num_ranks
        self.host_left = [host] * self.num_ranks
        self.step_s = [0.0] * self.num_ranks
        self.group_s = [0.0] * (self.num_ranks // self.group)
        self.queue: list[tuple[float, int, int]] = []
        """A heap of ranks by step time; outdated entries are skipped."""
        self.is_queue_old = True

    def place(self, options: list[Option]) -> _Found | None:
        """Put tables on all ranks first, then the others by size, each on the ranks with the least to do that can hold
        it."""
        ranks: list[Sequence[int]] = [()] * len(options)
        on_all = [i for i, option in enumerate(options) if option.sharding in ON_ALL_RANKS]
        if not self._on_all_ranks([options[i] for i in on_all]):
            return None
        for index in on_all:
            ranks[index] = range(options[index].num_parts)
        others = [i for i, option in enumerate(options) if option.sharding not in ON_ALL_RANKS]
        others.sort(key=lambda i: (-options[i].all_device_bytes, -options[i].all_host_bytes))
        for index in others:
            option = options[index]
            place = {"table_row_wise": self._over_hosts, "grid_shard": self._over_hosts,
                     "table_column_wise": self._in_a_group}.get(option.sharding, self._anywhere)
            found = place(option)
            if found is None or self.longest_s >= self.below_s:
                return None
            ranks[index] = found
        return _Found(options, ranks, self.longest_s)

    def _on_all_ranks(self, options: list[Option]) -> bool:
        # Part k of each lies on rank k: sums of differences, since ranks times tables would be too many.
        device, host = [0.0] * (self.num_ranks + 1), [0.0] * (self.num_ranks + 1)
        for option in options:
            for sums, part, last in ((device, option.device_bytes, option.last_device_bytes),
                                     (host, option.host_bytes, option.last_host_bytes)):
                sums[0] += part
                sums[option.num_parts - 1] += last - part
                sums[option.num_parts] -= last
        each_s = sum(option.part_s for option in options)
        for rank, (on_device, on_host) in enumerate(
            zip(itertools.accumulate(device[:-1]), itertools.accumulate(host[:-1]), strict=True)
        ):
            self.device_left[rank] -= on_device
            self.host_left[rank] -= on_host
            self.step_s[rank] += each_s
        self.group_s = [seconds + each_s * self.group for seconds in self.group_s]
        self.longest_s = each_s
        return min(self.device_left) >= 0 and min(self.host_left) >= 0 and each_s < self.below_s

    def _anywhere(self, option: Option) -> list[int] | None:
        if self.is_queue_old:
            self.queue = sorted((step_s, rank % self.group, rank) for rank, step_s in enumerate(self.step_s))
            self.is_queue_old = False
        ranks: list[int] = []
        for _ in range(option.num_parts):
            passed: list[tuple[float, int, int]] = []
            chosen = -1
            while self.queue and chosen < 0:
                entry = heapq.heappop(self.queue)
                if entry[0] != self.step_s[entry[2]]:
                    continue
                if self._fits(option, entry[2]):
                    chosen = entry[2]
                else:
                    passed.append(entry)
            for entry in passed:
                heapq.heappush(self.queue, entry)
            if chosen < 0:
                return None
            self._take(chosen, option)
            heapq.heappush(self.queue, (self.step_s[chosen], chosen % self.group, chosen))
            ranks.append(chosen)
        return ranks

    def _over_hosts(self, option: Option) -> list[int] | None:
        """Put each block of columns on the ranks of a host, the least busy hosts first; if blocks outnumber hosts, in
        turn."""
        hosts = sorted(range(len(self.group_s)), key=self.group_s.__getitem__)
        num = option.num_blocks
        for first in range(max(1, len(hosts) - num + 1)):
            chosen = [hosts[(first + i) % len(hosts)] for i in range(num)]
            if self._fits_hosts(option, chosen):
                return [rank for host in chosen for rank in self._take_host(option, host)]
        return None

    def _fits_hosts(self, option: Option, hosts: list[int]) -> bool:
        for host, num_blocks in Counter(hosts).items():
            first, last = host * self.group, host * self.group + option.num_parts - 1
            for left, part, last_part in ((self.device_left, option.device_bytes, option.last_device_bytes),
                                          (self.host_left, option.host_bytes, option.last_host_bytes)):
                if num_blocks * part > min(left[first:last], default=math.inf) or num_blocks * last_part > left[last]:
                    return False
        return True

    def _take_host(self, option: Option, host: int) -> Sequence[int]:
        members = range(host * self.group, (host + 1) * self.group)
        used = members[: option.num_parts]
        for rank in used[:-1]:
            self.device_left[rank] -= option.device_bytes
            self.host_left[rank] -= option.host_bytes
        self.device_left[used[-1]] -= option.last_device_bytes
        self.host_left[used[-1]] -= option.last_host_bytes
        for rank in members:  # one without rows waits for the others all the same
            self._add_time(rank, option.part_s)
        self.is_queue_old = True
        return used

    def _in_a_group(self, option: Option) -> list[int] | None:
        for group in sorted(range(len(self.group_s)), key=self.group_s.__getitem__):
            found = self._in_group(group, option)
            if found is not None:
                return found
        return None

    def _in_group(self, group: int, option: Option) -> list[int] | None:
        members = range(group * self.group, (group + 1) * self.group)
        before = [(r, self.device_left[r], self.host_left[r], self.step_s[r]) for r in members]
        group_s, longest_s = self.group_s[group], self.longest_s
        ranks: list[int] = []
        for _ in range(option.num_parts):
            fitting = [(self.step_s[r], r) for r in members if self._fits(option, r)]
            if not fitting:
                for rank, device, host, step_s in before:
                    self.device_left[rank], self.host_left[rank], self.step_s[rank] = device, host, step_s
                self.group_s[group], self.longest_s = group_s, longest_s
                return None
            ranks.append(min(fitting)[1])
            self._take(ranks[-1], option)
        self.is_queue_old = True
        return ranks

    def _fits(self, option: Option, rank: int) -> bool:
        return option.device_bytes <= self.device_left[rank] and option.host_bytes <= self.host_left[rank]

    def _take(self, rank: int, option: Option) -> None:
        self.device_left[rank] -= option.device_bytes
        self.host_left[rank] -= option.host_bytes
        self._add_time(rank, option.part_s)

    def _add_time(self, rank: int, part_s: float) -> None:
        step_s = self.step_s[rank] = self.step_s[rank] + part_s
        if step_s > self.longest_s:
            self.longest_s = step_s
        group = rank // self.group
        if group < len(self.group_s):
            self.group_s[group] += part_s


def _placement(tables: Sequence[StoredTable], found: _Found, cluster: Cluster) -> Placement:
    shards: list[Shard] = []
    for table, option, ranks in zip(tables, found.options, found.ranks, strict=True):
        rows = ([option.num_rows] * (option.num_parts - 1) + [option.last_rows]) * option.num_blocks
        shards += [Shard(table.name, rank, num_rows, option.num_columns, option.memory)
                   for rank, num_rows in zip(ranks, rows, strict=True)]
    shardings = {table.name: option.sharding for table, option in zip(tables, found.options, strict=True)}
    return Placement(cluster.num_ranks, tuple(shards), shardings, "closed form")


def _why(spec: RunSpec, cluster: Cluster) -> str:
    device_room, host_room = (part * cluster.num_ranks for part in table_capacity(spec, cluster))
    kinds, numbers = tables_alike(spec.model)
    of_kind = [options_of(kind, allowed_shardings(spec, kind, cluster.num_ranks, cluster.device, num_groups(cluster)),
                          spec, cluster, may_spill=cluster.device == "cuda") for kind in kinds]

    def sum_of(least: Callable[[list[Option]], float]) -> float:
        each = [least(of) for of in of_kind]
        return sum(each[number] for number in numbers)

    of_ranks = f"the {cluster.num_ranks:,} ranks'" if cluster.num_ranks > 1 else "one rank's"
    tables = f"tables of {_gib(all_table_bytes(spec))} GiB with their optimizer's state"
    if cluster.device == "cpu":
        need = sum_of(lambda of: min(o.all_host_bytes for o in of))
        return f"{tables} need {_gib(need)} GiB with the buffers of a batch, of {of_ranks} {_gib(host_room)} GiB"
    need = sum_of(lambda of: min(o.all_device_bytes for o in of if o.memory == "device"))
    why = (f"{tables} need {_gib(need)} GiB of device memory with the buffers of a batch, and {of_ranks} devices "
           f"have {_gib(device_room)} GiB for them ({spec.train.memory_reserve:.0%} is reserved)")
    if need <= device_room:
        why += ", split into parts too small for the tables"
    if cluster.device == "cuda":
        cached = sum_of(lambda of: min(o.all_device_bytes for o in of if o.memory == of[-1].memory))
        on_host = sum_of(lambda of: min(o.all_host_bytes for o in of if o.memory == of[-1].memory))
        why += (f"; with all rows in host memory, {_gib(on_host)} of {_gib(host_room)} GiB there and "
                f"{_gib(cached)} GiB for caches and buffers on the devices")
    return why


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f}"
