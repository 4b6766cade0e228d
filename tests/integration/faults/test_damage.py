"""What was damaged is named and passed over: the checkpoint before it is used, and the run ends well."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.faults.conftest import Run

pytestmark = pytest.mark.slow


def cut(folder: Path) -> None:
    shard = folder / "rank-00001-00.bin"
    shard.write_bytes(shard.read_bytes()[:-1])


def flip(name: str) -> Callable[[Path], None]:
    def flipped(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 0x10
        (folder / name).write_bytes(data)

    return flipped


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a shard cut short": (cut, r"step-000000010/rank-00001-00.bin: [\d,]+ bytes instead of [\d,]+"),
    "a byte flipped": (flip("rank-00000-00.bin"), r"step-000000010/rank-00000-00.bin: its bytes changed"),
    "a file gone": (lambda folder: (folder / "rank-00000-00.bin").unlink(),
                    r"step-000000010 is damaged; skipped: .*there is no .*rank-00000-00.bin"),
    "the mark gone": (lambda folder: (folder / "commit.json").unlink(),
                      r"step-000000010 has no commit record; skipped"),
    "the mark garbled": (lambda folder: (folder / "commit.json").write_bytes(b'{"step": 10, "fi'),
                         r"step-000000010 is damaged; skipped: its commit record cannot be read"),
    "the index damaged": (flip("index.json"), r"step-000000010/index.json: its bytes changed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_used(saved, undisturbed, damage):
    spoil, message = DAMAGES[damage]
    spoil(saved.path / "checkpoints" / "step-000000010")
    assert saved.ends(2) == [0, 0], saved.output()
    assert re.search(message, saved.warnings()), saved.warnings()
    assert [e["step"] for e in saved.events("resume")] == [5]
    assert {step: set(result) for step, result in saved.losses().items()} == {
        step: set(result) for step, result in undisturbed.losses().items()}
    assert saved.committed() == [10, 12]
    assert saved.unfinished() == []


def test_with_all_damaged_it_stops_and_keeps_everything(saved):
    for folder in (saved.path / "checkpoints").iterdir():
        cut(folder)
    before = {path: path.read_bytes() for path in (saved.path / "checkpoints").rglob("*") if path.is_file()}
    assert saved.ends(2) == [64, 64], saved.output()
    for step in (5, 10):
        assert re.search(rf"step-{step:09d}: .*rank-00001-00.bin: [\d,]+ bytes instead of", saved.output())
    assert {path: path.read_bytes() for path in (saved.path / "checkpoints").rglob("*") if path.is_file()} == before


def test_a_damaged_one_never_counts_as_the_one_to_keep(saved):
    """It has the highest step, and a run that keeps one would else remove what it has just saved."""
    cut(saved.path / "checkpoints" / "step-000000010")
    ranks = saved.start(2, "store.keep_checkpoints=1", "store.checkpoint_every=7", hook="integration.faults.hooks:slow",
                        method="embark.trainers.torch.engines.pipeline:PipelineEngine.step", word="",
                        seconds=0.1, mark=os.devnull)
    ranks.until(lambda: saved.events("save")[-1]["step"] == 7)
    assert saved.committed() == [7, 10]  # the damaged one stays until step 10 is saved again
    assert ranks.codes() == [0, 0], saved.output()


def test_sizes_alone_find_a_shard_cut_short(saved):
    cut(saved.path / "checkpoints" / "step-000000010")
    assert saved.ends(2, "store.verify=sizes") == [0, 0], saved.output()
    assert "rank-00001-00.bin is missing or truncated" in saved.warnings()
    assert [e["step"] for e in saved.events("resume")] == [5]


@pytest.fixture(scope="module")
def original(zygote, tmp_path_factory) -> Run:
    run = Run(zygote, tmp_path_factory.mktemp("original"))
    assert run.ends(2, "train.num_steps=10") == [0, 0], run.output()
    assert run.committed() == [5, 10]
    return run


@pytest.fixture
def saved(run, original) -> Run:
    """A copy of a run that has saved twice, to be spoilt."""
    shutil.copytree(original.path, run.path)
    return run
