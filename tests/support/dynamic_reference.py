"""Dynamic tables in plain Python, an id at a time: what every implementation is compared with."""

from dataclasses import dataclass, field

from embark.data.dynamic_ids import CHANCE, COUNTER, MAP, NO_ID, SIGNED_STEP, signed, table_key
from embark.features.hashing import FIRST, SECOND
from embark.spec.model import BUCKET_COUNTERS, BUCKET_SLOTS, Table, num_buckets

MASK = (1 << 64) - 1


def hash_of(number: int, key: int) -> int:
    bits = (number ^ key) & MASK
    bits = ((bits ^ (bits >> 30)) * FIRST) & MASK
    bits = ((bits ^ (bits >> 27)) * SECOND) & MASK
    return signed(bits ^ (bits >> 31))


@dataclass
class Row:
    id: int
    seen: int
    count: int
    born: int


@dataclass
class ReferenceTable:
    """One table."""

    spec: Table
    seed: int
    rows: dict[int, Row] = field(default_factory=dict)  # By row, from 1.
    row_of: dict[int, int] = field(default_factory=dict)
    counters: dict[int, int] = field(default_factory=dict)
    statistics: dict[str, int] = field(default_factory=lambda: dict.fromkeys(
        ("lookups", "hits", "defaults", "admissions", "evictions"), 0))

    def key(self, purpose: int) -> int:
        return table_key(self.seed, self.spec.name, purpose)

    def bucket(self, number: int) -> int:
        return ((hash_of(number, self.key(MAP)) + 2**63) >> 32) * num_buckets(self.spec.capacity) >> 32

    def counter(self, number: int) -> int:
        which = hash_of(hash_of(number, self.key(MAP)), self.key(COUNTER)) & (BUCKET_COUNTERS - 1)
        return self.bucket(number) * BUCKET_COUNTERS + which

    def step(self, ids: list[int], step: int) -> tuple[list[int], list[tuple[int, int]]]:
        """The row of each id, and the new rows with their ids."""
        spec, ids = self.spec, [one for one in ids if one != NO_ID]
        if step and step % spec.half_life == 0:
            for row in self.rows.values():
                row.count >>= 1
            self.counters = {which: count >> 1 for which, count in self.counters.items()}
        self.statistics["lookups"] += len(ids)
        missing = []
        for one in ids:
            if one in self.row_of:
                self.statistics["hits"] += 1
                row = self.rows[self.row_of[one]]
                row.seen, row.count = step, row.count + 1
            else:
                missing.append(one)
        missing = missing[: spec.max_new]
        candidates = sorted(set(missing), key=lambda one: hash_of(one, self.key(MAP)))
        for one in candidates:
            which = self.counter(one)
            self.counters[which] = self.counters.get(which, 0) + missing.count(one)
        admitted = [one for one in candidates if self.is_admitted(one, step)]
        new = []
        for one in admitted:
            if row := self.spare_row(self.bucket(one), step):
                if row in self.rows:
                    del self.row_of[self.rows[row].id]
                    self.statistics["evictions"] += 1
                self.statistics["admissions"] += 1
                self.rows[row], self.row_of[one] = Row(one, step, missing.count(one), step), row
                self.counters[self.counter(one)] = 0
                new.append((row, one))
        found = [self.row_of.get(one, 0) for one in ids]
        self.statistics["defaults"] += found.count(0)
        return found, new

    def is_admitted(self, one: int, step: int) -> bool:
        if self.spec.admit == "count":
            return self.counters[self.counter(one)] >= self.spec.admit_count
        if self.spec.admit == "probability":
            bits = hash_of(hash_of(one, self.key(MAP)) ^ signed(step * SIGNED_STEP & MASK), self.key(CHANCE))
            return (bits + 2**63) >> 32 < self.spec.admit_probability * 2**32
        return True

    def spare_row(self, bucket: int, step: int) -> int:
        """0 where there is none."""
        rows = range(1 + bucket * BUCKET_SLOTS, 1 + (bucket + 1) * BUCKET_SLOTS)
        if free := [row for row in rows if row not in self.rows]:
            return free[0]
        score = {"lru": lambda row: row.seen, "lfu": lambda row: (row.count, row.seen), "age": lambda row: row.born}
        idle = [row for row in rows if self.rows[row].seen < step]
        return min(idle, key=lambda row: (score[self.spec.evict](self.rows[row]), row), default=0)
