"""Random streams of ids through the map of dynamic tables, on any device and number of ranks, beside the reference."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from typing import Any

import numpy as np
import torch
from dynamic_reference import ReferenceTable

from embark.data.dynamic_ids import FREE, NO_ID, table_key, unmixed
from embark.spec.model import ModelSpec, Table
from embark.trainers.torch.dynamic.batch_ids import IdLayout, NewRows
from embark.trainers.torch.dynamic.id_map import IdMap

SEED = 3
_CODE = """
import numpy as np


class Rows:
    def __init__(self, data, model):
        self.num_train_samples, self.num_eval_samples = data.num_train_samples, data.num_eval_samples
        self.model = model

    def rows(self, split, positions):
        ids = {}
        for table in self.model.table_list():
            some = positions[:, None] * np.array([3, 5, 7])[: table.multi_hot]
            ids[table.name] = (some % 1500 - 700) * (1 << 52) if table.is_dynamic else some % table.rows
        return positions % 3 == 0, np.zeros((len(positions), self.model.num_dense)), ids
"""
WIDE_IDS = ("data.kind=wide_ids:Rows", f"data.code={json.dumps(_CODE)}")
"""Settings of a run whose ids take 64 bits where a table is dynamic."""


def random_stream(seed: int) -> tuple[list[Table], list[list[list[int]]]]:
    """As `streams` of test_id_map.py draws them, where there is no hypothesis."""
    random = np.random.default_rng(seed)

    def one_of(*values: Any) -> Any:
        return values[random.integers(len(values))]

    chosen = [Table.model_validate({
        "name": f"table_{number}", "ids": "dynamic", "dim": 4, "capacity": one_of(1, 32, 40, 96),
        "admit": one_of("all", "count", "probability"), "admit_count": one_of(1, 2, 4),
        "admit_probability": one_of(0.25, 0.5, 1.0), "evict": one_of("lru", "lfu", "age"),
        "half_life": one_of(1, 2, 3, 4), "max_new": one_of(1, 7, 64, 4096),
    }) for number in range(one_of(1, 2, 3))]
    return chosen, [[draw_ids(random, one_of(20, 60, 200), int(random.integers(1, 61))) for _ in chosen]
                    for _ in range(one_of(4, 8, 12))]


def draw_ids(random: np.random.Generator, space: int, num: int) -> list[int]:
    """Of a few dozen, with the extremes among them."""
    return random.choice([*range(space), -(2**63) + 1, 2**63 - 1, -1, 2**62, NO_ID], num).tolist()


class ThreadRanks:
    """Ranks of one process: they run one after the other, from one collective to the next."""

    def __init__(self, num_ranks: int, device: str = "cpu") -> None:
        self.turn, self.barrier, self.values = Lock(), Barrier(num_ranks), [torch.empty(0)] * num_ranks
        self.worlds = [ThreadRank(self, rank, torch.device(device)) for rank in range(num_ranks)]

    def all(self, call: Callable[..., Any], inputs: list[Any], *more: Any) -> list[Any]:
        """What each rank's `call` gives."""
        def run(one: Any) -> Any:
            with self.turn:
                try:
                    return call(one, *more)
                except BaseException:
                    self.barrier.abort()
                    raise

        with ThreadPoolExecutor(len(inputs)) as pool:
            return list(pool.map(run, inputs))


class ThreadRank:
    """One of them, in the place of a `World`."""

    def __init__(self, ranks: ThreadRanks, rank: int, device: torch.device) -> None:
        self._ranks, self.rank, self.world_size, self.device = ranks, rank, len(ranks.values), device
        self.is_first = rank == 0

    def stacked(self, values: torch.Tensor) -> torch.Tensor:
        self._ranks.values[self.rank] = values
        self._wait()
        found = torch.stack(self._ranks.values)
        self._wait()
        return found

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return self.stacked(values).sum(0)

    def _wait(self) -> None:
        self._ranks.turn.release()
        try:
            self._ranks.barrier.wait(timeout=60)
        finally:
            self._ranks.turn.acquire()


