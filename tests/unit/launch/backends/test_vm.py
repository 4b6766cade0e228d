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
from vm_launches import CLOUDS, launched, machines, spec_for

from embark.catalog import load_catalog
from embark.cli.console import Console
from embark.cli.launch import launch_run
from embark.cli.status import cancel as cancel_command
from embark.errors import Interrupted, SpecError, UserError
from embark.launch.backend import LaunchRequest
from embark.launch.backends.clouds import command_error
from embark.launch.backends.vm import Vm, machine_files
from embark.launch.costs import estimate_launch
from embark.launch.run_registry import find_run
from embark.launch.shell import CommandResult, DryRunShell
from embark.render.job import make_job
from embark.render.render import render_infrastructure
from embark.spec import load_spec, to_toml

pytestmark = pytest.mark.usefixtures("vm_home")
DIFFERENT = {"--user-data", "--custom-data", "--generate-ssh-keys", "--ssh-key-values", "--metadata-from-file",
             "--metadata"}
"""What a rendered machine is given at its start, a launched one by ssh."""


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


def test_azure_opens_ssh_to_this_machine_alone(tmp_path, monkeypatch):
    clouds, _, _ = launched("azure", tmp_path)
    (rule,) = [words for words in clouds.changes if "rule" in words]
    assert rule[rule.index("--source-address-prefixes") + 1] == "203.0.113.7"
    monkeypatch.setenv("EMBARK_SSH_FROM", "198.51.100.0/24")
    clouds, _, _ = launched("azure", tmp_path / "other")
    (rule,) = [words for words in clouds.changes if "rule" in words]
    assert rule[rule.index("--source-address-prefixes") + 1] == "198.51.100.0/24"


def test_azure_opens_nothing_if_the_own_address_is_unknown(tmp_path):
    clouds, spec = Clouds(), spec_for("azure", tmp_path)
    clouds.own_address = "<html>no</html>"
    place = Vm(clouds, notify=lambda _: None)
    with pytest.raises(UserError, match="EMBARK_SSH_FROM"):
        place.submit(LaunchRequest(spec, place.handle_of(spec)))
    assert not [words for words in clouds.changes if words[0] == "az"]


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


def test_only_the_fields_that_the_user_set_are_handed_over(tmp_path):
    _, _, handle = launched("gcp", tmp_path)
    spec = spec_for("gcp", tmp_path)
    assert (Path(str(handle.where["folder"])) / "spec.toml").read_text() == to_toml(spec, only_set=True)
    files = machine_files(make_job(spec, load_catalog()), 0, "dlrm-0")
    assert files["spec.toml"] == to_toml(spec, only_set=True) != to_toml(spec)


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
    assert json.loads(files["job.json"])["after"] == [
        "systemd-run", "--unit=embark-off", "--on-active=1800", "/var/lib/embark-run/off.sh"]
    assert files["off.sh"].endswith("systemctl poweroff\n")


def _written(tmp_path: Path, text: str) -> str:
    (tmp_path / "spec.toml").write_text(text)
    return str(tmp_path / "spec.toml")
