"""Slices of TPUs: asked for, waited for, brought back when they are taken away, given back, and never half-made."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from cloud_programs import Clouds
from launch_shells import use_shell
from limits import HANG_S
from recorded_commands import run_script

from embark.catalog import load_catalog
from embark.cli.console import Console
from embark.cli.cost import cost
from embark.cli.diagnose import diagnose
from embark.cli.launch import launch_run
from embark.cli.status import cancel as cancel_command
from embark.cli.status import logs as logs_command
from embark.cli.status import status as status_command
from embark.errors import Interrupted, UserError
from embark.launch.backend import LaunchRequest
from embark.launch.backends import tpu_vm as backend
from embark.launch.backends.tpu_vm import TpuVm, startup_script
from embark.launch.shell import DryRunShell
from embark.render import wheel
from embark.render.job import make_job
from embark.render.render import render_infrastructure
from embark.render.shell_text import job_words
from embark.render.wheel import wheel_bytes, wheel_name
from embark.spec import load_spec, to_toml


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")
    # The runs of these tests are in a folder, from which no TPU could fetch the wheel.
    monkeypatch.setattr(wheel, "_copy_words", lambda job, name, file: job_words(
        job, name, bucket="training", object=f"runs/dist/{wheel_name()}", file=file))
    for name in ("PROJECT", "RUNTIME_VERSION"):
        monkeypatch.delenv(name, raising=False)


def spec_for(tmp_path: Path, *sets: str, machine: str = "v5litepod-16"):
    return load_spec("quickstart", ["name=dlrm", f"place.machine={machine}", "place.target=tpu-vm",
                                    "place.account=my-project", f"store.root=file://{tmp_path}/runs", *sets])


def launched(tmp_path: Path, *sets: str, machine: str = "v5litepod-16"):
    clouds = Clouds()
    place, spec = TpuVm(clouds, notify=lambda _: None), spec_for(tmp_path, *sets, machine=machine)
    handle = place.handle_of(spec)
    place.check(LaunchRequest(spec, handle))
    place.submit(LaunchRequest(spec, handle))
    return clouds, place, handle


def grant(clouds: Clouds, num_hosts: int = 4, node: str = "dlrm") -> None:
    clouds.made["request dlrm"]["state"]["state"] = "ACTIVE"
    for worker in range(num_hosts):
        clouds.supervisors[f"{node} {worker}"] = {"is_alive": True, "code": None}


def test_a_request_waits_is_granted_and_trains(tmp_path):
    clouds, place, handle = launched(tmp_path)
    status = place.status(handle)
    assert (status.state, "queue" in status.reason) == ("pending", True)
    with pytest.raises(UserError, match="has no log: it is pending"):
        list(place.logs(handle))
    clouds.made["request dlrm"]["state"]["state"] = "ACTIVE"
    assert place.status(handle).reason == "its hosts are booting"
    grant(clouds)
    status = place.status(handle)
    assert (status.state, len(status.replicas)) == ("running", 4)
    assert [part.name for part in status.replicas] == [f"dlrm host {worker}" for worker in range(4)]
    assert len(list(place.logs(handle))) == 4
    ssh = [words for words in clouds.calls if words[1:5] == ["compute", "tpus", "tpu-vm", "ssh"]]
    assert {word for words in ssh for word in words if word.startswith("--worker=")} == {
        f"--worker={worker}" for worker in range(4)}
    with pytest.raises(UserError, match="already exists"):
        place.check(LaunchRequest(spec_for(tmp_path), handle))


@pytest.mark.parametrize(("machine", "nodes", "spot"), [("v5litepod-16", 1, "true"), ("v6e-8", 2, "false")])
def test_the_request_is_the_one_that_the_rendered_script_makes(machine, nodes, spot, tmp_path):
    sets = (f"place.spot={spot}", f"place.nodes={nodes}", "store.root=gs://training/runs")
    clouds, _, _ = launched(tmp_path, *sets, machine=machine)
    files = render_infrastructure(make_job(spec_for(tmp_path, *sets, machine=machine), load_catalog()))
    ran = run_script(files, "tpu_vm.sh", ["up"], tmp_path / "script")
    assert ran.code == 0, ran.output
    (rendered,) = [bare(words) for words in ran.of("gcloud") if words[3:5] == ["queued-resources", "create"]]
    (made,) = [bare(words) for words in clouds.changes if words[3:5] == ["queued-resources", "create"]]
    assert made == rendered
    assert ("--spot" in made) == (spot == "true")
    assert ("--node-count=2" in made) == (nodes == 2)


def bare(words: list[str]) -> list[str]:
    return [word for word in words if not word.startswith("--metadata-from-file=startup-script=")]


def test_chips_that_were_taken_away_are_asked_for_again(tmp_path):
    clouds, place, handle = launched(tmp_path, "place.spot=true")
    grant(clouds)
    assert place.status(handle).state == "running"
    clouds.made["request dlrm"]["state"] = {"state": "SUSPENDED", "stateInitiator": "SERVICE"}
    status = place.status(handle)
    assert (status.state, status.is_recoverable) == ("lost", True)
    assert "embark launch dlrm --supervise" in status.fix
    assert clouds.made["request dlrm"]["state"]["state"] == "SUSPENDED", "status changes nothing"
    place.recover(handle)
    assert clouds.made["request dlrm"]["state"]["state"] == "WAITING_FOR_RESOURCES"
    assert place.status(handle).state == "pending"


def test_commands_that_read_change_nothing(tmp_path, monkeypatch):
    clouds = Clouds()
    use_shell(monkeypatch, lambda: clouds)
    monkeypatch.setattr("embark.launch.costs.Shell", lambda: clouds)
    monkeypatch.setattr("embark.diagnose.report.Shell", lambda: clouds)
    launch_run(Console(quiet=True), spec_for(tmp_path, "place.spot=true"), yes=True, dry_run=False)

    def preempt() -> None:
        clouds.made["request dlrm"]["state"] = {"state": "SUSPENDED", "stateInitiator": "SERVICE"}

    for happens, is_readable in ((lambda: None, False), (lambda: grant(clouds), True), (preempt, False)):
        happens()
        before, files = list(clouds.changes), contents(tmp_path)
        status_command("dlrm", console=Console(quiet=True))
        status_command("", console=Console(quiet=True))
        if is_readable:
            logs_command("dlrm", console=Console(quiet=True))
        else:
            with pytest.raises(UserError, match="has no log: it is"):
                logs_command("dlrm", console=Console(quiet=True))
        cost("dlrm", console=Console(quiet=True))
        diagnose("dlrm", console=Console(quiet=True))
        assert clouds.changes == before
        assert contents(tmp_path) == files
    assert clouds.names("request") == ["dlrm"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_had_ended_is_not_asked_for_again(tmp_path):
    clouds, place, handle = launched(tmp_path, "place.spot=true")
    run = tmp_path / "runs/dlrm"
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text(json.dumps({"event": "end", "outcome": "done", "time_s": 4e9}) + "\n")
    clouds.made["request dlrm"]["state"]["state"] = "SUSPENDED"
    assert place.status(handle).state == "succeeded"
    assert clouds.made["request dlrm"]["state"]["state"] == "SUSPENDED"


def test_a_request_that_google_refused_says_why(tmp_path):
    clouds, place, handle = launched(tmp_path)
    clouds.made["request dlrm"]["state"] = {"state": "FAILED", "failedData": {"error": {"message": "no quota there"}}}
    status = place.status(handle)
    assert status.state == "failed"
    assert "no quota there" in status.reason


def test_cancelling_tells_every_host_and_gives_the_chips_back(tmp_path):
    clouds, place, handle = launched(tmp_path)
    grant(clouds)
    assert place.cancel(handle).removed == ("1 x v5litepod-16",)
    assert clouds.made == {}
    stops = [words for words in clouds.changes if "supervisor.py stop" in words[-1]]
    assert len(stops) == 4
    assert clouds.changes[-1][1:5] == ["compute", "tpus", "queued-resources", "delete"]
    assert place.status(handle).state == "gone"
    assert place.cancel(handle).removed == ()


def test_ctrl_c_after_any_command_reports_everything_that_is_left(tmp_path, monkeypatch):
    spec = spec_for(tmp_path)
    for moment in count():
        clouds = Clouds()
        clouds.interrupt_after = moment
        use_shell(monkeypatch, lambda clouds=clouds: clouds)
        error = stopped(lambda: launch_run(Console(quiet=True), spec, yes=True, dry_run=False))
        if error is None:
            break
        clouds.interrupt_after = None
        assert clouds.paid() == [] or "embark cancel dlrm" in error.fix
        if "embark cancel" in error.fix:
            cancel_command("dlrm", yes=True, console=Console(quiet=True))
        assert clouds.made == {}, error
    assert moment == 7, "enabling services, four roles, the upload of the wheel, and the request"


def stopped(launch: Callable[[], int]) -> Interrupted | None:
    try:
        assert launch() == 0
    except Interrupted as error:
        return error
    return None


def test_a_dry_run_says_every_command_and_leaves_nothing(tmp_path):
    messages: list[str] = []
    place, spec = TpuVm(DryRunShell(messages.append), notify=lambda _: None), spec_for(tmp_path)
    handle = place.handle_of(spec)
    place.check(LaunchRequest(spec, handle))
    place.submit(LaunchRequest(spec, handle))
    assert not Path(str(handle.where["folder"])).exists()
    clouds, _, _ = launched(tmp_path)
    assert {" ".join(words[:5]) for words in clouds.changes} <= {" ".join(shlex.split(line)[:5]) for line in messages}


def test_without_a_project_or_a_shared_store_nothing_is_asked_for(tmp_path):
    place = TpuVm(Clouds(), notify=lambda _: None)
    with pytest.raises(UserError, match="no Google Cloud project"):
        place.handle_of(spec_for(tmp_path, "place.account="))
    spec = spec_for(tmp_path, "store.root=runs", machine="v6e-8")
    with pytest.raises(UserError, match="deleted with the machine"):
        place.check(LaunchRequest(spec, place.handle_of(spec)))


def test_hosts_get_the_wheel_through_the_bucket_which_is_required(tmp_path, monkeypatch):
    clouds, _, _ = launched(tmp_path)
    (upload,) = [words for words in clouds.changes if words[1:3] == ["storage", "cp"]]
    assert Path(upload[3]).read_bytes() == wheel_bytes()
    assert upload[4] == f"gs://training/runs/dist/{wheel_name()}"
    inner = _inner(startup_script(make_job(spec_for(tmp_path), load_catalog())), tmp_path)
    assert f"gcloud storage cp {upload[4]} /opt/embark-wheels/{wheel_name()}" in inner
    assert f"/opt/embark-wheels/{wheel_name()}[tpu," in inner
    monkeypatch.undo()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "more"))
    with pytest.raises(UserError, match="fetch Embark's wheel"):
        launched(tmp_path)


def test_a_host_starts_its_keeper_by_itself_and_once(tmp_path, monkeypatch):
    """The startup script for real, but for where things stand and what trains."""
    monkeypatch.setattr(backend, "RUN_FOLDER", str(tmp_path / "run"))
    monkeypatch.setattr(backend.tpu_vm, "setup_parts", lambda job: [])
    monkeypatch.setattr(backend.tpu_vm, "train_words", lambda: [sys.executable, "-c", '"print(6 * 7)"'])
    monkeypatch.setattr(backend, "STATE", str(tmp_path))
    text = startup_script(make_job(spec_for(tmp_path), load_catalog()))
    for _ in range(2):  # the second is the host's next start
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=HANG_S,
                              env={"PATH": os.environ["PATH"]})
        assert done.returncode == 0, done.stderr
    until_s = time.monotonic() + HANG_S
    while not (tmp_path / "run/ended.json").exists():
        assert time.monotonic() < until_s
        time.sleep(0.05)
    trained, released = (tmp_path / "run/log").read_text().splitlines()
    assert trained.endswith("Z 42")
    assert "systemd-run --unit=embark-off --on-active=1800" in released, "chips are paid until they are released"


def test_what_the_hosts_are_given_fits_into_their_metadata(tmp_path):
    text = startup_script(make_job(spec_for(tmp_path), load_catalog()))
    assert len(text) < 256_000
    assert "place.device=tpu" in _inner(text, tmp_path)


def test_only_the_fields_that_the_user_set_are_handed_over(tmp_path):
    _, _, handle = launched(tmp_path)
    spec = spec_for(tmp_path)
    retained = Path(str(handle.where["folder"])) / "spec.toml"
    assert retained.read_text() == to_toml(spec, only_set=True) != to_toml(spec)


def _inner(text: str, tmp_path: Path) -> str:
    import base64
    import io

    packed = text.partition("<<'END'")[2].partition("\n")[2].partition("\nEND")[0]
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as tar:
        return tar.extractfile("start.sh").read().decode()