def assert_like_reference(chosen: list[Table], steps: list[list[list[int]]], num_ranks: int = 1, device: str = "cpu",
                          ops: Any = None) -> None:
    """Rows, admissions, evictions, counts and statistics with those of the reference, at every step. `ops`: kernels
    that are interpreted."""
    ranks = ThreadRanks(num_ranks, device)
    stored = ModelSpec(tables=tuple(chosen)).stored_tables()
    maps = [IdMap(stored, SEED, world) for world in ranks.worlds]
    for one in maps if ops else ():
        one.ops, one.tags = ops, torch.zeros_like(one.hashes, dtype=torch.int16)
    references = [ReferenceTable(table, SEED) for table in chosen]
    for step, of_tables in enumerate(steps):
        flat = torch.tensor([one for some in of_tables for one in some], dtype=torch.int64, device=device)
        layout = IdLayout(np.cumsum([len(some) for some in of_tables]).tolist(), torch.device(device))
        number = torch.tensor([step], device=device)
        of_ranks = ranks.all(IdMap.assign, maps, flat, layout, number)
        rows = torch.stack([rows for rows, _ in of_ranks]).amax(0).cpu()
        expected = [reference.step(some, step) for reference, some in zip(references, of_tables, strict=True)]
        is_id = flat.cpu() != NO_ID
        assert rows[is_id].tolist() == [row for found, _ in expected for row in found]
        assert (rows[~is_id] == -1).all()
        for _, new in of_ranks:  # every rank knows all
            assert sorted(new_rows(maps[0], new)) == sorted(
                (at, *one) for at, (_, some) in enumerate(expected) for one in some)
        assert torch.stack([one.look_up(flat, layout) for one in maps]).amax(0).cpu().equal(rows)
    states = ranks.all(IdMap.state, maps)
    for at, (reference, name) in enumerate(zip(references, states[0], strict=True)):
        state = {part: torch.cat([of_rank[name][part].tensor for of_rank in states]).cpu()
                 for part in states[0][name] if part != "statistics"}
        assert all(of_rank[name]["hashes"].size == len(state["hashes"]) for of_rank in states)
        raw = unmixed(state["hashes"].numpy(), table_key(SEED, name, 0))
        held = {1 + slot: int(raw[slot]) for slot in (state["seen"] != FREE).nonzero()[:, 0].tolist()}
        assert held == {row: one.id for row, one in reference.rows.items()}
        assert {row: int(state["seen"][row - 1]) for row in held} == {
            row: one.seen for row, one in reference.rows.items()}
        if chosen[at].evict != "lru":
            assert {row: int(state["counts"][row - 1]) for row in held} == {
                row: one.count if chosen[at].evict == "lfu" else one.born for row, one in reference.rows.items()}
        if chosen[at].admit == "count":
            assert {which: count for which, count in enumerate(state["counters"].tolist()) if count} == {
                which: count for which, count in reference.counters.items() if count}
    statistics = ranks.all(IdMap.take_statistics, maps)
    assert all(of_rank == statistics[0] for of_rank in statistics)
    for reference, found in zip(references, statistics[0].values(), strict=True):
        assert {name: found[name] for name in reference.statistics} == reference.statistics
        assert found["fullness"] == len(reference.rows) / (reference.spec.stored_rows - 1)


def new_rows(ids: IdMap, new: NewRows) -> Iterator[tuple[int, int, int]]:
    for slot, bits, at in zip(new.slots.tolist(), new.hashes.tolist(), new.tables.tolist(), strict=True):
        if slot >= 0:
            yield (at, 1 + slot - ids.first_slots[at],
                   int(unmixed(np.array([bits]), table_key(SEED, ids.tables[at].name, 0))[0]))
