"""The Dockerfile is pinned, clean and not root's; its entry runs words as they are meant."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S
from render_jobs import job_of

from embark.render.image import render_image, render_tpu_image
from embark.render.render import own_files
from embark.render.shell_text import TEMPLATES
from embark.render.wheel import wheel_bytes, wheel_name
from embark.stack.versions import default_triple

ENTRYPOINT = (TEMPLATES / "entrypoint.sh").read_text()
BIN = Path(sys.executable).parent


def dockerfile_of(machine: str, **place) -> str:
    return next(file.text for file in render_image(job_of(machine, **place)) if file.path == "Dockerfile")


@pytest.mark.parametrize(("machine", "place"), [
    ("p5.48xlarge", {}), ("Standard_ND96asr_v4", {}), ("a2-highgpu-8g", {}), ("p5.48xlarge", {"target": "ray"}),
], ids=str)
def test_hadolint_finds_nothing(machine, place):
    text = dockerfile_of(machine, **place)
    done = subprocess.run([BIN / "hadolint", "-"], input=text, text=True, capture_output=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.needs("shellcheck")
def test_shellcheck_finds_nothing_in_the_entry():
    done = subprocess.run(["shellcheck", "-"], input=ENTRYPOINT, text=True, capture_output=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("machine", "fabric"), [
    ("p5.48xlarge", "efa"), ("Standard_ND96asr_v4", "verbs"), ("a3-megagpu-8g", "none"), ("g5.xlarge", "none"),
])
def test_the_fabric_s_libraries_are_the_cloud_s(machine, fabric):
    assert f"ARG FABRIC={fabric}\n" in dockerfile_of(machine)


def test_torch_torchrec_and_fbgemm_go_together():
    text, triple = dockerfile_of("p5.48xlarge"), default_triple()
    for pin in (f"torch=={triple.torch}", f"torchrec=={triple.torchrec}", f"fbgemm-gpu=={triple.fbgemm}",
                f"fbgemm-gpu-cpu=={triple.fbgemm}", f"torchmetrics=={triple.torchmetrics}"):
        assert pin in text
    assert f"ARG BASE=pytorch/pytorch:{triple.torch}-" in text
    assert "latest" not in text


def test_the_user_is_not_root_and_the_same_as_the_pod_s():
    text = dockerfile_of("p5.48xlarge")
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert users == ["1000:1000"]
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0]) == ["/opt/embark/bin/entrypoint.sh"]


def test_the_build_sees_no_data_and_no_credentials():
    ignore = next(file.text for file in render_image(job_of("p5.48xlarge")) if file.path == ".dockerignore")
    rules = [line for line in ignore.splitlines() if not line.startswith("#")]
    assert rules == ["*", "!entrypoint.sh", "!dist"]


def test_embark_comes_from_its_wheel_beside_the_dockerfile():
    for machine, render in (("p5.48xlarge", render_image), ("v5litepod-16", render_tpu_image)):
        job = job_of(machine, nodes=1)
        text = next(file.text for file in render(job) if file.path == "Dockerfile")
        assert f"./{wheel_name()}[" in text
        assert "\nWORKDIR /tmp/dist\nCOPY dist .\n" in text
        files = {file.path: file.content for file in own_files(job)}
        assert files[f"dist/{wheel_name()}"] == wheel_bytes()
        assert "!dist" in files[".dockerignore"].decode()


def test_one_image_has_what_every_target_of_its_folder_needs():
    files = render_image(job_of("p5.48xlarge", render_targets=("jobset", "ray")))
    assert "ray[default,train]==" in next(file.text for file in files if file.path == "Dockerfile")


def test_ray_is_in_the_image_that_needs_it():
    assert "ray[default,train]==" in dockerfile_of("p5.48xlarge", target="ray")
    assert "ray" not in dockerfile_of("p5.48xlarge").lower().replace("array", "")


@pytest.mark.parametrize(("words", "runs"), [
    ([], ["embark", "train", "quickstart"]),
    (["train", "my spec.toml", "--set", "name=$(id)"], ["embark", "train", "my spec.toml", "--set", "name=$(id)"]),
    (["torchrun", "--nproc-per-node=2", "x.py"], ["torchrun", "--nproc-per-node=2", "x.py"]),
    (["train_quickstart.py", "--epochs", "2"], ["python", "train_quickstart.py", "--epochs", "2"]),
    (["-m", "torch.distributed.run", "x.py"], ["python", "-m", "torch.distributed.run", "x.py"]),
    (["python", "-c", "1"], ["python", "-c", "1"]),
])
def test_the_entry_runs_what_is_meant(tmp_path, words, runs):
    for name in ("embark", "torchrun", "python"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@"\n')
        program.chmod(0o755)
    entry = tmp_path / "entrypoint.sh"
    entry.write_text(ENTRYPOINT)
    done = subprocess.run(["sh", entry, *words], text=True, capture_output=True, timeout=HANG_S,
                          env={"PATH": f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin"})
    assert done.stdout.splitlines() == runs, done.stderr
