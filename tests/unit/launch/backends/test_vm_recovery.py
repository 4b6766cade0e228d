"""Machines that are lost: which runs bring them back, and which do not spend money on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cloud_programs import Clouds
from launch_shells import use_shell
from vm_launches import launched, machines, spec_for

from embark.catalog import load_catalog
from embark.cli.console import Console
from embark.cli.launch import launch, launch_run
from embark.errors import Interrupted
from embark.launch.backends.vm import machine_files
from embark.launch.launching import recover_until_ended
from embark.launch.run_registry import find_run
from embark.render.job import make_job

pytestmark = pytest.mark.usefixtures("vm_home")


def test_recover_starts_a_spot_machine_that_google_stopped(tmp_path):
    clouds, place, handle = launched("gcp", tmp_path, "place.spot=true")
    clouds.made["machine dlrm-1"]["status"] = "TERMINATED"
    status = place.status(handle)
    assert (status.state, status.is_recoverable) == ("lost", True)
    assert "machine 1 is gone (TERMINATED)" in status.reason
    assert "embark launch dlrm --supervise" in status.fix
    place.recover(handle)
    assert clouds.made["machine dlrm-1"]["status"] == "RUNNING"
    assert place.status(handle).state == "running"


def test_recover_creates_a_spot_machine_that_azure_deleted(tmp_path):
    clouds, place, handle = launched("azure", tmp_path, "place.spot=true")
    clouds._gone("machine dlrm-1")
    clouds.supervisors.pop("52.0.0.1")
    assert place.status(handle).state == "lost"
    assert clouds.names("machine") == ["dlrm-0"]
    place.recover(handle)
    assert clouds.names("machine") == ["dlrm-0", "dlrm-1"]
    assert place.status(handle).state == "running"


def test_the_others_restart_when_the_first_machine_is_replaced(tmp_path):
    clouds, place, handle = launched("aws", tmp_path, "place.spot=true")
    clouds._gone("machine i-0")
    before = len(clouds.changes)
    place.recover(handle)
    lines = [words[-1] for words in clouds.changes[before:] if words[0] == "ssh"]
    assert sum("supervisor.py start" in line for line in lines) == 2
    assert [line for line in lines if "supervisor.py restart" in line], "the other one looks for it where it was"
    files = machine_files(make_job(spec_for("aws", tmp_path), load_catalog()), 1, "10.0.0.2")
    assert "MASTER=10.0.0.2" in files["node.sh"]


def test_an_on_demand_machine_that_is_gone_is_not_replaced(tmp_path):
    clouds, place, handle = launched("aws", tmp_path)
    clouds._gone("machine i-1")
    status = place.status(handle)
    assert (status.state, status.is_recoverable, len(machines(clouds))) == ("failed", False, 1)
    assert "embark launch" in status.fix


def test_an_elastic_run_trains_on_without_a_machine_unless_it_is_the_first(tmp_path):
    elastic = ("place.nodes={min=2, max=3}", "train.batch_size=1056")
    clouds, place, handle = launched("aws", tmp_path, *elastic)
    clouds._gone("machine i-2")
    status = place.status(handle)
    assert (status.state, status.is_recoverable) == ("running", False)
    assert "machine 2 is gone; the others train on, 2 of 3 machines" in status.reason
    clouds._gone("machine i-0")
    assert place.status(handle).state == "failed"
    clouds, place, handle = launched("gcp", tmp_path, *elastic, "place.spot=true", "name=spot")
    clouds.made["machine spot-2"]["status"] = "TERMINATED"
    status = place.status(handle)
    assert (status.state, status.is_recoverable) == ("lost", True)  # --supervise re-creates it
    assert "the others train on" in status.reason


def test_a_run_that_has_finished_is_not_recoverable(tmp_path):
    clouds, place, handle = launched("gcp", tmp_path, "place.spot=true")
    for name in ("dlrm-0", "dlrm-1"):
        clouds.made[f"machine {name}"]["status"] = "TERMINATED"  # each powers off half an hour after the run
    run = tmp_path / "runs/dlrm"
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text(json.dumps({"event": "end", "outcome": "done", "time_s": 4e9}) + "\n")
    status = place.status(handle)
    assert (status.state, status.is_recoverable) == ("succeeded", False)


def test_where_the_outcome_cannot_be_read_no_money_is_spent_on_a_guess(tmp_path, monkeypatch):
    clouds, place, handle = launched("gcp", tmp_path, "place.spot=true")
    clouds.made["machine dlrm-1"]["status"] = "TERMINATED"
    monkeypatch.setattr("embark.launch.backends.machines.run_outcome", lambda *_: None)
    status = place.status(handle)
    assert "cannot be read from here" in status.reason
    assert not status.is_recoverable


def test_supervision_recreates_lost_spot_machines_until_the_run_ends(tmp_path, monkeypatch):
    clouds = Clouds()
    use_shell(monkeypatch, lambda: clouds)
    launch_run(Console(quiet=True), spec_for("gcp", tmp_path, "place.spot=true"), yes=True, dry_run=False)
    turns = iter(["preempt", "wait", "end"])

    def sleep(_: float) -> None:
        turn = next(turns, "")
        if turn == "preempt":
            clouds.made["machine dlrm-1"]["status"] = "TERMINATED"
        if turn == "end":
            assert clouds.made["machine dlrm-1"]["status"] == "RUNNING", "it was started again"
            for one in clouds.supervisors.values():
                one.update(is_alive=False, code=0, ended_s=2.0)

    monkeypatch.setattr("embark.launch.launching.time.sleep", sleep)
    messages: list[str] = []
    assert recover_until_ended(find_run("dlrm"), clouds, messages.append).state == "succeeded"
    assert any("lost: machine 1 is gone (TERMINATED)" in line for line in messages)


def test_ctrl_c_ends_the_supervision_and_not_the_run(tmp_path, monkeypatch):
    clouds = Clouds()
    use_shell(monkeypatch, lambda: clouds)
    launch_run(Console(quiet=True), spec_for("gcp", tmp_path, "place.spot=true"), yes=True, dry_run=False)
    before = list(clouds.changes)

    def stop(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("embark.launch.launching.time.sleep", stop)
    with pytest.raises(Interrupted, match="keeps running") as raised:
        launch("dlrm", supervise=True, console=Console(quiet=True))
    assert "embark launch dlrm --supervise" in raised.value.fix
    assert clouds.changes == before


def test_recover_gives_the_run_to_a_machine_that_rebooted(tmp_path):
    clouds, place, handle = launched("gcp", tmp_path)
    clouds.supervisors["dlrm-0"]["is_alive"] = False
    status = place.status(handle)
    assert (status.state, status.is_recoverable) == ("lost", True)
    assert "rebooted, or they were killed" in status.reason
    assert not clouds.supervisors["dlrm-0"]["is_alive"]
    place.recover(handle)
    assert clouds.supervisors["dlrm-0"]["is_alive"]


def test_a_launch_that_was_interrupted_is_not_recoverable(tmp_path):
    clouds, place, handle = launched("aws", tmp_path, "place.spot=true")
    (Path(str(handle.where["folder"])) / "submitted.json").unlink()
    clouds._gone("machine i-1")
    status = place.status(handle)
    assert "interrupted" in status.reason
    assert len(machines(clouds)) == 1
