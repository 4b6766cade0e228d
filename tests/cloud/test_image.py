"""The rendered Dockerfile is built and run for real: who it runs as, what it runs, how it stops, and how two pods meet.

The base is made by debootstrap, since no registry can be counted on; pip finds its packages as it does here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import yaml
from render_jobs import job_of

from embark.catalog import load_catalog
from embark.render.image import render_image
from embark.render.job import make_job
from embark.render.kubernetes import render_job
from embark.spec import load_spec

pytestmark = [pytest.mark.slow, pytest.mark.needs("podman")]

ROOT = Path(__file__).parents[2]
NAME = "localhost/embark:test"
SMALL = ("--set", "train.num_steps=10", "--set", "model.rows_per_table=1000", "--set", "data.num_eval_samples=4096")
LIMITS = ("--ulimit", "nofile=20000:20000", "--ulimit", "nproc=4096:4096")


@dataclass
class Store:
    """Images and containers in a folder of their own."""

    folder: Path

    @property
    def options(self) -> list[str]:
        return ["--storage-driver", "vfs", "--root", str(self.folder / "store"), "--runroot", str(self.folder / "run")]

    def podman(self, *words: str, timeout: float = 300, check: bool = True, **options: Any):
        command = ["podman", *self.options, "--runtime", "runc", *words]
        done = subprocess.run(command, text=True, capture_output=True, timeout=timeout, check=False, **options)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def run(self, *words: str, options: tuple[str, ...] = (), check: bool = True):
        return self.podman("run", "--rm", "--network", "none", *LIMITS, *options, NAME, *words, check=check)


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    folder = Path(mkdtemp(prefix="embark-image-"))
    try:
        made = Store(folder)
        make_base(made)
        build(made)
        yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_base(store: Store) -> None:
    rootfs = store.folder / "rootfs"
    packages = "--include=python3,python3-venv,python3-pip,ca-certificates"
    subprocess.run(["debootstrap", "--variant=minbase", packages, "bookworm", str(rootfs)], check=True, timeout=600,
                   capture_output=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    with subprocess.Popen(["tar", "-C", str(rootfs), "-c", "."], stdout=subprocess.PIPE) as tar:
        store.podman("import", "-", "localhost/base:12", stdin=tar.stdout)
    assert tar.returncode == 0
    shutil.rmtree(rootfs)


def build(store: Store) -> None:
    context = store.folder / "context"
    for file in render_image(job_of("p5.48xlarge")):
        path = context / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)
    source = store.folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "src"):
        here = ROOT / name
        shutil.copytree(here, source / name) if here.is_dir() else shutil.copy(here, source / name)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(context / "dist"), str(source)],
                   check=True, timeout=300, capture_output=True)
    arguments, volumes = as_pip_is_configured()
    command = ["buildah", *store.options, "bud", "--isolation", "chroot", "--network", "host", *volumes, *arguments,
               "--build-arg", "BASE=localhost/base:12", "--build-arg", "VARIANT=cpu", "--build-arg", "FABRIC=none",
               "-t", NAME, str(context)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def as_pip_is_configured() -> tuple[list[str], list[str]]:
    """pip's own settings as build arguments, and the folders that they name as volumes."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], text=True, capture_output=True, check=True)
    pairs = [line.partition("=") for line in listed.stdout.splitlines()]
    found = {name.rpartition(".")[2]: value.strip("'\"") for name, _, value in pairs}
    arguments, folders = [], {"/etc/ssl/certs"}
    for option in ("index-url", "extra-index-url", "find-links"):
        if value := found.get(option):
            arguments += ["--build-arg", f"PIP_{option.replace('-', '_').upper()}={value}"]
            folders |= {"/".join(word.removeprefix("file://").split("/")[:3]) for word in value.split()
                        if word.startswith(("file:///", "/"))}
    there = [folder for folder in sorted(folders) if Path(folder).exists()]
    volumes = [word for folder in there for word in ("--volume", f"{folder}:{folder}:ro")]
    if Path("/etc/pip.conf").exists():
        volumes += ["--volume", "/etc/pip.conf:/etc/pip.conf:ro"]
    return arguments, volumes


