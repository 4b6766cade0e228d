"""A run stops when its held-out metric no longer improves, and keeps its best checkpoint, whenever it was killed.

The trainer counts its steps and its AUC is looked up by them, so that a run of many kills takes milliseconds.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from counting_trainer import WORLD, Instants, Killed, backend_of
from tiny_runs import TINY

from embark.errors import Preempted, SpecError, UserError
from embark.events.summary import best_checkpoint
from embark.run.early_stopping import EarlyStopping
from embark.run.loop import train
from embark.run.signals import StopSignals
from embark.spec import resolve
from embark.store import Checkpoint, RunDir
from embark.store.checkpoint_inspect import decide_pruning, find_trained, list_checkpoints

AUC = {2: 0.60, 4: 0.70, 6: 0.69, 8: 0.75, 10: 0.75, 12: 0.74, 14: 0.745, 16: 0.9}
SETS = ("train.num_steps=20", "train.eval_every=2", "train.early_stopping_patience=3", "store.in_background=false",
        "store.checkpoint_every=3", "store.keep_checkpoints=1", "store.checkpoint_at_end=true",
        "data.num_eval_samples=200")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function from settings to what the run returned; it may be killed or stopped at an instant."""
    monkeypatch.setattr("embark.run.loop.log_prediction", lambda *_: None)

    def start(*sets: str, instants: Instants | None = None, name: str = "run") -> dict[str, Any]:
        instants = instants or Instants()
        backend = backend_of(instants, lambda _, steps: AUC.get(steps, 0.5))
        spec = resolve(TINY, [f"store.root={tmp_path}", f"name={name}", *SETS, *sets])
        monkeypatch.setattr(StopSignals, "look", lambda self: instants.caught)
        return train(spec, backend)

    return start


def state_of(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values["early_stopping"].items() if key != "path"}


STOPPED = {"metric": "auc", "step": 14, "best_step": 8, "best": 0.75, "num_without_improvement": 3,
           "has_stopped": True}


def test_early_stopping_ends_the_run_and_keeps_the_best_checkpoint(run, tmp_path):
    values = run()
    assert (values["outcome"], values["step"], values["auc"]) == ("done", 14, 0.745)
    assert state_of(values) == STOPPED
    assert values["early_stopping"]["path"] == str(tmp_path / "run" / "checkpoints" / "step-000000008")
    assert best_checkpoint(values) == (
        f"AUC 0.7500 at step 8: {tmp_path}/run/checkpoints/step-000000008, as {tmp_path}/run@best")
    assert best_checkpoint({**values, "early_stopping": STOPPED}) == f"AUC 0.7500 at step 8: {tmp_path}/run@best"
    lost = best_checkpoint({**values, "early_stopping": {**STOPPED, "path": ""}})
    assert lost == "AUC 0.7500 at step 8: its checkpoint could not be saved"
    listed = list_checkpoints(str(tmp_path / "run"))
    assert {one.step: one.kept for one in listed.checkpoints} == {8: ("best",), 14: ("newest",)}
    assert decide_pruning(listed, 0.0).removed == ()
    assert find_trained(f"{tmp_path}/run@best").checkpoint.step == 8
    assert (find_trained(f"{tmp_path}/run").checkpoint.step, find_trained(f"{tmp_path}/run@14").checkpoint.step) == (
        8, 14)


@pytest.mark.parametrize(("signal", "at"), [
    ("", ("step", 5)), ("", ("evaluate", 8)), ("", ("commit", 8)), ("", ("committed", 8)), ("", ("evaluate", 12)),
    ("", ("committed", 14)), ("SIGTERM", ("step", 8)), ("SIGTERM", ("evaluate", 8)), ("SIGTERM", ("evaluate", 14)),
])
def test_early_stopping_decides_alike_after_a_kill_or_preemption(run, tmp_path, signal, at):
    with pytest.raises((Killed, Preempted)):
        run(instants=Instants(at, signal))
    values = run()
    assert state_of(values) == STOPPED
    assert (values["step"], values["auc"]) == (14, 0.745)
    assert [one.step for one in RunDir(str(tmp_path / "run")).checkpoints.committed()] == [8, 14]
    assert find_trained(f"{tmp_path}/run@best").checkpoint.values["eval"]["auc"] == 0.75


