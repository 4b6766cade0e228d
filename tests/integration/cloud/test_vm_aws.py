"""Plain machines of EC2: the real `aws` against moto's server, the run launched by ssh to a server on loopback."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import awscli
import boto3
import pytest
from integration.cloud import emulators
from limits import HANG_S
from ssh_servers import servers
from warm_python import warm_python

from embark.cli.console import Console
from embark.cli.launch import launch_run
from embark.cli.status import cancel as cancel_command
from embark.cli.status import logs as logs_command
from embark.cli.status import status as status_command
from embark.launch.backends import vm as vm_module
from embark.launch.backends.clouds import CLOUDS, Aws
from embark.launch.backends.vm import Vm
from embark.launch.run_registry import find_run
from embark.launch.shell import Shell
from embark.launch.supervisor_client import Host, job_json
from embark.render.job import Job
from embark.render.shell_text import Step
from embark.spec import load_spec

pytestmark = [pytest.mark.needs("sshd"), pytest.mark.slow]

AMI = "ami-12c6146b"
"""One that moto has."""
SETS = ["name=dlrm", "place.machine=g5.xlarge", "place.nodes=2", "place.target=vm", "place.region=us-east-1",
        "place.spot=true", "train.batch_size=1024"]
SAYS = """#!/usr/bin/env bash
trap 'echo saved; exit 75' TERM
echo "rank {index} of {master}"
for number in $(seq 3000); do sleep 0.05; if [ -e {folder}/done ]; then echo trained; exit 0; fi; done
"""


@pytest.fixture(scope="module")
def moto(tmp_path_factory):
    """With Amazon's own policies, which the machines' role is given."""
    os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"
    try:
        with emulators.s3() as emulator:
            yield emulator
    finally:
        del os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"]


@pytest.fixture(scope="module")
def aws(tmp_path_factory):
    """A folder with the real `aws`, forked from a process that has imported it."""
    folder = tmp_path_factory.mktemp("aws")
    with warm_python(folder, modules=("awscli.clidriver", "awscli.handlers"), forked=("awscli",)) as python:
        data = Path(awscli.__file__).parent / "data"  # awscli says so itself, in the process that imports it
        (folder / "aws").write_text(f'#!/bin/sh\nAWS_DATA_PATH={data} exec {python} -m awscli "$@"\n')
        (folder / "aws").chmod(0o755)
        yield folder


@pytest.fixture
def machines(tmp_path, monkeypatch, environment, moto, aws):
    """EC2's machines are where their numbers say: a server on loopback each, and folders for disks."""
    environment(moto.env)
    for name in [name for name in os.environ if name.startswith("COV")]:  # `aws` is a Python program that is not ours
        monkeypatch.delenv(name)
    with servers(tmp_path, "dlrm-0", "dlrm-1") as (made, _, _):
        programs = tmp_path / "programs"
        programs.mkdir()
        plugin = programs / "session-manager-plugin"  # Amazon's own is in no registry of packages
        plugin.write_text("#!/bin/sh\nexit 0\n")
        plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
        path = f"{programs}:{aws}:{os.environ['PATH']}"
        for name, value in {"PATH": path, "AMI": AMI, "XDG_DATA_HOME": str(tmp_path / "data"), "COLUMNS": "200",
                            "SUBNET_ID": "", "AWS_PAGER": "", "AWS_DEFAULT_REGION": "us-east-1"}.items():
            monkeypatch.setenv(name, value)

        class Here(Aws):
            def host(self, machine) -> Host:
                server = made[machine.index]
                return server.host(machine.index, self.folder / "key", self.folder / "known_hosts",
                                   server.folder / machine.id)

            def alias(self, machine) -> str:
                return f"dlrm-{machine.index}"

            def host_key(self, machine) -> str:
                return made[machine.index].host_key

            def steps(self) -> list[Step]:
                # moto knows no placement groups.
                return [replace(step, wait_s=0) for step in super().steps() if "placement" not in step.what]

        def files(job: Job, index: int, master: str) -> Mapping[str, str]:
            return {"job.json": job_json(["./start.sh"], wait_s=0.2),
                    "start.sh": SAYS.format(index=index, master=master, folder=tmp_path)}

        for server in made:  # the run's own key opens them, as it does machines that were given it
            server.stop()
            key = f"{tmp_path}/data/embark/runs/vm/aws/dlrm/key.pub"
            server.config.write_text(server.config.read_text().replace(f"{tmp_path}/key.pub", key))
            server.start()
        monkeypatch.setitem(CLOUDS, "aws", Here)
        monkeypatch.setattr(vm_module, "machine_files", files)
        monkeypatch.setattr(Vm, "poll_s", 1.0)
        monkeypatch.setattr(Vm, "boot_s", 60.0)
        yield made
        for started in tmp_path.glob("dlrm-*/i-*/started.json"):
            try:
                os.killpg(json.loads(started.read_text())["pid"], signal.SIGKILL)
            except ProcessLookupError:
                continue


