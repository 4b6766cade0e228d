"""TorchX's own `local_cwd` scheduler runs the rendered component on this machine."""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import pytest
from limits import HANG_S

from embark.cli.console import Console
from embark.cli.launch import launch_run
from embark.cli.status import cancel as cancel_command
from embark.cli.status import status as status_command
from embark.errors import Interrupted, MissingPackage
from embark.launch.backend import LogLine
from embark.launch.backends.torchx import TorchXLocal, by_replica
from embark.launch.run_registry import find_run, list_runs
from embark.launch.shell import Shell
from embark.spec import load_spec
from embark.store import RunDir

SETTINGS = [
    "name=clicks", "place.target=torchx", "place.device=cpu", "model.num_tables=2", "model.rows_per_table=100",
    "model.embedding_dim=8", "model.bottom_mlp=[8]", "model.top_mlp=[8]", "data.num_train_samples=2048",
    "data.num_eval_samples=64", "train.batch_size=64", "train.num_steps=20", "watch.every=1", "watch.tensorboard=false",
]


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _warm(monkeypatch, warm_python):
    """Replicas are forked from a process that has imported torch."""
    monkeypatch.setattr("embark.launch.backends.torchx.sys", SimpleNamespace(executable=warm_python))


def spec_of(tmp_path, *settings: str):
    return load_spec("quickstart", [*SETTINGS, f"store.root={tmp_path}/runs", *settings])


def place() -> TorchXLocal:
    return TorchXLocal(Shell(), notify=lambda _: None)


@pytest.mark.slow
@pytest.mark.usefixtures("_warm")
def test_two_replicas_train_together_and_their_lines_say_which(tmp_path):
    assert launch_run(Console(quiet=True), spec_of(tmp_path, "place.nodes=2"), yes=False, dry_run=False) == 0
    run = find_run("clicks")
    assert run.handle.backend == "torchx-local"
    lines = list(place().logs(run.handle, follow=True))
    status = place().status(run.handle)
    assert status.state == "succeeded", [line.text for line in lines[-20:]]
    assert any(line.source == "torchx" and "local_cwd://torchx/clicks-" in line.text for line in lines)
    # which machine has rank 0 depends on who comes first
    assert any(line.index in (0, 1) and "step 20/20" in line.text and line.time_ns for line in lines)
    events = [json.loads(line) for line in (tmp_path / "runs" / "clicks" / "events.jsonl").read_text().splitlines()]
    assert [event["world_size"] for event in events if event["event"] == "start"] == [2]


def test_lines_that_torchx_printed_in_parts_are_put_together():
    printed = ["torchx INFO started", "\x1b[32mtrainer/0\x1b[0m step 1", "trainer/0 step 2trainer/1 step",
               "trainer/0 0/20", "", "trainer/1 lost"]
    lines = list(by_replica(LogLine(time_ns, "", text) for time_ns, text in enumerate(printed)))
    assert [(line.index, line.text) for line in lines] == [
        (None, "torchx INFO started"), (0, "step 1"), (1, "step"), (0, "step 20/20"), (None, ""), (1, "lost")]
    cut = [LogLine(3, "", "trainer/1 endstrainer/0 here")]
    assert [(line.source, line.text) for line in by_replica(cut)] == [("machine 0", "here"), ("machine 1", "ends")]


@pytest.mark.slow
@pytest.mark.usefixtures("_warm")
def test_cancel_reaches_the_ranks_through_torchx_and_leaves_a_complete_checkpoint(tmp_path, capsys):
    settings = ["train.num_steps=1000000", "store.checkpoint_every=0"]
    assert launch_run(Console(quiet=True), spec_of(tmp_path, *settings), yes=False, dry_run=False) == 0
    events = tmp_path / "runs" / "clicks" / "events.jsonl"
    end_s = time.monotonic() + HANG_S
    while not events.exists() or '"step"' not in events.read_text():
        assert time.monotonic() < end_s
        time.sleep(0.2)
    assert cancel_command("clicks", yes=True, console=Console()) == 0
    (saved,) = RunDir(str(tmp_path / "runs" / "clicks")).checkpoints.committed()
    assert f"last complete checkpoint: {saved.name}" in capsys.readouterr().out
    assert place().status(find_run("clicks").handle).state == "gone"


def test_a_dry_run_says_the_torchx_command(tmp_path, capsys):
    assert launch_run(Console(), spec_of(tmp_path), yes=False, dry_run=True) == 0
    output = capsys.readouterr().out
    assert "-m torchx.cli.main run --workspace '' --scheduler local_cwd" in output
    assert "cloud_component.py:train" in output
    assert not list_runs().runs


def test_without_torchx_it_gets_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchx", None)
    monkeypatch.setattr("embark.launch.backends.torchx.find_spec", lambda name: None)
    with pytest.raises(MissingPackage) as caught:
        launch_run(Console(quiet=True), spec_of(tmp_path), yes=False, dry_run=False)
    assert "torchx-nightly" in caught.value.fix
    assert not list_runs().runs


@pytest.mark.parametrize("is_after", [False, True])
def test_ctrl_c_as_it_starts_says_what_may_run_and_how_to_end_it(tmp_path, monkeypatch, is_after):
    """There is one command: the supervisor that outlives this one."""
    original = Shell.change

    def cut(self, *words, **options):
        if is_after:
            original(self, *words, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Shell, "change", cut)
        with pytest.raises(Interrupted, match="the processes of clicks on this machine") as caught:
            launch_run(Console(quiet=True), spec_of(tmp_path, "train.num_steps=1000000"), yes=False, dry_run=False)
    assert caught.value.fix == "embark cancel clicks"
    folder = tmp_path / "data" / "embark" / "runs" / "torchx" / "clicks"
    end_s = time.monotonic() + HANG_S
    while is_after and not (folder / "started.json").exists():
        assert time.monotonic() < end_s
        time.sleep(0.05)
    for _ in range(2):
        if list_runs().runs:
            assert cancel_command("clicks", yes=True, console=Console(quiet=True)) == 0
    if list_runs().runs:
        assert status_command("clicks", console=Console(quiet=True)) == 0
