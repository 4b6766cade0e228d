"""The state of plain machines and what they cost; and their end."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from cloud_programs import Clouds
from launch_shells import use_shell
from vm_launches import CLOUDS, launched, machines, spec_for

from embark.cli.console import Console
from embark.cli.cost import cost
from embark.cli.diagnose import diagnose
from embark.cli.launch import launch_run
from embark.cli.status import logs as logs_command
from embark.cli.status import status as status_command
from embark.errors import Interrupted
from embark.formatting import format_usd

pytestmark = pytest.mark.usefixtures("vm_home")


def test_a_run_that_failed_says_so_and_what_its_machines_still_cost(tmp_path):
    clouds, place, handle = launched("gcp", tmp_path, "place.spot=true")
    for supervisor in clouds.supervisors.values():
        supervisor.update(is_alive=False, code=64, ended_s=2.0)
    status = place.status(handle)
    assert (status.state, "exit code 64" in status.reason) == ("failed", True)
    assert "2 machines still running at $" in status.reason


def test_of_machines_that_are_off_no_price_is_reported(tmp_path):
    clouds, place, handle = launched("gcp", tmp_path, "place.spot=true")
    for supervisor in clouds.supervisors.values():
        supervisor.update(is_alive=False, code=64, ended_s=2.0)
    assert f"2 machines still running at {format_usd(handle.usd_per_hour)} an hour" in place.status(handle).reason
    clouds.made["machine dlrm-1"]["status"] = "TERMINATED"
    assert f"1 machine still running at {format_usd(handle.usd_per_hour / 2)} an hour" in place.status(handle).reason


def test_a_machine_that_is_starting_is_waited_for_and_not_taken_for_lost(tmp_path):
    clouds, place, handle = launched("gcp", tmp_path)
    clouds.made["machine dlrm-1"]["status"] = "STAGING"
    status = place.status(handle)
    assert (status.state, status.reason) == ("pending", "its machines are starting")


@pytest.mark.parametrize("cloud", CLOUDS)
def test_commands_that_read_change_nothing(cloud, tmp_path, monkeypatch):
    clouds = Clouds()
    use_shell(monkeypatch, lambda: clouds)
    monkeypatch.setattr("embark.launch.costs.Shell", lambda: clouds)
    monkeypatch.setattr("embark.diagnose.report.Shell", lambda: clouds)
    launch_run(Console(quiet=True), spec_for(cloud, tmp_path, "place.spot=true"), yes=True, dry_run=False)
    lost = clouds.names("machine")[1]

    def lose() -> None:
        clouds._gone(f"machine {lost}")

    for happens in (lambda: None, lose):
        happens()
        before, files = list(clouds.changes), contents(tmp_path)
        status_command("dlrm", console=Console(quiet=True))
        status_command("", console=Console(quiet=True))
        logs_command("dlrm", console=Console(quiet=True))
        cost("dlrm", console=Console(quiet=True))
        diagnose("dlrm", console=Console(quiet=True))
        assert clouds.changes == before
        assert contents(tmp_path) == files
    assert clouds.names("machine") != []


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("cloud", "result", "state"), [
    ("azure", {"powerState": "VM deallocated"}, "stopped"), ("azure", {"powerState": "VM starting"}, "starting"),
    ("azure", {"provisioningState": "Deleting"}, "gone"), ("gcp", {"status": "STAGING"}, "starting"),
    ("gcp", {"status": "STOPPING"}, "stopped"), ("gcp", {"status": "SUSPENDED"}, "stopped"),
    ("aws", {"State": {"Name": "shutting-down"}}, "gone"), ("aws", {"State": {"Name": "stopped"}}, "stopped"),
])
def test_every_cloud_s_words_for_a_machine_s_state_are_read(cloud, result, state, tmp_path):
    clouds, place, handle = launched(cloud, tmp_path)
    clouds.made[f"machine {'i-0' if cloud == 'aws' else 'dlrm-0'}"].update(result)
    found = place._cloud(handle, place._job(handle)).machines()
    assert [machine.state for machine in found] == [state, "running"]


def test_of_two_machines_with_one_number_the_one_that_lives_counts(tmp_path):
    clouds, place, handle = launched("aws", tmp_path)
    clouds.made["machine i-9"] = {**clouds.made["machine i-0"], "InstanceId": "i-9", "State": {"Name": "terminated"},
                                  "LaunchTime": "2026-11-15T23:00:00Z", "StateTransitionReason":
                                  "Server.SpotInstanceTermination (2026-11-15 23:10:00 GMT)",
                                  "StateReason": {"Code": "Server.SpotInstanceTermination", "Message": "taken"}}
    found = place._cloud(handle, place._job(handle)).machines()
    assert [machine.id for machine in found] == ["i-0", "i-1"]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_ctrl_c_while_the_ranks_save_says_that_the_machines_are_there_yet(cloud, tmp_path, monkeypatch):
    clouds, place, handle = launched(cloud, tmp_path)

    def stopped_by_the_user(hosts, grace_s):
        raise KeyboardInterrupt

    monkeypatch.setattr(place._ssh, "stop", stopped_by_the_user)
    with pytest.raises(Interrupted, match="machines still exist") as raised:
        place.cancel(handle)
    assert raised.value.fix == "embark cancel dlrm deletes them"
    assert len(machines(clouds)) == 2


@pytest.mark.parametrize("cloud", CLOUDS)
def test_cancel_stops_the_ranks_then_deletes_the_machines(cloud, tmp_path):
    clouds, place, handle = launched(cloud, tmp_path)
    done = place.cancel(handle)
    assert clouds.paid() == []
    stops = [index for index, words in enumerate(clouds.changes) if "supervisor.py stop" in words[-1]]
    ends = [index for index, words in enumerate(clouds.changes)
            if "terminate-instances" in words or "delete" in words]
    assert len(stops) == 2
    assert max(stops) < min(ends)
    assert done.removed == ("dlrm-0", "dlrm-1")
    for thing in done.remains[:-1]:
        for line in thing.remove.split("; "):
            clouds.change(shlex.split(line.replace('"$(', "sg-1 #"), comments=True))
    assert clouds.made == {}, "what was said to be left is all that was"
    assert not Path(str(handle.where["folder"])).exists()
    assert place.status(handle).state == "gone"
    assert place.cancel(handle).removed == ()


def test_machines_that_do_not_answer_are_ended_all_the_same_with_a_message(tmp_path):
    clouds, place, handle = launched("gcp", tmp_path, "place.grace_s=1")
    clouds.is_ssh_away = True
    place._ssh.stop = lambda hosts, grace_s: list(hosts)  # type: ignore[method-assign]
    messages: list[str] = []
    place._notify = messages.append
    place.cancel(handle)
    assert clouds.paid() == []
    assert "dlrm-0, dlrm-1: killed after the grace period" in messages[-1]
