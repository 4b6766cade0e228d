"""TorchX itself reads the component, and what its replicas would run meets."""

from __future__ import annotations

import base64
import runpy
import signal
import subprocess
import tomllib
import warnings

import pytest
from render_jobs import job_of
from shell_words import words_of

from embark.render.targets.torchx import render_torchx
from embark.spec import resolve


@pytest.fixture(autouse=True)
def own_signals():
    """TorchX's local scheduler takes SIGINT and SIGTERM for itself."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def replicas_of(job, folder, *words: str):
    """What TorchX's local scheduler would start, by a dry run."""
    from torchx.runner import get_runner

    path = folder / "cloud_component.py"
    path.write_text(render_torchx(job)[0].text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with get_runner() as runner:
            run = runner.dryrun_component(f"{path}:train", list(words), "local_cwd", cfg={"log_dir": str(folder)})
    return run


@pytest.mark.parametrize("machine", ["p5.48xlarge", "Standard_ND96isr_H100_v5", "a3-megagpu-8g", "a2-highgpu-8g"])
def test_torchx_takes_the_component(tmp_path, machine):
    job = job_of(machine)
    run = replicas_of(job, tmp_path)
    assert len(run.request.role_params["trainer"]) == 2
    role = runpy.run_path(str(tmp_path / "cloud_component.py"))["train"]().roles[0]
    assert (role.resource.gpu, role.resource.cpu) == (job.num_processes, job.num_cpus)
    assert role.resource.memMB < job.machine.allocatable_gib * 1024
    assert role.resource.capabilities["node.kubernetes.io/instance-type"] == job.machine.machine_type
    expected = {"p5.48xlarge": {"vpc.amazonaws.com/efa": 32}, "Standard_ND96isr_H100_v5": {"rdma/ib": 8}}
    assert role.resource.devices == expected.get(machine, {})


def test_the_first_replica_holds_the_store_and_all_know_its_name(tmp_path):
    run = replicas_of(job_of("p5.48xlarge"), tmp_path)
    for index, params in enumerate(run.request.role_params["trainer"]):
        words = words_of(params.args[2].partition("exec ")[2], TORCHX_RANK0_HOST="first.host")
        assert words[:3] == ["python", "-m", "embark.torchrun"]
        assert "--rdzv-endpoint=first.host:29500" in words
        assert any(word.startswith(f"--rdzv-conf=is_host={'true' if index == 0 else 'false'},") for word in words)
        assert "--nnodes=2" in words


def test_another_number_of_nodes_is_a_word(tmp_path):
    run = replicas_of(job_of("p5.48xlarge"), tmp_path, "--nodes", "4")
    replicas = run.request.role_params["trainer"]
    assert len(replicas) == 4
    assert all("--nnodes=4" in params.args[2] for params in replicas)


def test_the_spec_arrives_as_it_left(tmp_path):
    job = job_of("p5.48xlarge", data="s3://b/it's \"quoted\" $(id) é")
    run = replicas_of(job, tmp_path)
    params = run.request.role_params["trainer"][0]
    text = base64.b64decode(params.env["EMBARK_SPEC_BASE64"]).decode()
    assert resolve(tomllib.loads(text)) == job.spec
    written = tmp_path / "written.toml"
    line = params.args[2].partition(" && ")[0].replace("/tmp/embark-spec.toml", str(written))
    subprocess.run(["bash", "-c", line], check=True, env={**params.env, "PATH": "/usr/bin:/bin"})
    assert written.read_text() == job.spec_toml
