"""A run on this machine: it outlives who launched it, is followed from elsewhere, and is ended with a checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from limits import HANG_S

from embark.cli.console import Console
from embark.cli.launch import launch_run
from embark.cli.status import cancel as cancel_command
from embark.cli.status import logs as logs_command
from embark.cli.status import status as status_command
from embark.errors import Fault, Interrupted, UserError
from embark.launch import supervisor
from embark.launch.backend import LaunchRequest
from embark.launch.backends.local import Local
from embark.launch.launching import prepare_launch, submit_launch
from embark.launch.run_registry import find_run, launch_lock, list_runs
from embark.launch.shell import CommandResult, Shell
from embark.spec import load_spec, to_toml

ROOT = Path(__file__).parents[4]
SMALL = ["place.device=cpu", "model.num_tables=2", "model.rows_per_table=50", "train.batch_size=16",
         "data.num_train_samples=320", "data.num_eval_samples=32", "watch.tensorboard=false"]
SAVES = ["sh", "-c", "trap 'touch saved; exit 75' TERM; echo up; while true; do sleep 0.05; done"]
DEAF = ["sh", "-c", "trap '' TERM; setsid sh -c 'echo $$ > rank; while true; do sleep 0.1; done' & wait"]


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _warm(monkeypatch, warm_python):
    """Runs are forked from a process that has imported torch."""
    monkeypatch.setattr("embark.launch.backends.local.sys", SimpleNamespace(executable=warm_python))


def launched(name: str, *settings: str):
    spec = load_spec("laptop", [f"name={name}", *SMALL, *settings])
    assert launch_run(Console(quiet=True), spec, yes=False, dry_run=False) == 0
    return find_run(name).handle


def local() -> Local:
    return Local(Shell(), notify=lambda _: None)


def until(is_so) -> None:
    end_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def test_only_the_fields_that_the_user_set_are_handed_over(monkeypatch):
    spec = load_spec("laptop", ["name=small", *SMALL])
    place = local()
    handle = place.handle_of(spec)
    monkeypatch.setattr(place, "_supervise", lambda *_: CommandResult(1))
    with pytest.raises(Fault, match="did not start"):
        place.submit(LaunchRequest(spec, handle))
    handed_over = Path(str(handle.where["folder"]), "spec.toml").read_text()
    assert handed_over == to_toml(spec, only_set=True) != to_toml(spec)


@pytest.mark.slow
def test_a_run_trains_to_its_end_and_is_followed_there(tmp_path, capsys):
    (tmp_path / "embark.py").write_text("raise SystemExit('a file of the user, not the package')")
    launched("small", "train.num_steps=4")
    assert logs_command("small", follow=True, console=Console()) == 0
    output = capsys.readouterr().out
    assert " rank 0 | " in output
    assert "succeeded: took" in output
    ends = [json.loads(line) for line in (tmp_path / "runs/small/events.jsonl").read_text().splitlines()]
    assert ends[-1]["outcome"] == "done"
    assert status_command("small", console=Console(json=True)) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "succeeded"


@pytest.mark.slow
def test_a_run_outlives_its_launcher_and_saves_when_it_is_cancelled(tmp_path, capsys, warm_python):
    script = ("import sys; sys.executable = sys.argv.pop(1); from embark.cli.console import Console; "
              "from embark.cli.launch import launch_run; "
              "from embark.spec import load_spec; "
              "launch_run(Console(), load_spec('laptop', sys.argv[1:]), yes=False, dry_run=False)")
    settings = ["name=long", *SMALL, "train.num_steps=1000000", "store.checkpoint_every=0"]
    # A terminal that closes: its whole session is told to hang up.
    launcher = subprocess.Popen([sys.executable, "-c", script, warm_python, *settings], start_new_session=True,
                                stdout=subprocess.PIPE, text=True)
    assert "launched" in launcher.communicate(timeout=HANG_S)[0]
    with pytest.raises(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGHUP)
    handle = find_run("long").handle
    with pytest.raises(UserError, match="already runs on this machine"):
        launch_run(Console(), load_spec("laptop", settings), yes=False, dry_run=False)
    events = tmp_path / "runs/long/events.jsonl"
    until(lambda: events.exists() and '"step"' in events.read_text())
    assert local().status(handle).state == "running"
    assert cancel_command("long", yes=True, console=Console()) == 0
    output = capsys.readouterr().out
    assert "last complete checkpoint: step-" in output
    status = local().status(handle)
    assert status.state == "gone"
    assert "stopped after" in status.reason


def test_one_that_was_killed_is_reported_and_not_taken_for_running(tmp_path):
    handle = launched("killed", "train.num_steps=1000000")
    pid = json.loads((Path(str(handle.where["folder"])) / "started.json").read_text())["pid"]
    os.killpg(pid, signal.SIGKILL)
    until(lambda: local().status(handle).state != "running")
    status = local().status(handle)
    assert status.state == "failed"
    assert "resumes it from the last checkpoint" in status.fix


@pytest.mark.slow
@pytest.mark.usefixtures("_warm")
def test_a_wrong_spec_is_reported_by_its_exit_code(tmp_path, capsys):
    (tmp_path / "runs").write_text("in the way")
    handle = launched("wrong")
    until(lambda: local().status(handle).has_ended)
    status = local().status(handle)
    assert status.state == "failed"
    assert "exit code 64" in status.reason
    assert any("store.root" in line.text for line in local().logs(handle))
    assert status_command("wrong", console=Console()) == 1


def test_a_process_number_that_was_given_to_another_is_not_ours(tmp_path):
    handle = local().handle_of(load_spec("laptop", ["name=old", *SMALL]))
    folder = Path(str(handle.where["folder"]))
    folder.mkdir(parents=True)
    (folder / "started.json").write_text(json.dumps({"pid": os.getpid(), "mark": "another boot 1", "time_s": 0.0}))
    assert local().status(handle).state == "failed"
    assert local().cancel(handle).removed == ()


@pytest.mark.slow
@pytest.mark.usefixtures("_warm")
def test_the_lines_of_several_ranks_are_reported_apart(tmp_path):
    spec = load_spec("laptop", ["name=two", *SMALL, "train.num_steps=2"])
    handle = local().handle_of(spec)
    handle = replace(handle, where={**handle.where, "num_ranks": 2})
    local().submit(LaunchRequest(spec, handle))
    lines = list(local().logs(handle, follow=True))
    assert local().status(handle).state == "succeeded"
    assert "rank 0" in {line.source for line in lines}
    assert [line.time_ns for line in lines] == sorted(line.time_ns for line in lines)
    assert min(line.time_ns for line in lines) > 0
    assert not any("[default" in line.text for line in lines)


@pytest.mark.parametrize(("device", "num_ranks"), [("auto", 4), ("cpu", 1), ("jax", 1)])
def test_a_rank_for_each_gpu_but_one_process_of_jax(monkeypatch, device, num_ranks):
    monkeypatch.setattr("embark.launch.backends.local.num_gpus", lambda: 4)
    spec = load_spec("quickstart", [f"place.device={device}"])
    assert Local(Shell(), notify=print).handle_of(spec).where["num_ranks"] == num_ranks


def test_a_dry_run_says_the_command_and_leaves_nothing(tmp_path, capsys):
    assert launch_run(Console(), load_spec("laptop", ["name=dry", *SMALL]), yes=False, dry_run=True) == 0
    assert "-m embark train" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_run_saves_and_ends_with_its_supervisor(tmp_path, monkeypatch):
    monkeypatch.setattr(Local, "_command", lambda self, handle: SAVES)
    handle = launched("orphan")
    folder = Path(str(handle.where["folder"]))
    until(lambda: b"up" in (folder / "log").read_bytes())
    os.kill(json.loads((folder / "started.json").read_text())["pid"], signal.SIGKILL)
    until(lambda: (Path.cwd() / "saved").exists())
    status = local().status(handle)
    assert status.state == "failed"
    assert "embark launch resumes it" in status.fix


def test_a_cancel_that_has_to_kill_ends_every_process(tmp_path, monkeypatch):
    monkeypatch.setattr(Local, "_command", lambda self, handle: DEAF)
    handle = launched("deaf", "place.grace_s=0.3")
    until(lambda: Path("rank").exists() and Path("rank").read_text())
    rank = int(Path("rank").read_text())
    assert "killed after its grace period" in local().cancel(handle).removed[0]
    until(lambda: not supervisor.mark_of(rank))
    until(lambda: not supervisor.is_alive(handle.folder))
    assert local().status(handle).state == "gone"


def test_of_two_launches_at_once_one_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(Local, "_command", lambda self, handle: SAVES)
    specs = [load_spec("laptop", ["name=twice", *SMALL, f"train.learning_rate={rate}"]) for rate in (0.1, 0.2)]
    prepared = [prepare_launch(spec, Shell(), print) for spec in specs]
    run = submit_launch(prepared[0])
    with pytest.raises(UserError, match="already runs"):
        submit_launch(prepared[1])
    assert find_run("twice") == run
    assert load_spec(str(run.handle.folder / "spec.toml")).train.learning_rate == 0.1
    with launch_lock(run.handle), pytest.raises(UserError, match="is being launched by another command"):
        submit_launch(prepared[1])
    assert local().cancel(run.handle).removed


@pytest.mark.parametrize("is_after", [False, True])
def test_ctrl_c_during_a_launch_says_what_may_run_and_how_to_end_it(tmp_path, monkeypatch, is_after):
    """There is one command: the supervisor that outlives this one."""
    original = Shell.change

    def cut(self, *words, **options):
        if is_after:
            original(self, *words, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Shell, "change", cut)
        with pytest.raises(Interrupted, match="the processes of clicks on this machine") as caught:
            launched("clicks", "train.num_steps=1000000")
    assert caught.value.fix == "embark cancel clicks"
    folder = tmp_path / "data" / "embark" / "runs" / "local" / "clicks"
    end_s = time.monotonic() + HANG_S
    while is_after and not (folder / "started.json").exists():
        assert time.monotonic() < end_s
        time.sleep(0.05)
    for _ in range(2):
        if list_runs().runs:
            assert cancel_command("clicks", yes=True, console=Console(quiet=True)) == 0
    if list_runs().runs:
        assert status_command("clicks", console=Console(quiet=True)) == 0