def test_the_last_evaluation_is_saved_if_it_is_the_best(run, tmp_path):
    values = run("train.num_steps=16", "train.early_stopping_patience=4", "store.checkpoint_at_end=false",
                 "store.checkpoint_every=0")
    assert (values["step"], values["early_stopping"]["best_step"]) == (16, 16)
    assert values["early_stopping"]["path"].endswith("step-000000016")
    assert find_trained(f"{tmp_path}/run@best").checkpoint.values["eval"]["auc"] == 0.9


def test_a_run_that_stopped_early_is_finished_until_its_patience_is_raised(run):
    first = run()
    assert run() == first
    continued = run("train.early_stopping_patience=4")
    assert (continued["step"], continued["early_stopping"]["best_step"]) == (20, 16)


@pytest.mark.parametrize(("sets", "best_step", "stops_at"), [
    (("train.early_stopping_metric=log_loss",), 8, 14),  # it is 1 − AUC here: falling is better
    (("train.early_stopping_min_delta=0.06",), 4, 10),  # 0.75 is only 0.05 more than 0.70
    (("train.early_stopping_patience=1",), 4, 6),
])
def test_metric_smallest_change_and_patience_decide(run, sets, best_step, stops_at):
    values = run(*sets)
    assert (values["early_stopping"]["best_step"], values["step"]) == (best_step, stops_at)


def test_nan_is_no_improvement_and_the_first_rank_decides():
    train = resolve(TINY, SETS).train
    world: Any = SimpleNamespace(gathered=lambda value: [0.6, value])
    one = EarlyStopping(train, SimpleNamespace(num_eval_samples=1), world, None)
    one.add({"step": 2, "auc": 0.7})
    assert one.values()["early_stopping"]["best"] == 0.6
    alone = EarlyStopping(train, SimpleNamespace(num_eval_samples=1), WORLD, None)
    for step in (2, 4, 6):
        alone.add({"step": step, "auc": math.nan})
    assert alone.is_over
    assert "it was never a finite number" in alone.reason()


def test_another_metric_starts_the_count_again():
    saved = Checkpoint(14, {}, {"early_stopping": {k: v for k, v in STOPPED.items() if k != "has_stopped"}})
    source: Any = SimpleNamespace(num_eval_samples=1)
    other = resolve(TINY, [*SETS, "train.early_stopping_metric=log_loss"]).train
    assert EarlyStopping(resolve(TINY, SETS).train, source, WORLD, saved).is_over
    assert not EarlyStopping(other, source, WORLD, saved).is_over
    assert EarlyStopping(resolve(TINY).train, source, WORLD, saved).values() == {}


def test_what_cannot_work_is_refused_with_the_way_out(run):
    with pytest.raises(SpecError, match=r"(?s)early_stopping_patience.*set train\.eval_every"):
        resolve(TINY, ["train.early_stopping_patience=2"])
    with pytest.raises(SpecError, match=r"has no effect while train\.early_stopping_patience is 0"):
        resolve(TINY, ["train.early_stopping_min_delta=0.1"])
    with pytest.raises(UserError, match="needs held-out samples, and the data has none"):
        run("data.num_eval_samples=0")


def test_best_without_early_stopping_is_by_evaluations(run, tmp_path):
    sets = ("train.early_stopping_patience=0", "store.keep_checkpoints=9", "train.num_steps=11")
    run(*sets, "store.checkpoint_every=2")
    assert find_trained(f"{tmp_path}/run@best").checkpoint.step == 10  # as good as step 8, and newer
    run(*sets, "train.eval_every=0", "data.num_eval_samples=0", name="never")
    with pytest.raises(UserError, match="no checkpoint was evaluated"):
        find_trained(f"{tmp_path}/never@best")
    with pytest.raises(UserError, match="name two checkpoints"):
        find_trained(f"{tmp_path}/run@best", 4)
