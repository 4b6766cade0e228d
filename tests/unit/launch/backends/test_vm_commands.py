"""Every command that a launch of plain machines and TPUs runs is one that the cloud's own program knows.

The stand-in's tables have them for az and gcloud; for aws, botocore's models say what each call takes.
"""

from __future__ import annotations

import botocore.session
import pytest
from botocore import xform_name
from cloud_programs import Clouds

from cloudsim.grammar import load_grammar
from cloudsim.state import Refusal
from embark.catalog import load_catalog
from embark.launch.backend import LaunchRequest
from embark.launch.backends.clouds import Aws, Machine
from embark.launch.backends.tpu_vm import TpuVm
from embark.launch.backends.vm import Vm
from embark.render.job import make_job
from embark.spec import load_spec

HIDDEN = {"--listen-on-stdin"}
"""gcloud writes it into ssh's own settings, and shows it to nobody."""
AWS_OWN = {"region", "query", "output", "version", "count"}
MACHINES = {
    "aws": ["place.machine=g5.xlarge", "place.target=vm"],
    "azure": ["place.machine=Standard_ND96asr_v4", "place.storage_account=account", "place.target=vm"],
    "gcp": ["place.machine=a2-highgpu-1g", "place.account=my-project", "place.target=vm"],
    "tpu": ["place.machine=v5litepod-16", "place.account=my-project", "place.target=tpu-vm", "place.nodes=1"],
}


@pytest.fixture
def calls(request, tmp_path, monkeypatch) -> list[list[str]]:
    """Of a whole life: launched, looked at, told apart, brought back, ended."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("SUBNET_ID", "")
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(Vm, "boot_s", 5.0)
    clouds, cloud = Clouds(), request.param
    bucket = {"aws": "s3", "azure": "az"}.get(cloud, "gs")
    spec = load_spec("quickstart", ["name=dlrm", "place.nodes=2", "place.spot=true", *MACHINES[cloud],
                                    f"store.root={bucket}://training/runs", "train.batch_size=1024"])
    place = TpuVm(clouds, notify=lambda _: None) if cloud == "tpu" else Vm(clouds, notify=lambda _: None)
    handle = place.handle_of(spec)
    place.check(LaunchRequest(spec, handle))
    place.submit(LaunchRequest(spec, handle))
    place.status(handle)
    monkeypatch.setattr("embark.launch.backends.machines.run_outcome", lambda *_: "")
    if cloud == "tpu":
        clouds.made["request dlrm"]["state"]["state"] = "SUSPENDED"
    else:
        name = clouds.names("machine")[0]
        clouds.made[f"machine {name}"].update(status="TERMINATED", powerState="VM deallocated",
                                              State={"Name": "stopped"})
    place.recover(handle)
    things = place.cancel(handle).remains
    lines = [line for thing in things for line in thing.remove.split("; ")]
    return [*clouds.calls, *(line.split() for line in lines if "$(" not in line)]


@pytest.mark.parametrize("calls", ["azure"], indirect=True)
def test_az_knows_every_command_and_flag(calls):
    grammar = load_grammar("az")
    assert len({grammar.parse(words[1:]).name for words in commands_of(calls, "az")}) > 9


@pytest.mark.parametrize(("calls", "num_commands"), [("gcp", 12), ("tpu", 6)], indirect=["calls"])
def test_gcloud_knows_every_command_and_flag(calls, num_commands):
    grammar, wrong, seen = load_grammar("gcloud"), [], set()
    for words in commands_of(calls, "gcloud"):
        try:
            seen.add(grammar.parse([word for word in words[1:] if word not in HIDDEN]).name)
        except Refusal as refusal:
            wrong.append((words, refusal.text))
    assert not wrong
    assert len(seen) > num_commands


def commands_of(calls: list[list[str]], program: str) -> list[list[str]]:
    """Its calls, and those of ssh's proxy."""
    proxies = [proxy.split() for words in calls for word in words
               for mark, _, proxy in [word.partition("ProxyCommand=")]
               if not mark and proxy.startswith(program)]
    return [*(words for words in calls if words[0] == program and len(words) > 2), *proxies]


@pytest.mark.parametrize("calls", ["aws"], indirect=True)
def test_the_services_know_every_call_and_parameter(calls):
    session, wrong, seen = botocore.session.get_session(), [], set()
    for words in calls:
        if words[0] != "aws" or len(words) < 4 or words[2] == "start-session":
            continue
        model = session.get_service_model(words[1])
        operations = {xform_name(name, "-"): model.operation_model(name) for name in model.operation_names}
        assert words[2] in operations, words[:3]
        seen.add(words[2])
        shape = operations[words[2]].input_shape
        members = {xform_name(name, "-") for name in (shape.members if shape else {})}
        wrong += [(words[2], word) for word in words if word.startswith("--") and word[2:] not in members | AWS_OWN]
    assert not wrong
    assert len(seen) > 18


def test_the_tunnel_of_aws_is_one_that_ssh_can_start(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("SUBNET_ID", "subnet-1")
    job = make_job(load_spec("quickstart", ["place.machine=g5.xlarge", "place.target=vm", "store.root=s3://b/r"]),
                   load_catalog())
    host = Aws(Clouds(), job, tmp_path, Aws.settings(job)).host(Machine(0, "i-1", "dlrm-0", "running", "10.0.0.1"))
    (proxy,) = [word.partition("=")[2] for word in host.words if word.startswith("ProxyCommand=")]
    assert proxy.startswith("aws ssm start-session --region ")
    assert "--target i-1 --document-name AWS-StartSSHSession --parameters portNumber=%p" in proxy
    assert host.words[-1] == "ubuntu@i-1"
