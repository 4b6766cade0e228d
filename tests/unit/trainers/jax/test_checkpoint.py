"""Both trainers write one form of checkpoint: what one saved the other goes on from, on any number of devices."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from limits import HANG_S

from embark.data import open_source
from embark.errors import UserError
from embark.run.evaluation import Evaluation
from embark.run.warm_start import WarmStart
from embark.spec import to_toml
from embark.store import RunDir
from embark.store.checkpoint_arrays import CheckpointArrays
from embark.store.checkpoint_diff import diff_checkpoints
from embark.trainers.jax.checkpoint import JaxCheckpointer
from embark.trainers.jax.trainer import JaxTrainer
from embark.trainers.jax.world import World

SOURCES = Path(__file__).parents[4] / "src"
SETS = ("train.num_steps=20", "store.checkpoint_at_end=true", "train.dense_optimizer=adam",
        "train.dense_learning_rate=0.01", "watch.every=5", "data.num_train_samples=2560")


@pytest.fixture
def world(world_of) -> World:
    return world_of(4)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad"])
def test_a_torch_checkpoint_survives_a_round_trip_through_jax_bit_for_bit(
    tiny, train_in_torch, world, tmp_path, optimizer
):
    sets = (*SETS, f"train.optimizer={optimizer}", "name=of_torch")
    results = train_in_torch(*sets)
    run = RunDir(results.values["run_dir"])
    spec = tiny(*sets)
    built, checkpointer = _loaded(spec, run, world)
    result = Evaluation(open_source(spec), spec.train.batch_size, world).run(built, 20, lambda: False)
    assert result["auc"] == pytest.approx(results.of("eval")[-1]["auc"], abs=1e-9)
    assert result["log_loss"] == pytest.approx(results.of("eval")[-1]["log_loss"], abs=1e-7)
    other = RunDir(str(tmp_path / "of_jax"))
    shutil.copytree(run.path, other.path)
    shutil.rmtree(other.path / "checkpoints")
    saver = JaxCheckpointer(other, built)
    saver.begin(21, {})
    assert [saved.error for saved in saver.wait()] == [None]
    shutil.move(other.path / "checkpoints" / "step-000000021", run.path / "checkpoints" / "step-000000021")
    first, second = run.checkpoints.committed()
    difference = diff_checkpoints(run.checkpoints, first, second)
    assert all(name.startswith("random.") for name in difference.only_in_a)
    assert not difference.only_in_b
    assert not difference.shapes
    # Adam's count of steps, which is the checkpoint's own.
    assert all(change.name.endswith(".step") for change in difference.tensors)
    assert difference.num_same > 20
    checkpointer.close()
    saver.close()


def test_a_warm_start_has_torch_weights_on_any_number_of_devices(
    tiny, train_in_torch, world
):
    results = train_in_torch(*SETS, "name=of_torch")
    larger = tiny(*SETS, "model.rows_per_table=[50, 9, 1000, 77]", f"train.warm_start={results.values['run_dir']}")
    states = {}
    for warm_start in (None, WarmStart(larger)):
        built = JaxTrainer(larger, world, 20, open_source(larger))
        checkpointer = JaxCheckpointer(RunDir(str(larger.store.root)), built)
        started = checkpointer.start(warm_start, lambda text: None)
        states[started] = {piece.name: piece.values for piece in checkpointer._copied(0)}
        checkpointer.close()
    (_, drawn), (started, warm) = states.items()
    assert (started.from_step, started.num_rows, started.num_fresh_rows) == (20, 1136, 6)
    run = RunDir(results.values["run_dir"])
    arrays = CheckpointArrays(run.checkpoints.store, "step-000000020")
    for name in (name for name in warm if name.startswith("model.")):
        num_rows = arrays.entries[name].size[0]
        assert np.array_equal(warm[name][:num_rows], arrays.rows(name, 0, num_rows)), name
        assert np.array_equal(warm[name][num_rows:], drawn[name][num_rows:]), name
    others = [name for name in warm if name.startswith("optimizers.")]
    assert others
    assert all(np.array_equal(warm[name], drawn[name]) for name in others)


def test_torch_evaluates_and_resumes_what_jax_trained(tiny, train_tiny, train_in_torch):
    sets = (*SETS, "train.eval_every=20")
    result = train_tiny(*sets, "name=handed_over", num_devices=4, fresh=False)
    onward = train_in_torch(*sets[1:], "name=handed_over", "train.num_steps=40", fresh=False)
    assert onward.of("resume")[0]["step"] == 20
    reference = train_in_torch(*sets[1:], "train.num_steps=40")
    assert onward.losses() == pytest.approx(reference.losses(), abs=1e-6)
    assert result.of("eval")[-1]["auc"] == pytest.approx(reference.of("eval")[0]["auc"], abs=1e-6)
    assert onward.of("eval")[-1]["auc"] == pytest.approx(reference.of("eval")[-1]["auc"], abs=1e-6)


@pytest.mark.slow
def test_a_killed_run_continues_bit_exactly_on_eight_devices_and_on_four(tiny, train_tiny):
    sets = ("train.num_steps=20", "watch.every=4", "store.checkpoint_every=5", "store.in_background=false",
            "data.num_train_samples=2560")
    killed = RunDir(tiny(*sets, "name=killed").store.root + "/killed")
    _killed_in_a_process_of_its_own(tiny(*sets, "name=killed"))
    assert [c.step for c in killed.checkpoints.committed()] == [5, 10]
    shutil.copytree(killed.path, killed.path.with_name("on_four"))
    result = train_tiny(*sets, "name=killed", fresh=False)
    on_four = train_tiny(*sets, "name=on_four", fresh=False, num_devices=4)
    reference = train_tiny(*sets)
    assert result.of("resume")[0]["step"] == 10
    expected = reference.losses()
    assert result.losses()[-3:] == expected[-3:]
    assert result.of("eval")[-1]["auc"] == reference.of("eval")[-1]["auc"]
    assert on_four.losses()[-3:] == pytest.approx(expected[-3:], abs=1e-6)
    assert len(on_four.of("plan")[-1]["per_rank"]) == 4


def test_a_checkpoint_of_another_optimizer_is_refused(tiny, train_in_torch, world):
    sets = (*SETS, "name=other")
    run = RunDir(train_in_torch(*sets).values["run_dir"])
    for wrong in ("train.optimizer=adagrad", "model.rows_per_table=[50,3,1000,78]", "model.top_mlp=[8]"):
        with pytest.raises(UserError, match="of another model"):
            _loaded(tiny(*sets, wrong), run, world)


def _cut(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


DAMAGES = {
    "a part cut short": ("rank-00000-02.bin", _cut, r"rank-00000-02.bin: [\d,]+ bytes instead of [\d,]+"),
    "a byte flipped": ("rank-00000-00.bin", _flip, "rank-00000-00.bin: its bytes changed"),
    "a part gone": ("rank-00000-01.bin", Path.unlink, "is damaged; skipped: .*there is no .*rank-00000-01.bin"),
    "the index damaged": ("index.json", _flip, "index.json: its bytes changed"),
    "the mark gone": ("commit.json", Path.unlink, "has no commit record; skipped"),
    "the mark garbled": ("commit.json", _cut, "is damaged; skipped: its commit record cannot be read"),
}
SAVING_TWICE = ("train.num_steps=8", "store.checkpoint_every=4", "store.checkpoint_at_end=true",
                "data.num_eval_samples=0")


def test_a_damaged_checkpoint_is_named_and_passed_over(tiny, train_tiny, world, tmp_path):
    spec = tiny(*SAVING_TWICE)
    original = RunDir(train_tiny(*SAVING_TWICE, num_devices=4).values["run_dir"])
    built = JaxTrainer(spec, world, 8, open_source(spec))
    for damage, (name, spoil, message) in DAMAGES.items():
        run = _copy_of(original, tmp_path / damage)
        spoil(run.path / "checkpoints" / "step-000000008" / name)
        step, result = _begun(spec, run, built)
        assert (damage, step, len(result)) == (damage, 4, 1)
        assert re.search(f"step-000000008.*{message}", result[0]), result


def test_sizes_alone_find_a_part_cut_short_and_no_byte_flipped(tiny, train_tiny, world):
    spec = tiny(*SAVING_TWICE, "store.verify=sizes")
    run = RunDir(train_tiny(*SAVING_TWICE, num_devices=4).values["run_dir"])
    built = JaxTrainer(spec, world, 8, open_source(spec))
    newest = run.path / "checkpoints" / "step-000000008"
    _flip(newest / "rank-00000-00.bin")
    assert _begun(spec, run, built) == (8, [])
    _cut(newest / "rank-00000-00.bin")
    step, result = _begun(spec, run, built)
    assert step == 4
    assert "rank-00000-00.bin is missing or truncated" in result[0]


def test_a_damaged_checkpoint_is_never_used_until_it_is_saved_again(tiny, train_tiny, world):
    spec = tiny(*SAVING_TWICE, "store.keep_checkpoints=1")
    run = RunDir(train_tiny(*SAVING_TWICE, num_devices=4).values["run_dir"])
    _cut(run.path / "checkpoints" / "step-000000008" / "rank-00000-00.bin")
    built = JaxTrainer(spec, world, 8, open_source(spec))
    checkpointer = JaxCheckpointer(run, built)
    checkpointer.load_newest(lambda text: None)
    for step, left in ((7, [7, 8]), (8, [8])):
        checkpointer.begin(step, {})
        assert [(saved.error, saved.cleanup_error) for saved in checkpointer.wait()] == [(None, None)]
        assert [c.step for c in run.checkpoints.committed()] == left
    checkpointer.close()
    assert run.checkpoints.damage(run.checkpoints.committed()[0]) == ""


def _copy_of(run: RunDir, path: Path) -> RunDir:
    shutil.copytree(run.path, path)
    return RunDir(str(path))


def _begun(spec, run: RunDir, built: JaxTrainer) -> tuple[int | None, list[str]]:
    """The step that is gone on from, and what was said."""
    messages: list[str] = []
    checkpoint = JaxCheckpointer(run, built).load_newest(messages.append)
    return checkpoint.step if checkpoint else None, messages


def _loaded(spec, run: RunDir, world: World) -> tuple[JaxTrainer, JaxCheckpointer]:
    built = JaxTrainer(spec, world, 20, open_source(spec))
    checkpointer = JaxCheckpointer(run, built)
    assert checkpointer.load_newest(lambda text: None) is not None
    return built, checkpointer


KILLING = """
import os, signal, sys
from embark.spec import load_spec
from embark.trainers import train

class KillAt:
    def emit(self, event):
        if event.kind == "step" and event.values["step"] == 12:
            os.kill(os.getpid(), signal.SIGKILL)
    def close(self):
        pass

train(load_spec(sys.argv[1]), [KillAt()])
"""


def _killed_in_a_process_of_its_own(spec) -> None:
    path = Path(spec.store.root, "killed.toml")
    path.write_text(to_toml(spec))
    settings = {
        "JAX_NUM_CPU_DEVICES": "8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(SOURCES),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run([sys.executable, "-c", KILLING, path], env=os.environ | settings, capture_output=True,
                          text=True, timeout=HANG_S)
    assert done.returncode == -signal.SIGKILL, done.stderr
