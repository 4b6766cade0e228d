"""A disk that fills up costs no checkpoint: training goes on with a warning, and what was saved stays complete."""

from __future__ import annotations

import random
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from integration.faults.conftest import Run

from embark.__main__ import run as main

pytestmark = pytest.mark.slow


def test_a_full_disk_is_reported_and_costs_no_checkpoint(zygote, tmp_path, disk, undisturbed):
    run = Run(zygote, tmp_path, name="disk", sets=("store.checkpoint_every=2",))
    assert run.ends(2) == [70, 70], run.output()
    assert (run.committed(), run.unfinished()) == ([2, 4], [])
    for step in (6, 8, 10):
        assert f"step {step} could not be saved: could not write {disk}/checkpoints/step-{step:09d}/" in run.warnings()
    assert "no space left on device. Training continues; the previous checkpoint is intact" in run.warnings()
    assert run.last_step() == 12
    assert f"error: could not write {disk}/checkpoints/step-000000012/" in run.output()
    assert "fix: free some space, or point store.root at a larger disk" in run.output()

    subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
    assert run.ends(2) == [0, 0], run.output()
    assert run.committed() == [10, 12]
    assert {step: set(result) for step, result in run.losses().items()} == {
        step: set(result) for step, result in undisturbed.losses().items()}


def test_a_disk_filled_to_the_last_byte_stops_nothing(zygote, tmp_path, disk):
    """By another program: not even a line of events fits any more, until there is room again."""
    run = Run(zygote, tmp_path, name="disk", sets=("train.num_steps=100000", "train.num_epochs=10000",
                                                   "watch.tensorboard=true", "store.keep_checkpoints=1"))
    ranks = run.start(2)
    ranks.until(lambda: bool(run.events("save")))
    saved, filling = run.committed(), disk / "filling"
    fill(filling)
    ranks.until(lambda: run.output().count("could not be saved") >= 2)
    assert run.committed() == saved
    filling.unlink()
    ranks.until(lambda: run.committed() != saved)
    ranks.kill(signal.SIGTERM)
    assert ranks.codes() == [75, 75], run.output()
    assert sorted(run.losses()) == list(range(1, run.committed()[-1] + 1))


def test_a_disk_that_stays_full_ends_the_run_with_70(zygote, tmp_path, disk):
    run = Run(zygote, tmp_path, name="disk", sets=("train.num_steps=100000", "train.num_epochs=10000"))
    ranks = run.start(2)
    ranks.until(lambda: bool(run.events("save")))
    fill(disk / "filling")
    ranks.until(lambda: "could not be saved" in run.output())
    ranks.kill(signal.SIGTERM)
    assert ranks.codes() == [70, 70], run.output()
    assert "no space left on device" in run.output()
    assert "Traceback" not in run.output()
    assert run.committed()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_preparing_onto_a_full_disk_is_one_line_and_goes_on(tmp_path, disk, capsys, monkeypatch, num_workers):
    """Each size of the disk ends another writer: the journal, the runs of ids, the maps, the parts."""
    monkeypatch.setattr("embark.data.prepare.prepare.SMALL_BYTES", 0)  # so that several processes share the work
    monkeypatch.setattr("embark.data.prepare.prepare.MIN_SEGMENT_BYTES", 100_000)
    chance = random.Random(0)
    lines = [f"{i % 2},{chance.random():.4f},u{chance.randrange(9_000)},s{chance.randrange(300)}"
             for i in range(40_000)]
    (tmp_path / "in.csv").write_text("label,price,user,shop\n" + "\n".join(lines) + "\n")
    (tmp_path / "spec.toml").write_text(f"""
[model]
embedding_dim = 8
bottom_mlp = [8]
top_mlp = [8]
[data]
kind = "prepared"
path = "{disk}/out"
[data.prepare]
input = "in.csv"
num_workers = {num_workers}
""")
    codes = []
    for size in (8, 24, 200, 600, 900, 10_000):
        subprocess.run(["mount", "-o", f"remount,size={size}k", str(disk)], check=True)
        codes.append(main(["data", "prepare", str(tmp_path / "spec.toml")]))
        said = capsys.readouterr().err
        if codes[-1]:
            assert said.count("error: ") == 1, said
            assert "no space left on device" in said
            assert "fix: free some space, or write to a larger disk (data.path)" in said
            assert "Traceback" not in said
    assert codes[-1] == 0
    assert set(codes[:4]) == {70}


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (65536, 4096, 64, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