def test_it_is_not_root_and_says_so(store):
    config = json.loads(store.podman("image", "inspect", NAME).stdout)[0]
    assert config["Config"]["User"] == "1000:1000"
    assert config["Config"]["Entrypoint"] == ["/opt/embark/bin/entrypoint.sh"]
    assert store.run("id", "-u").stdout.strip() == "1000"
    print(f"image: {config['Size'] / 1e9:.2f} GB")


def test_alone_it_trains_the_quickstart(store):
    process = subprocess.Popen(["podman", *store.options, "--runtime", "runc", "run", "--rm", "--name", "alone",
                                "--network", "none", *LIMITS, NAME], text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "loss" in line and "step" in line:
                break
        assert any("quickstart" in line for line in lines), "".join(lines)
        # It would train on for minutes: told to stop, it saves and says "start me again".
        store.podman("stop", "--time", "60", "alone")
        rest = process.communicate(timeout=90)[0]
        assert process.returncode == 75, "".join(lines) + rest
        assert "saved" in rest
    finally:
        process.kill()


def test_torchrun_trains_and_a_wrong_spec_comes_through(store):
    done = store.run("torchrun", "--standalone", "--nproc-per-node=2", "-m", "embark", "train", "quickstart", *SMALL)
    assert "10 steps" in done.stdout
    wrong = store.run("python", "-m", "embark.ranks", "--standalone", "--nproc-per-node=2", "-m", "embark", "train",
                      "quickstart", "--set", "train.batch_size=97", check=False)
    assert wrong.returncode == 64, wrong.stdout + wrong.stderr


def test_two_pods_of_the_rendered_job_meet_and_train(store, tmp_path):
    """The Job's own command, variables and files, in containers that have the pods' names on a network."""
    sets = ["place.machine=g5.xlarge", "place.nodes=2", "place.volume=fsx-lustre-250", "store.root=/mnt/data/runs",
            "train.batch_size=512", "train.num_steps=10", "model.rows_per_table=1000", "data.num_eval_samples=4096"]
    job = make_job(load_spec("quickstart", sets), load_catalog())
    objects = {document["kind"]: document for document in yaml.safe_load_all(render_job(job)[0].text)}
    template = objects["Job"]["spec"]["template"]["spec"]
    container, name = template["containers"][0], objects["Job"]["metadata"]["name"]
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "spec.toml").write_text(objects["ConfigMap"]["data"]["spec.toml"])
    (tmp_path / "data").mkdir(mode=0o777)
    (tmp_path / "data").chmod(0o777)
    store.podman("network", "create", name)
    try:
        for index in (1, 0):  # the one that waits is there first
            env = [word for row in container["env"] for word in ("--env", f"{row['name']}={row['value']}")]
            store.podman(
                "run", "--detach", "--name", f"{name}-{index}", "--hostname", f"{name}-{index}", "--network", name,
                "--network-alias", f"{name}-{index}.{template['subdomain']}", *LIMITS, *env,
                "--env", f"JOB_COMPLETION_INDEX={index}", "--env", "NCCL_SOCKET_IFNAME=", "--env", "OMP_NUM_THREADS=1",
                "--user", str(template["securityContext"]["runAsUser"]), "--cap-drop", "ALL",
                "--security-opt", "no-new-privileges",
                "--volume", f"{tmp_path / 'etc'}:/etc/embark:ro", "--volume", f"{tmp_path / 'data'}:/mnt/data",
                "--workdir", container["workingDir"], "--entrypoint", json.dumps(container["command"]), NAME)
        until = time.monotonic() + 240
        codes = [store.podman("wait", f"{name}-{index}", timeout=max(1, until - time.monotonic())).stdout.strip()
                 for index in (0, 1)]
        logs = "".join(store.podman("logs", f"{name}-{index}").stdout for index in (0, 1))
        assert codes == ["0", "0"], logs
    finally:
        store.podman("rm", "--force", f"{name}-0", f"{name}-1", check=False)
        store.podman("network", "rm", name, check=False)
    told = (tmp_path / "data" / "runs" / "quickstart" / "events.jsonl").read_text()
    events = [json.loads(line) for line in told.splitlines()]
    assert [event["world_size"] for event in events if event["event"] == "start"] == [2]
