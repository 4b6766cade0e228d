"""Machines without an image: the script that makes them uploads Embark's wheel, and they install what they fetch."""

from __future__ import annotations

import subprocess

import pytest
import yaml
from limits import HANG_S
from recorded_commands import run_script
from render_jobs import job_of

from embark.errors import SpecError
from embark.render.render import render
from embark.render.wheel import WHEELS, fetch_text, wheel_name

BUCKET = f"training/runs/dist/{wheel_name()}"
CASES = {
    "aws": ("g5.xlarge", "vm", ["aws", "s3", "cp"], f"s3://{BUCKET}", "aws"),
    "azure": ("Standard_ND96asr_v4", "vm", ["az", "storage", "blob", "upload"], f"runs/dist/{wheel_name()}", "azcopy"),
    "gcp": ("a2-highgpu-1g", "vm", ["gcloud", "storage", "cp"], f"gs://{BUCKET}", "gcloud"),
    "tpu": ("v5litepod-16", "tpu-vm", ["gcloud", "storage", "cp"], f"gs://{BUCKET}", "gcloud"),
}
SETTINGS = {"SUBNET_ID": "subnet-1", "PROJECT": "my-project", "DRY_RUN": "0"}


def setup_of(files: dict[str, str], target: str) -> str:
    if target == "tpu-vm":
        return files["tpu_node.sh"]
    written = yaml.safe_load(files["cloud_init.yaml"])["write_files"]
    return next(one["content"] for one in written if one["path"].endswith("embark-setup"))


@pytest.mark.parametrize("case", CASES)
def test_the_wheel_is_uploaded_before_a_machine_starts_and_fetches_it(case, tmp_path):
    machine, target, upload, name, _ = CASES[case]
    files = render(job_of(machine, nodes=1, target=target))
    ran = run_script(files, "tpu_vm.sh" if target == "tpu-vm" else "vm.sh", ["up"], tmp_path, SETTINGS)
    assert ran.code == 0, ran.output
    (index,) = [number for number, words in enumerate(ran.commands) if words[:len(upload)] == upload]
    assert name in ran.commands[index]
    assert f"dist/{wheel_name()}" in ran.commands[index]
    things = {"ec2", "vm", "instances", "queued-resources"}
    starts = [number for number, words in enumerate(ran.commands)
              if {"run-instances", "create"} & set(words) and things & set(words)]
    assert starts, ran.commands
    assert index < min(starts)
    setup = setup_of({file.path: file.text for file in files}, target)
    assert setup.index(name) < setup.index(f"{WHEELS}/{wheel_name()}[")


@pytest.mark.parametrize("case", CASES)
def test_a_machine_that_may_not_read_yet_tries_again_and_gives_up_at_last(case, tmp_path):
    machine, target, _, name, program = CASES[case]
    text = fetch_text(job_of(machine, nodes=1, target=target)).replace(WHEELS, str(tmp_path / "wheels"))
    (tmp_path / "sleep").write_text("#!/bin/sh\n")
    (tmp_path / program).write_text('#!/bin/sh\necho "$@" >>"$TRIES"\n[ "$(wc -l <"$TRIES")" -ge "$GOOD_TRY" ]\n')
    for stub in ("sleep", program):
        (tmp_path / stub).chmod(0o755)

    def tries(good_try: int) -> tuple[int, int]:
        record = tmp_path / f"tries-{good_try}"
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TRIES": str(record), "GOOD_TRY": str(good_try)}
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], env=env, capture_output=True, timeout=HANG_S)
        lines = record.read_text().splitlines()
        assert name in lines[0]
        return done.returncode, len(lines)

    assert tries(3) == (0, 3)
    assert tries(1000) == (1, 30)


def test_an_image_has_the_wheel_so_nothing_is_uploaded(tmp_path):
    files = render(job_of("g5.xlarge", nodes=1, target="vm", image="ghcr.io/me/embark:1"))
    ran = run_script(files, "vm.sh", ["up"], tmp_path, SETTINGS)
    assert ran.code == 0, ran.output
    assert not [words for words in ran.commands if words[:3] == ["aws", "s3", "cp"]]
    assert wheel_name() not in setup_of({file.path: file.text for file in files}, "vm")


@pytest.mark.parametrize(("case", "fix"), [("gcp", "embark image"), ("tpu", "gs://BUCKET/runs")])
def test_without_a_bucket_there_is_no_way_for_the_wheel(case, fix):
    machine, target, *_ = CASES[case]
    with pytest.raises(SpecError, match="fetch Embark's wheel") as error:
        render(job_of(machine, nodes=1, target=target, root="s3://elsewhere/runs"))
    assert fix in str(error.value)
