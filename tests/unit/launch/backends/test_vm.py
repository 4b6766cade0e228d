"""Plain machines of the clouds: made by the commands that are rendered, brought back, ended, and never half-made."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from cloud_programs import Clouds
from launch_shells import use_shell
from recorded_commands import run_script

from embark.catalog import load_catalog
from embark.cli.cancel import cancel as cancel_command
from embark.cli.console import Console
from embark.cli.cost import cost
from embark.cli.diagnose import diagnose
from embark.cli.launch import launch, launch_run
from embark.cli.logs import logs as logs_command
from embark.cli.status import status as status_command
from embark.errors import Interrupted, SpecError, UserError
from embark.formatting import format_usd
from embark.launch.backend import LaunchRequest
from embark.launch.backends.clouds import command_error
from embark.launch.backends.vm import Vm, machine_files
from embark.launch.launching import estimate_launch, supervise
from embark.launch.run_registry import find_run
from embark.launch.shell import CommandResult, DryRunShell
from embark.render.job import make_job
from embark.render.render import render_infrastructure
from embark.spec import load_spec, to_toml

MACHINES = {
    "aws": ["place.machine=g5.xlarge", "place.region=us-east-1"],
    "azure": ["place.machine=Standard_NC24ads_A100_v4", "place.storage_account=account"],
    "gcp": ["place.machine=a2-highgpu-1g", "place.account=my-project"],
}
CLOUDS = tuple(MACHINES)
DIFFERENT = {"--user-data", "--custom-data", "--generate-ssh-keys", "--ssh-key-values", "--metadata-from-file",
             "--metadata"}
"""What a rendered machine is given at its start, a launched one by ssh."""


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("AMI", "RESOURCE_GROUP", "VM_IMAGE", "EMBARK_SSH_FROM", "PROJECT", "NETWORK", "IMAGE_FAMILY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SUBNET_ID", "subnet-1")
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(Vm, "boot_s", 1.0)
    monkeypatch.setattr(Vm, "poll_s", 0.0)


def spec_for(cloud: str, tmp_path: Path, *sets: str):
    return load_spec("quickstart", ["name=dlrm", *MACHINES[cloud], "place.nodes=2", "place.target=vm",
                                    "train.batch_size=1024", f"store.root=file://{tmp_path}/runs", *sets])


def launched(cloud: str, tmp_path: Path, *sets: str):
    clouds = Clouds()
    place, spec = Vm(clouds, notify=lambda _: None), spec_for(cloud, tmp_path, *sets)
    handle = place.handle_of(spec)
    place.check(LaunchRequest(spec, handle))
    place.submit(LaunchRequest(spec, handle))
    return clouds, place, handle


def machines(clouds: Clouds) -> list[dict]:
    return [clouds.made[f"machine {name}"] for name in clouds.names("machine")]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_two_machines_are_made_and_handed_the_run(cloud, tmp_path):
    clouds, place, handle = launched(cloud, tmp_path)
    assert len(machines(clouds)) == 2
    assert len(clouds.supervisors) == 2
    status = place.status(handle)
    assert (status.state, len(status.replicas)) == ("running", 2)
    assert handle.title == f"dlrm on 2 x {make_job(spec_for(cloud, tmp_path), load_catalog()).machine.name}: 2 ranks"
    with pytest.raises(UserError, match="already exist"):
        place.check(LaunchRequest(spec_for(cloud, tmp_path), handle))


@pytest.mark.parametrize("spot", ["true", "false"])
@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_commands_are_those_that_the_rendered_script_runs(cloud, spot, tmp_path):
    sets = (f"place.spot={spot}", f"store.root={ {'aws': 's3', 'azure': 'az', 'gcp': 'gs'}[cloud]}://training/runs")
    clouds, _, _ = launched(cloud, tmp_path, *sets)
    files = render_infrastructure(make_job(spec_for(cloud, tmp_path, *sets), load_catalog()))
    ran = run_script(files, "vm.sh", ["up"], tmp_path / "script", {"SUBNET_ID": "subnet-1", "PROJECT": "my-project"})
    assert ran.code == 0, ran.output
    program = {"aws": "aws", "azure": "az", "gcp": "gcloud"}[cloud]
    # Embark's wheel comes through a bucket that the script creates there, and with everything else by ssh here.
    requests = (" describe", " get-", " show", " create-tags", " cp", " blob", " buckets",
                " service-accounts")  # the account of this test has one
    rendered = [bare(words) for words in ran.of(program) if not any(f" {w}".startswith(requests) for w in words[2:4])]
    made = [bare(words) for words in clouds.changes]
    assert len(rendered) >= 4
    assert [words for words in rendered if words not in made] == []


def bare(words: list[str]) -> list[str]:
    """Without what a rendered machine is given at its start, documents from files, and ids that a cloud gave."""
    retained, skip = [], False
    for word in words:
        flag, has_value = word.partition("=")[0], "=" in word
        if flag in DIFFERENT or flag in ("--assume-role-policy-document", "--policy-document", "--scope",
                                         "--assignee-object-id", "--vpc-id", "--group-id", "--ip-permissions",
                                         "--security-group-ids"):
            skip = not has_value and flag != "--generate-ssh-keys"
        elif skip:
            skip = False
        else:
            retained.append(word)
    return retained


@pytest.mark.parametrize("cloud", CLOUDS)
def test_ctrl_c_after_any_command_leaves_nothing_unreported(cloud, tmp_path, monkeypatch):
    spec = spec_for(cloud, tmp_path)
    prediction = estimate_launch(spec)
    monkeypatch.setattr("embark.launch.launching.estimate_launch", lambda _: prediction)
    for moment in count():
        clouds = Clouds()
        clouds.interrupt_after = moment
        use_shell(monkeypatch, lambda clouds=clouds: clouds)
        error = stopped(lambda: launch_run(Console(quiet=True), spec, yes=True, dry_run=False))
        if error is None:
            break
        remove(error.fix, clouds)
        assert clouds.made == {}, error
        assert not list((tmp_path / "data").rglob("key"))
    assert moment >= 8, "each command of the launch was the last one once"


def stopped(launch: Callable[[], int]) -> Interrupted | None:
    try:
        assert launch() == 0
    except Interrupted as error:
        return error
    return None


def remove(fix: str, clouds: Clouds) -> None:
    """Does what the fix says, as a person would."""
    clouds.interrupt_after = None
    for line in fix.replace(", then ", "; ").split("; "):
        words = shlex.split(line.replace('"$(', "sg-1 #"), comments=True)
        if words[:2] == ["embark", "cancel"]:
            cancel_command(words[2], yes=True, console=Console(quiet=True))
        else:
            clouds.change(words)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_failure_in_the_middle_says_what_is_there_too(cloud, tmp_path, monkeypatch):
    clouds = Clouds()
    complete = clouds._machine
    monkeypatch.setattr(
        clouds,
        "_machine",
        lambda name, result: (
            complete(name, result)
            if clouds.num_created == 0
            else CommandResult(1, err="InsufficientInstanceCapacity ZONE_RESOURCE_POOL_EXHAUSTED SkuNotAvailable")
        ),
    )
    use_shell(monkeypatch, lambda: clouds)
    with pytest.raises(UserError, match="no such machine is available") as raised:
        launch_run(Console(quiet=True), spec_for(cloud, tmp_path), yes=True, dry_run=False)
    assert "paid by the hour" in raised.value.what
    assert "place.zone" in raised.value.fix
    assert find_run("dlrm").is_submitted is False
    remove(raised.value.fix.partition("to remove: ")[2], clouds)
    assert clouds.made == {}


def test_a_spot_machine_that_google_stopped_is_reported_and_recover_starts_it_again(tmp_path):
    clouds, place, handle = launched("gcp", tmp_path, "place.spot=true")
    clouds.made["machine dlrm-1"]["status"] = "TERMINATED"
    status = place.status(handle)
    assert (status.state, status.is_recoverable) == ("lost", True)
    assert "machine 1 is gone (TERMINATED)" in status.reason
    assert "embark launch dlrm --supervise" in status.fix
    assert place.events(handle)[0].reason == "compute.instances.preempted"
    assert place.events(handle)[0].is_warning
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


def test_when_the_first_machine_is_replaced_the_others_are_restarted_with_its_address(tmp_path):
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


def test_a_run_that_failed_says_so_and_what_its_machines_still_cost(tmp_path):
    clouds, place, handle = launched("gcp", tmp_path, "place.spot=true")
    for supervisor in clouds.supervisors.values():
        supervisor.update(is_alive=False, ended={"code": 64, "was_stopped": False, "time_s": 2.0})
    status = place.status(handle)
    assert (status.state, "exit code 64" in status.reason) == ("failed", True)
    assert "2 machines still running at $" in status.reason


def test_of_machines_that_are_off_no_price_is_reported(tmp_path):
    clouds, place, handle = launched("gcp", tmp_path, "place.spot=true")
    for supervisor in clouds.supervisors.values():
        supervisor.update(is_alive=False, ended={"code": 64, "was_stopped": False, "time_s": 2.0})
    assert f"2 machines still running at {format_usd(handle.usd_per_hour)} an hour" in place.status(handle).reason
    clouds.made["machine dlrm-1"]["status"] = "TERMINATED"
    assert f"1 machine still running at {format_usd(handle.usd_per_hour / 2)} an hour" in place.status(handle).reason


def test_a_machine_that_is_starting_is_waited_for_and_not_taken_for_lost(tmp_path):
    clouds, place, handle = launched("gcp", tmp_path)
    clouds.made["machine dlrm-1"]["status"] = "STAGING"
    status = place.status(handle)
    assert (status.state, status.reason) == ("pending", "its machines are starting")


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


def test_where_the_outcome_cannot_be_read_no_money_is_spent_on_a_guess(tmp_path, monkeypatch):
    clouds, place, handle = launched("gcp", tmp_path, "place.spot=true")
    clouds.made["machine dlrm-1"]["status"] = "TERMINATED"
    monkeypatch.setattr("embark.launch.backends.machines.run_outcome", lambda *_: None)
    status = place.status(handle)
    assert "cannot be read from here" in status.reason
    assert not status.is_recoverable


@pytest.mark.parametrize("cloud", CLOUDS)
def test_commands_that_read_issue_no_command_that_changes_anything_and_change_no_file(cloud, tmp_path, monkeypatch):
    clouds = Clouds()
    use_shell(monkeypatch, lambda: clouds)
    monkeypatch.setattr("embark.launch.costs.Shell", lambda: clouds)
    monkeypatch.setattr("embark.diagnose.targets.Shell", lambda: clouds)
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


def test_only_the_fields_that_the_user_set_are_handed_over(tmp_path):
    _, _, handle = launched("gcp", tmp_path)
    spec = spec_for("gcp", tmp_path)
    assert (Path(str(handle.where["folder"])) / "spec.toml").read_text() == to_toml(spec, only_set=True)
    files = machine_files(make_job(spec, load_catalog()), 0, "dlrm-0")
    assert files["spec.toml"] == to_toml(spec, only_set=True) != to_toml(spec)


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
                one.update(is_alive=False, ended={"code": 0, "was_stopped": False, "time_s": 2.0})

    monkeypatch.setattr("embark.launch.launching.time.sleep", sleep)
    messages: list[str] = []
    assert supervise(find_run("dlrm"), clouds, messages.append).state == "succeeded"
    assert any("lost: machine 1 is gone (TERMINATED)" in line for line in messages)


def test_ctrl_c_ends_the_supervision_and_not_the_run_and_the_name_resumes_it(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("cloud", CLOUDS)
def test_cancelling_tells_the_ranks_then_ends_the_machines_and_says_what_is_left(cloud, tmp_path):
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
    assert [event.reason for event in place.events(handle) if event.is_warning] == ["Server.SpotInstanceTermination"]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_dry_run_says_every_command_and_leaves_nothing(cloud, tmp_path):
    messages: list[str] = []
    place, spec = Vm(DryRunShell(messages.append), notify=lambda _: None), spec_for(cloud, tmp_path)
    handle = place.handle_of(spec)
    place.check(LaunchRequest(spec, handle))
    place.submit(LaunchRequest(spec, handle))
    assert not Path(str(handle.where["folder"])).exists()
    clouds, _, _ = launched(cloud, tmp_path)
    first = {" ".join(words[:3]) for words in clouds.changes}
    assert first <= {" ".join(shlex.split(line)[:3]) for line in messages}


@pytest.mark.parametrize(("err", "words", "fix"), [
    ("An error occurred (VcpuLimitExceeded) when calling", "quota is used up", "embark doctor"),
    ("(ExpiredToken) The security token included in the request is expired", "credentials have expired",
     "aws sso login"),
    ("ERROR: Please run 'az login' to setup account.", "credentials have expired", "aws sso login"),
    ("(UnauthorizedOperation) You are not authorized", "lack a permission", "permission"),
    ("something new", "something new", "own message"),
])
def test_what_a_cloud_refuses_is_reported_with_what_helps(err, words, fix):
    error = command_error("aws", CommandResult(1, err=err))
    assert words in error.what
    assert fix in error.fix


def test_several_network_cards_want_a_subnet_and_a_volume_wants_pods(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBNET_ID", "")
    place = Vm(Clouds(), notify=lambda _: None)
    with pytest.raises(UserError, match="several network cards"):
        place.handle_of(load_spec("quickstart", ["place.machine=p4d.24xlarge", "place.nodes=2", "place.target=vm",
                                                 "store.root=s3://b/r"]))
    with pytest.raises(SpecError, match=r"place\.volume"):
        place.handle_of(load_spec("quickstart", ["place.machine=g5.xlarge", "place.target=vm", "store.root=s3://b/r",
                                                 "place.volume=fsx-lustre-250"]))


def test_checkpoints_are_not_kept_where_they_go_with_the_machine(tmp_path):
    place, spec = Vm(Clouds(), notify=lambda _: None), spec_for("gcp", tmp_path, "place.nodes=1", "store.root=runs")
    with pytest.raises(UserError, match="deleted with the machine"):
        place.check(LaunchRequest(spec, place.handle_of(spec)))


def test_what_a_machine_is_handed_readies_it_once_after_each_start(tmp_path):
    files = machine_files(make_job(spec_for("gcp", tmp_path), load_catalog()), 1, "dlrm-0")
    assert "./setup.sh" in files["start.sh"]
    assert "/run/embark-ready" in files["start.sh"]
    assert "RANK=1\nMASTER=dlrm-0" in files["node.sh"]
    assert load_spec(_written(tmp_path, files["spec.toml"])).name == "dlrm"
    assert json.loads(files["job.json"])["after"] == ["shutdown", "--poweroff", "now"]


def _written(tmp_path: Path, text: str) -> str:
    (tmp_path / "spec.toml").write_text(text)
    return str(tmp_path / "spec.toml")
