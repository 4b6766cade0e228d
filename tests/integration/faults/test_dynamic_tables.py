"""Dynamic tables over kills and numbers of ranks: the map, the counts and the losses of an undisturbed run."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest
from integration.faults.conftest import Run

from embark.store.checkpoint_arrays import table_weight

pytestmark = pytest.mark.slow
HOOKS = "integration.faults.hooks"
SETS = ("data.num_eval_samples=0", "store.keep_checkpoints=9", """model.tables=[
    { name = "user", ids = "dynamic", rows = 900, capacity = 64, evict = "lfu", half_life = 4 },
    { name = "item", ids = "dynamic", rows = 300, capacity = 32, admit = "count", max_new = 60, multi_hot = 3 },
    { name = "seen", shares = "item" }, { name = "shop", rows = 7 }]""")
METRICS = ("loss", "id_hit_rate", "id_default_rate", "ids_admitted", "ids_evicted", "table_fullness")


def steps(run: Run) -> dict[int, list[str]]:
    """By step all that was logged of it, once for each time it was trained."""
    found: dict[int, list[str]] = {}
    for event in run.events("step"):
        found.setdefault(event["step"], []).append(json.dumps([event[name] for name in METRICS]))
    return found


def maps(run: Run, step: int) -> dict[str, np.ndarray]:
    arrays = checkpoint(run, step)
    return {name: arrays.tensor(name, entry.size) for name, entry in arrays.entries.items()
            if name.startswith("dynamic.")}


def checkpoint(run: Run, step: int):
    from embark.store.checkpoint_arrays import CheckpointArrays
    from embark.store.run_dir import RunDir

    return CheckpointArrays(RunDir(str(run.path)).checkpoints.store, f"step-{step:09d}")


def test_killed_run_resumes_bit_for_bit_with_the_same_id_map(zygote, run, tmp_path_factory):
    one, two = (Run(zygote, tmp_path_factory.mktemp(name), sets=SETS) for name in ("one", "two"))
    assert (one.ends(1), two.ends(2)) == ([0], [0, 0]), one.output() + two.output()
    kept = maps(one, 12)
    assert all(kept[f"dynamic.{name}"].any() for name in ("user.hashes", "user.counts", "item.hashes", "item.counters"))
    assert same(maps(one, 12), maps(two, 12))  # the map does not depend on the number of ranks
    alone, shared = checkpoint(one, 12), checkpoint(two, 12)
    assert [chunk.sizes for chunk in alone.entries["dynamic.user.hashes"].chunks] == [(64,)]
    assert [chunk.sizes for chunk in shared.entries["dynamic.user.hashes"].chunks] == [(32,), (32,)]
    for name in ("user", "item"):  # a row is that of the same id
        weights = table_weight(name)
        rows = [arrays.tensor(weights, arrays.entries[weights].size) for arrays in (alone, shared)]
        assert np.allclose(*rows, rtol=1e-4, atol=1e-6)

    run.sets = SETS
    killed = run.ends(2, hook=f"{HOOKS}:die_at_step", victim=0, step=7, word="step-000000005/commit.json")
    assert -signal.SIGKILL in killed, run.output()
    assert run.ends(2) == [0, 0], run.output()
    assert {step: set(logged) for step, logged in steps(run).items()} == {
        step: set(logged) for step, logged in steps(two).items()}
    assert same(maps(run, 12), maps(two, 12))

    for num_ranks, stop in ((1, 15), (3, 18)):  # from 2 ranks to 1, and from 1 to 3
        assert run.ends(num_ranks, f"train.num_steps={stop}") == [0] * num_ranks, run.output()
    whole = Run(zygote, tmp_path_factory.mktemp("whole"), sets=(*SETS, "train.num_steps=18"))
    assert whole.ends(1) == [0], whole.output()
    assert same(maps(run, 18), maps(whole, 18))
    for step in range(13, 19):
        (logged,), (expected,) = steps(run)[step], steps(whole)[step]
        assert json.loads(logged)[1:] == json.loads(expected)[1:]
        assert json.loads(logged)[0] == pytest.approx(json.loads(expected)[0], rel=2e-5)


def same(maps: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> bool:
    return maps.keys() == others.keys() and all(
        np.array_equal(maps[name], others[name]) for name in maps if not name.endswith("statistics"))
