"""The trainer in JAX is killed, signalled and starved as the one in torch is, and loses as little."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from integration.faults.conftest import Run, end_all
from integration.faults.test_drill import where_it_landed
from metadata_servers import Gce

pytestmark = pytest.mark.slow

SETS = ("place.device=jax", "store.checkpoint_every=2", "data.num_eval_samples=0")
ENDLESS = ("train.num_steps=100000", "train.num_epochs=10000")
WRITE = "embark.store.object_store:LocalStore.write"
CREATE = "embark.store.object_store:LocalStore.create"
CHECKPOINTER = "embark.trainers.jax.checkpoint:JaxCheckpointer"
DIE = {"hook": "integration.faults.hooks:die_in", "victim": 0}
POINTS = {
    "the state is copied": ({**DIE, "method": f"{CHECKPOINTER}._pieces", "word": ""}, "between saves"),
    "a shard is half written": (
        {**DIE, "hook": "integration.faults.hooks:die_writing", "word": "rank-00000-"},
        "in a save",
    ),
    "the index is to be written": ({**DIE, "method": WRITE, "word": "index.json"}, "in a save"),
    "the mark is to be written": ({**DIE, "method": CREATE, "word": "commit.json"}, "in a save"),
    "the mark is written": ({**DIE, "method": f"{CHECKPOINTER}._clean_up", "word": ""}, "between saves"),
    "an old one has lost its mark": ({**DIE, "method": "removal", "word": ""}, "in a removal"),
}
PLACES = {
    "a save": (WRITE, "rank-0000"),
    "a save's last moment": (CREATE, "commit.json"),
    "an evaluation": ("embark.data.synthetic:SyntheticSource.eval_rows", ""),
}


@pytest.fixture(scope="module")
def undisturbed(jax_zygote, tmp_path_factory) -> Run:
    """The run that nothing disturbed."""
    made = Run(jax_zygote, tmp_path_factory.mktemp("undisturbed"), sets=SETS)
    assert made.ends(1) == [0], made.output()
    return made


@pytest.fixture
def run(jax_zygote, tmp_path) -> Iterator[Run]:
    made = Run(jax_zygote, tmp_path, sets=SETS)
    yield made
    end_all(made)


def test_a_kill_at_each_point_of_a_save_changes_no_loss(run, undisturbed):
    for point, (dying, expected) in POINTS.items():
        began_s = time.time()
        codes = run.ends(1, **dying)
        assert codes == [-signal.SIGKILL], f"{point}: {codes}\n{run.output()}"
        assert (point, where_it_landed(run, began_s)) == (point, expected)
    assert run.ends(1) == [0], run.output()
    assert loss_sets(run) == loss_sets(undisturbed)
    assert (run.committed(), run.unfinished()) == (undisturbed.committed(), [])


@pytest.mark.parametrize("place", PLACES)
def test_sigterm_loses_nothing(run, undisturbed, tmp_path, place):
    method, word = PLACES[place]
    mark = tmp_path / "mark"
    more = ("train.eval_every=2", "data.num_eval_samples=96") if place == "an evaluation" else ()
    ranks = run.start(
        1, *more, hook="integration.faults.hooks:slow", method=method, word=word, seconds=0.25, mark=str(mark)
    )
    ranks.until(lambda: mark.exists() and run.last_step() >= 2)
    ranks.kill(signal.SIGTERM)
    codes, stopped = ranks.codes(), run.last_step()
    assert codes == [75], run.output()
    assert 0 < stopped < 12
    assert run.committed()[-1] == stopped
    assert [e["signal"] for e in run.events("interrupt")] == ["SIGTERM"]
    assert run.ends(1, *more) == [0], run.output()
    assert [e["step"] for e in run.events("resume")] == [stopped]
    assert run.losses() == undisturbed.losses()


def test_sigterm_before_the_first_step_waits_for_none(run, tmp_path):
    mark = tmp_path / "mark"
    ranks = run.start(
        1,
        hook="integration.faults.hooks:slow",
        method=f"{CHECKPOINTER}.load_newest",
        word="",
        seconds=0.3,
        mark=str(mark),
    )
    ranks.until(mark.exists)
    ranks.kill(signal.SIGTERM)
    assert ranks.codes() == [75], run.output()
    assert (run.losses(), run.committed()) == ({}, [])


def test_a_notice_of_the_cloud_saves_and_stops(run):
    google = Gce()
    ranks = run.start(1, *ENDLESS, env={"GCE_METADATA_HOST": google.address})
    ranks.until(lambda: run.last_step() > 2)
    google.set("preempted", "TRUE")
    assert ranks.codes() == [75], run.output()
    google.close()
    assert [e["signal"] for e in run.events("interrupt")] == ["notice"]
    assert run.committed()[-1] == run.last_step()


def test_a_full_disk_is_reported_and_costs_no_checkpoint(jax_zygote, tmp_path, disk, undisturbed):
    run = Run(jax_zygote, tmp_path, name="disk", sets=SETS)
    assert run.ends(1) == [70], run.output()
    assert (run.committed(), run.unfinished()) == ([2, 4], [])
    for step in (6, 8, 10):
        assert f"step {step} could not be saved: could not write {disk}/checkpoints/step-{step:09d}/" in run.warnings()
    assert "no space left on device. Training continues; the previous checkpoint is intact" in run.warnings()
    assert run.last_step() == 12
    assert "fix: free some space, or point store.root at a larger disk" in run.output()
    subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
    assert run.ends(1) == [0], run.output()
    assert run.committed() == [10, 12]
    assert loss_sets(run) == loss_sets(undisturbed)


def test_a_signal_to_one_of_two_processes_stops_both_at_one_step(run):
    ranks = run.start(2, *ENDLESS)
    ranks.until(lambda: run.last_step() > 2)
    ranks.kill(signal.SIGTERM, 1)
    assert ranks.codes() == [75, 75], run.output()
    assert [e["signal"] for e in run.events("interrupt")] == ["SIGTERM"]
    assert run.committed()[-1] == run.last_step()
    assert list(run.path.glob(f"checkpoints/step-{run.last_step():09d}/rank-00001-*"))


def test_process_killed_in_a_save_leaves_no_checkpoint(run, undisturbed):
    """The other hangs in an exchange with the dead; JAX ends it once that has been silent for place.timeout_s."""
    ranks = run.start(
        2, "place.timeout_s=10", hook="integration.faults.hooks:die_in", victim=1, method=WRITE, word="rank-00001"
    )
    survivor, victim = ranks.codes()
    assert victim == -signal.SIGKILL, run.output()
    assert survivor in (70, -signal.SIGABRT), run.output()
    assert run.committed() == []
    assert run.ends(1) == [0], run.output()
    assert (run.committed(), run.unfinished()) == (undisturbed.committed(), [])


def loss_sets(run: Run) -> dict[int, set[float]]:
    """By step: what was told of it, however often."""
    return {step: set(result) for step, result in run.losses().items()}