def ec2():
    """The test's own eyes and hands."""
    return boto3.client("ec2", region_name="us-east-1")


def instances() -> list[dict]:
    result = ec2().describe_instances(Filters=[{"Name": "tag:embark-run", "Values": ["dlrm"]}])
    return [one for reservation in result["Reservations"] for one in reservation["Instances"]]


def live() -> list[dict]:
    return [one for one in instances() if one["State"]["Name"] == "running"]


def spec_at(tmp_path: Path):
    return load_spec("quickstart", [*SETS, f"store.root=file://{tmp_path}/runs"])


def test_the_lifecycle_of_a_run_on_spot_machines(tmp_path, machines, capsys):
    spec = spec_at(tmp_path)
    assert launch_run(Console(), spec, yes=True, dry_run=False) == 0
    assert "dlrm on 2 x g5.xlarge: 2 ranks: launched" in capsys.readouterr().out
    handle = find_run("dlrm").handle
    made = {tag["Value"]: one for one in live() for tag in one["Tags"] if tag["Key"] == "embark-rank"}
    assert set(made) == {"0", "1"}
    assert all(one["InstanceLifecycle"] == "spot" for one in made.values())
    assert all("embark-dlrm" in one["IamInstanceProfile"]["Arn"] for one in made.values())
    assert {group["GroupName"] for one in made.values() for group in one["SecurityGroups"]} == {"embark-dlrm"}
    place = Vm(Shell(), notify=lambda _: None)
    status = place.status(handle)
    assert status.state == "running", status
    output = [line.text for line in place.logs(handle)]
    first = made["0"]["PrivateIpAddress"]
    assert sorted(output) == [f"rank 0 of {first}", f"rank 1 of {first}"]

    # The first machine is preempted: recovery creates another, and the other rank learns its address.
    ec2().terminate_instances(InstanceIds=[made["0"]["InstanceId"]])
    lost = next((tmp_path / "dlrm-0").glob("i-*/started.json"))
    os.killpg(json.loads(lost.read_text())["pid"], signal.SIGKILL)
    assert status_command("dlrm", console=Console()) == 0
    assert "lost: machine 0 is gone" in capsys.readouterr().out
    assert len(live()) == 1, "status creates no machines"
    place.recover(handle)
    now = {tag["Value"]: one for one in live() for tag in one["Tags"] if tag["Key"] == "embark-rank"}
    assert set(now) == {"0", "1"}
    assert now["0"]["InstanceId"] != made["0"]["InstanceId"]
    assert now["1"]["InstanceId"] == made["1"]["InstanceId"], "the one that was there stays"
    until(lambda: f"rank 1 of {now['0']['PrivateIpAddress']}" in [line.text for line in place.logs(handle)])

    # It trains to its end; what still costs is said.
    (tmp_path / "done").touch()
    assert logs_command("dlrm", follow=True, console=Console()) == 0
    result = capsys.readouterr().out
    assert "trained" in result
    assert "2 machines still running at $" in result
    assert cancel_command("dlrm", yes=True, console=Console()) == 0
    result = capsys.readouterr().out
    assert "removed dlrm-0, dlrm-1" in result
    assert "aws iam delete-role --role-name embark-dlrm" in result
    assert not live()
    assert not Path(str(handle.where["folder"])).exists(), "nor is the key kept"
    assert status_command("dlrm", console=Console()) == 0
    assert "gone" in capsys.readouterr().out
    assert not live(), "nothing that was cancelled is re-created"


def until(is_so) -> None:
    end_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.3)
