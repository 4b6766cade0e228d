"""Rendered jobs in real containers of the rendered image: by name, as their user, through faults.

AWS's is in test_image.py, with a pod that is killed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from integration.cloud.image import BASE, NAME, common_folder
from integration.cloud.rehearsals import assert_trained, rehearse, rehearse_quickstart, undisturbed_loss
from limits import HANG_S

pytestmark = [pytest.mark.slow, pytest.mark.needs("podman")]

ENGINE = ("--engine", "podman", "--image", NAME)
LAST_STEP = 25
SLEEPS = """
apiVersion: batch/v1
kind: Job
metadata: {name: sleeps}
spec:
  completionMode: Indexed
  parallelism: 3
  completions: 3
  template:
    spec:
      restartPolicy: Never
      containers: [{name: c, image: any, command: [sleep, "300"]}]
"""
HUNGRY = """
apiVersion: batch/v1
kind: Job
metadata: {name: hungry}
spec:
  completionMode: Indexed
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      containers:
      - name: c
        image: any
        command: [python3, -c, "held = bytearray(300 << 20)"]
        resources: {limits: {memory: 128Mi, cpu: 500m}}
"""


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, warm_python) -> float:
    return undisturbed_loss(common_folder(tmp_path_factory.getbasetemp()), warm_python)


@pytest.mark.parametrize(("cloud", "target", "faults"), [
    ("azure", "job", ("--cut=1@step{}+5s", "--pause=0@step{}+4s")),
    ("gcp", "trainjob", ("--preempt=1@step{}",)),
])
def test_run_ends_as_if_undisturbed_whatever_happens_to_a_pod(
    cloud, target, faults, image_store, undisturbed
):
    drawn = [fault.format(random.SystemRandom().randrange(2, LAST_STEP)) for fault in faults]
    answer = rehearse_quickstart(cloud, *ENGINE, *drawn, target=target, path=image_store.wrapper)
    assert_trained(answer)
    assert answer["engine"] == "podman"
    assert answer["verdict"]["final_loss"] == undisturbed, drawn
    assert bool(answer["progress"]["resumes"]) == (target == "trainjob")
    assert_nothing_is_left(image_store)


def test_a_pod_has_the_memory_that_its_limit_says_and_no_more(image_store, tmp_path):
    (tmp_path / "job.yaml").write_text(HUNGRY)
    answer = rehearse(str(tmp_path / "job.yaml"), "--engine", "podman", "--image", BASE, path=image_store.wrapper)
    assert [end["code"] for end in answer["ends"]] == [137]
    assert answer["verdict"]["sentence"] == (
        "hungry-0 was killed without notice (exit code 137): it exceeded its memory limit of 128 MiB")


@pytest.mark.parametrize("after_s", [0.0, 1.0])
def test_ctrl_c_leaves_no_container_no_network_and_no_folder(after_s, image_store, tmp_path):
    """Also while the containers are being made."""
    (tmp_path / "job.yaml").write_text(SLEEPS)
    words = [sys.executable, "-m", "embark", "rehearse", "job.yaml", "--engine", "podman", "--image", BASE]
    env = {**os.environ, "PATH": f"{image_store.wrapper}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200",
           "TMPDIR": str(tmp_path / "folders"), "PYTHONUNBUFFERED": "1"}
    (tmp_path / "folders").mkdir()
    with subprocess.Popen(words, text=True, cwd=tmp_path, env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert any("pods are containers of" in line for line in process.stdout)
        (folder,) = (tmp_path / "folders").glob("embark-rehearse-*")
        while folder.name not in networks(image_store) and process.poll() is None:
            time.sleep(0.05)
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err
    assert "Stopped by SIGINT" in err
    assert folder.name not in networks(image_store)
    assert folder.name not in image_store.podman("ps", "--all", "--format", "{{.Names}}").stdout
    assert not folder.exists()


def networks(image_store) -> set[str]:
    return set(image_store.podman("network", "ls", "--format", "{{.Name}}").stdout.split())


def assert_nothing_is_left(image_store) -> None:
    """Of a rehearsal that is over, whose folder is removed last; another worker may have one under way."""
    is_over = {name for name in rehearsals(image_store) if not Path(tempfile.gettempdir(), name).exists()}
    assert not is_over & rehearsals(image_store)


def rehearsals(image_store) -> set[str]:
    """Those of the quickstart that have a container."""
    names = image_store.podman("ps", "--all", "--filter", f"ancestor={NAME}", "--format", "{{.Names}}").stdout.split()
    return {name.rpartition("-")[0] for name in names if name.startswith("embark-rehearse-")}
