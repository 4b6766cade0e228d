"""A checkpoint goes on at another number of ranks and under another plan: the same values, the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.faults.conftest import Run

pytestmark = pytest.mark.slow

RESAVED = 1000
ADAGRAD = ("train.optimizer=adagrad",)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (4, 2)])
def test_at_another_number_of_ranks_it_continues(run, undisturbed, before, after):
    first_half(run, before)
    assert run.ends(after, hook="integration.faults.hooks:resave", step=RESAVED) == [0] * after, run.output()
    same_values(run)
    same_losses(run, undisturbed)


@pytest.mark.parametrize(("before", "after"), [("table_wise", "row_wise"), ("row_wise", "column_wise"),
                                               ("column_wise", "table_wise")])
def test_under_another_plan_it_continues(run, whole_adagrad, before, after):
    run.sets = ADAGRAD
    first_half(run, 2, f"train.sharding={before}")
    assert run.ends(2, f"train.sharding={after}", hook="integration.faults.hooks:resave", step=RESAVED) == [0, 0], (
        run.output()
    )
    plans = [{table["sharding"] for table in e["tables"]} for e in run.events("plan")]
    assert plans == [{before}, {after}]
    same_values(run)
    same_losses(run, whole_adagrad)


@pytest.mark.parametrize(("before", "after"), [("row_wise", "column_wise"), ("column_wise", "table_wise")])
def test_a_state_of_one_number_a_row_continues_under_another_cut(run, undisturbed, before, after):
    """Row-wise Adagrad has a number for each row of each column shard: cut anew, their mean stays what it was."""
    first_half(run, 2, f"train.sharding={before}")
    assert run.ends(2, f"train.sharding={after}", hook="integration.faults.hooks:resave", step=RESAVED) == [0, 0], (
        run.output()
    )
    saved, loaded = both(run)
    states = {name for name in saved if "momentum1" in name}
    assert len(states) == 3
    assert [name for name in saved.keys() - states if not saved[name].equal(loaded[name])] == []
    for name in states:
        rows = min(saved[name].numel(), loaded[name].numel())
        assert saved[name].numel() != loaded[name].numel()
        assert loaded[name].view(-1, rows).mean(0).allclose(saved[name].view(-1, rows).mean(0))
    if before == "row_wise":  # the first loss is of weights alone; from then on the two cuts learn differently
        assert run.losses()[7] == pytest.approx(undisturbed.losses()[7], rel=2e-5)
    assert "Warning" not in run.output()


def first_half(run: Run, num_ranks: int, *sets: str) -> None:
    run.sets = (*run.sets, "store.keep_checkpoints=9")
    assert run.ends(num_ranks, "train.num_steps=6", *sets) == [0] * num_ranks, run.output()
    assert run.committed()[-1] == 6


def same_values(run: Run) -> None:
    """Weights and optimizers, bit for bit: what was saved, and what a resume under the other plan loaded."""
    saved, loaded = both(run)
    assert any("momentum1" in name for name in saved)
    different = [name for name in saved if not saved[name].equal(loaded[name])]
    assert different == []


def same_losses(run: Run, undisturbed: Run) -> None:
    assert [e["step"] for e in run.events("resume")] == [6]
    for step, (expected,) in undisturbed.losses().items():
        assert run.losses()[step] == pytest.approx([expected], rel=2e-5), step


def both(run: Run) -> tuple[dict, dict]:
    """What was saved, and what the resume under the other plan loaded and wrote before it trained."""
    saved, loaded = (tensors(run.path / "checkpoints" / f"step-{step:09d}") for step in (6, RESAVED))
    assert saved.keys() == loaded.keys()
    assert any(name.startswith("model.") for name in saved)
    return saved, loaded


def tensors(folder: Path) -> dict:
    """Every tensor of a checkpoint, complete, but what each rank has of its own."""
    import torch

    from embark.store.checkpoint_arrays import CheckpointArrays
    from embark.store.object_store import LocalStore

    arrays = CheckpointArrays(LocalStore(folder.parent), folder.name)
    return {name: torch.from_numpy(arrays.tensor(name, about.size))
            for name, about in arrays.entries.items() if not name.startswith("random.")}


@pytest.fixture(scope="module")
def whole_adagrad(zygote, tmp_path_factory) -> Run:
    made = Run(zygote, tmp_path_factory.mktemp("adagrad"), sets=ADAGRAD)
    assert made.ends(2) == [0, 0], made.output()
    return made
