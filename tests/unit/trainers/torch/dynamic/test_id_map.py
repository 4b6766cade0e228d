"""The map from ids to rows: against a plain Python reference, on a CPU and by the GPU's kernels, on any number of
ranks."""

import numpy as np
import torch
from dynamic_streams import SEED, assert_like_reference, draw_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from embark.spec.model import ModelSpec, Table
from embark.trainers.torch.dynamic.batch_ids import IdLayout
from embark.trainers.torch.dynamic.id_map import IdMap
from embark.trainers.torch.world import World


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
    """Tables, and for each step the ids of each."""
    chosen = draw(tables())
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    space = draw(st.sampled_from([20, 60, 200]))
    steps = [[draw_ids(random, space, draw(st.integers(0, 60))) for _ in chosen]
             for _ in range(draw(st.integers(1, 8)))]
    return chosen, steps


@settings(max_examples=40, deadline=None)
@given(streams(), st.sampled_from([1, 1, 2, 3]))
def test_the_map_is_the_reference_on_any_number_of_ranks(case, num_ranks) -> None:
    assert_like_reference(*case, num_ranks)


@settings(max_examples=4, deadline=None)
@given(streams(), st.sampled_from([1, 2]))
def test_the_kernels_of_a_gpu_give_the_rows_of_the_reference(kernels, case, num_ranks) -> None:
    chosen, steps = case
    with_ids = [of_tables for of_tables in steps if any(map(len, of_tables))]
    assert_like_reference(chosen, with_ids[:4], num_ranks, ops=kernels)


def test_a_rank_holds_the_map_of_its_own_ids_alone() -> None:
    stored = ModelSpec(tables=(Table(name="a", ids="dynamic", capacity=32 * 21, admit="count"),)).stored_tables()
    whole, *parts = (IdMap(stored, SEED, World(rank, num, rank, num, torch.device("cpu")))
                     for num, rank in ((1, 0), *((4, rank) for rank in range(4))))
    for name in ("hashes", "seen", "counts", "counters"):
        sizes = [getattr(part, name).numel() for part in parts]
        assert sum(sizes) == getattr(whole, name).numel()
        assert max(sizes) == getattr(whole, name).numel() * 6 // 21


def test_the_kernel_of_a_gpu_resets_the_rows_that_torch_resets(kernels) -> None:
    from embark.trainers.torch.dynamic import map_kernels
    from embark.trainers.torch.dynamic.tables import RowShard, reset_rows

    tables = tuple(Table(name=name, ids="dynamic", rows=9, dim=12, capacity=64, init_range=0.3) for name in "ab")
    ids = IdMap(ModelSpec(tables=tables).stored_tables(), SEED, World(0, 1, 0, 1, torch.device("cpu")))
    layout = IdLayout([40, 70], torch.device("cpu"))
    _, new = ids.assign(torch.arange(70), layout, torch.tensor([0]))
    found = []
    for is_kernel in (True, False):
        weights = [torch.full(size, 7.0) for size in ((20, 12), (45, 12), (65, 4), (65, 8))]
        states = [torch.full(size, 7.0) for size in ((20,), (45,), (65, 4), (65, 8))]
        shards = [RowShard(0, 0, 0, weights[0], (states[0],)), RowShard(0, 20, 0, weights[1], (states[1],)),
                  RowShard(1, 0, 0, weights[2], (states[2],)), RowShard(1, 0, 4, weights[3], (states[3],))]
        if is_kernel:
            map_kernels.reset(ids, new, shards, map_kernels.about_shards(ids, shards))
        else:
            reset_rows(ids, new, shards)
        found.append([*weights, *states])
    assert all(one.equal(other) for one, other in zip(*found, strict=True))
    assert (found[0][2] != 7.0).any(dim=1).sum() == 30
    assert found[0][4].eq(0).sum() + found[0][5].eq(0).sum() == 40
