"""Dynamic tables on a GPU: the map, the rows and the counts of a CPU. Run by hand; what came of it is in
bench/RESULTS.md."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dynamic_streams import WIDE_IDS, assert_like_reference, random_stream

from embark.data.dynamic_ids import NO_ID
from embark.spec.model import ModelSpec, Table
from embark.trainers.torch.dynamic.batch_ids import IdLayout
from embark.trainers.torch.dynamic.id_map import IdMap
from embark.trainers.torch.world import World

pytestmark = pytest.mark.gpu
TABLES = ("model.tables=[{name='a', ids='dynamic', rows=900, capacity=64, evict='lfu', half_life=7}, "
          "{name='b', ids='dynamic', rows=400, capacity=32, admit='count', max_new=100, multi_hot=2}, "
          "{name='c', shares='b', multi_hot=3}, {name='d', rows=7}, "
          "{name='e', ids='dynamic', rows=900, capacity=96, evict='age', admit='probability', admit_probability=0.5}]")
GPU = ("place.device=cuda", "train.num_steps=40", "data.num_train_samples=16384", "train.eps=1e-4")
METRICS = ("id_hit_rate", "id_default_rate", "ids_admitted", "ids_evicted", "table_fullness")


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_map_on_a_gpu_and_a_cpu_is_the_reference(num_ranks):
    """On several ranks of one process."""
    for seed in range(12):
        for device in ("cpu", "cuda"):
            assert_like_reference(*random_stream(100 * num_ranks + seed), num_ranks, device)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_map_of_a_gpu_is_that_of_a_cpu(dtype):
    tables = [Table.model_validate({
        "name": f"{evict}_{admit}", "ids": "dynamic", "dim": 4, "capacity": capacity, "evict": evict, "admit": admit,
        "admit_count": 3, "half_life": 5, "max_new": max_new,
    }) for evict, capacity in (("lru", 1000), ("lfu", 320), ("age", 96)) for admit, max_new in (
        ("all", 4096), ("count", 900), ("probability", 300))]
    stored = ModelSpec(tables=tuple(tables)).stored_tables()
    maps = [IdMap(stored, 3, World(0, 1, 0, 1, torch.device(device))) for device in ("cpu", "cuda")]
    random, size = np.random.default_rng(1), 2000
    ends = [size * (at + 1) for at in range(len(tables))]
    layouts = [IdLayout(ends, torch.device(device)) for device in ("cpu", "cuda")]
    for step in range(30):
        ids = torch.from_numpy(random.zipf(1.2, ends[-1]).clip(0, 5000)).to(dtype)
        ids[::17] = -1 if dtype == torch.int32 else NO_ID
        found = [one.assign(ids.to(one.device), layout, torch.tensor([step], device=one.device))
                 for one, layout in zip(maps, layouts, strict=True)]
        (rows, new), (gpu_rows, gpu_new) = found
        assert gpu_rows.cpu().equal(rows)
        placed = {(slot, bits) for slot, bits in zip(new.slots.tolist(), new.hashes.tolist(), strict=True) if slot >= 0}
        assert placed == {(slot, bits) for slot, bits in zip(gpu_new.slots.tolist(), gpu_new.hashes.tolist(),
                                                             strict=True) if slot >= 0}
    for table, state in maps[0].state().items():
        for name, value in state.items():
            found, value = (getattr(one, "tensor", one) for one in (maps[1].state()[table][name], value))
            assert found.cpu().equal(value), (table, name)
    assert maps[0].take_statistics() == maps[1].take_statistics()


@pytest.mark.parametrize("sets", [(), ("data.ragged=true",), ("train.optimizer=adam", "train.learning_rate=0.005"),
                                  WIDE_IDS,
                                  ("train.optimizer=adagrad",), ("train.table_dtype=fp16",)], ids=str)
def test_the_captured_step_has_the_pipelines_losses_and_a_cpus_map(train_tiny, sets):
    captured = train_tiny(*GPU, TABLES, *sets)
    assert captured.of("start")[0]["engine"] == "cuda_graph"
    pipeline = train_tiny(*GPU, TABLES, *sets, "train.engine=pipeline")
    if "train.table_dtype=fp16" not in sets:  # rounded by other bits
        assert captured.losses() == pytest.approx(pipeline.losses(), rel=5e-4)
    runs = [captured, pipeline]
    if "train.optimizer=adam" not in sets:
        runs.append(train_tiny(*GPU, TABLES, *sets, "place.device=cpu"))
    found = [[[event[name] for name in METRICS] for event in run.of("step")] for run in runs]
    assert all(one == found[0] for one in found)
    assert sum(event["ids_evicted"]["a"] for event in captured.of("step")) > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_gives_the_losses_of_one_that_was_not_interrupted(train_tiny, dtype):
    sets = (*GPU, TABLES, f"train.table_dtype={dtype}")
    whole = train_tiny(*sets, "name=whole")
    train_tiny(*sets, "train.num_steps=21", "store.checkpoint_at_end=true")
    resumed = train_tiny(*sets, fresh=False)
    keys = ("loss", *METRICS)
    assert [[event[key] for key in keys] for event in resumed.of("step")][-19:] == [
        [event[key] for key in keys] for event in whole.of("step")][-19:]
