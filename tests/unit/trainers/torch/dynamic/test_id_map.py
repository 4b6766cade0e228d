"""The map from ids to rows: against a plain Python reference, on a CPU and by the GPU's kernels."""

from collections.abc import Iterator

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embark.data.dynamic_ids import FREE, NO_ID, table_key, unmixed
from embark.spec.model import ModelSpec, Table
from embark.trainers.torch.dynamic.batch_ids import IdLayout
from embark.trainers.torch.dynamic.id_map import IdMap
from tests.dynamic_reference import ReferenceTable

SEED = 3


@st.composite
def tables(draw: st.DrawFn) -> list[Table]:
    return [Table.model_validate({
        "name": f"table_{number}", "ids": "dynamic", "dim": 4, "capacity": draw(st.sampled_from([1, 32, 40, 96])),
        "admit": draw(st.sampled_from(["all", "count", "probability"])),
        "admit_count": draw(st.integers(1, 4)), "admit_probability": draw(st.sampled_from([0.25, 0.5, 1.0])),
        "evict": draw(st.sampled_from(["lru", "lfu", "age"])), "half_life": draw(st.integers(1, 4)),
        "max_new": draw(st.sampled_from([1, 7, 64, 4096])),
    }) for number in range(draw(st.integers(1, 3)))]


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Table], list[list[list[int]]]]:
    """Tables, and for each step the ids of each: some of a few dozen, the extremes among them."""
    chosen = draw(tables())
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    space = draw(st.sampled_from([20, 60, 200]))
    values = [*range(space), -(2**63) + 1, 2**63 - 1, -1, 2**62, NO_ID]
    steps = [[random.choice(values, draw(st.integers(0, 60))).tolist() for _ in chosen]
             for _ in range(draw(st.integers(1, 8)))]
    return chosen, steps


def make_map(chosen: list[Table]) -> IdMap:
    return IdMap(ModelSpec(tables=tuple(chosen)).stored_tables(), SEED, torch.device("cpu"))


def compare(chosen: list[Table], steps: list[list[list[int]]], ids: IdMap) -> None:
    references = [ReferenceTable(table, SEED) for table in chosen]
    for step, of_tables in enumerate(steps):
        flat = torch.tensor([one for some in of_tables for one in some], dtype=torch.int64)
        ends = np.cumsum([len(some) for some in of_tables]).tolist()
        layout = IdLayout(ends, torch.device("cpu"))
        rows, new = ids.assign(flat, layout, torch.tensor([step]))
        expected = [reference.step(some, step) for reference, some in zip(references, of_tables, strict=True)]
        assert rows[flat != NO_ID].tolist() == [row for found, _ in expected for row in found]
        assert (rows[flat == NO_ID] == -1).all()
        assert sorted(new_rows(ids, new)) == sorted(
            (at, *one) for at, (_, some) in enumerate(expected) for one in some)
        assert torch.equal(ids.look_up(flat, layout), rows)
    for at, (reference, (name, state)) in enumerate(zip(references, ids.state().items(), strict=True)):
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
    for reference, found in zip(references, ids.take_statistics().values(), strict=True):
        assert {name: found[name] for name in reference.statistics} == reference.statistics
        assert found["fullness"] == len(reference.rows) / (reference.spec.stored_rows - 1)


def new_rows(ids: IdMap, new: object) -> Iterator[tuple[int, int, int]]:
    for slot, bits, at in zip(new.slots.tolist(), new.hashes.tolist(), new.tables.tolist(), strict=True):
        if slot >= 0:
            yield (at, 1 + slot - ids.first_slots[at],
                   int(unmixed(np.array([bits]), table_key(SEED, ids.tables[at].name, 0))[0]))


@settings(max_examples=40, deadline=None)
@given(streams())
def test_rows_admissions_and_evictions_are_those_of_the_reference(case) -> None:
    chosen, steps = case
    compare(chosen, steps, make_map(chosen))


@settings(max_examples=8, deadline=None)
@given(streams())
def test_the_kernels_of_a_gpu_give_the_rows_of_the_reference(kernels, case) -> None:
    chosen, steps = case
    ids = make_map(chosen)
    ids.ops, ids.tags = kernels, torch.zeros(ids.first_slots[-1], dtype=torch.int16)
    compare(chosen, [of_tables for of_tables in steps if any(map(len, of_tables))], ids)


def test_the_kernel_of_a_gpu_resets_the_rows_that_torch_resets(kernels) -> None:
    from embark.trainers.torch.dynamic import reset_kernels
    from embark.trainers.torch.dynamic.rows import RowShard, reset_rows

    ids = make_map([Table(name=name, ids="dynamic", rows=9, dim=12, capacity=64, init_range=0.3) for name in "ab"])
    layout = IdLayout([40, 70], torch.device("cpu"))
    _, new = ids.assign(torch.arange(70), layout, torch.tensor([0]))
    found = []
    for is_kernel in (True, False):
        weights = [torch.full(size, 7.0) for size in ((20, 12), (45, 12), (65, 4), (65, 8))]
        states = [torch.full(size, 7.0) for size in ((20,), (45,), (65, 4), (65, 8))]
        shards = [RowShard(0, 0, 0, weights[0], (states[0],)), RowShard(0, 20, 0, weights[1], (states[1],)),
                  RowShard(1, 0, 0, weights[2], (states[2],)), RowShard(1, 0, 4, weights[3], (states[3],))]
        if is_kernel:
            reset_kernels.reset(ids, new, shards, reset_kernels.about_shards(ids, shards))
        else:
            reset_rows(ids, new, shards)
        found.append([*weights, *states])
    assert all(one.equal(other) for one, other in zip(*found, strict=True))
    assert (found[0][2] != 7.0).any(dim=1).sum() == 30
    assert found[0][4].eq(0).sum() + found[0][5].eq(0).sum() == 40
