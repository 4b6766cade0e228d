"""The rendered Dockerfile is built and run for real: who it runs as, what it runs, and how it stops."""

from __future__ import annotations

import json
import subprocess
import tomllib

import pytest
from integration.cloud.image import LIMITS, NAME
from limits import HANG_S

from embark import __version__

pytestmark = [pytest.mark.slow, pytest.mark.needs("podman")]

SCRIPT = "train_torchrec_quickstart.py"


def test_it_is_not_root_and_reports_it(image_store):
    config = json.loads(image_store.podman("image", "inspect", NAME).stdout)[0]
    assert config["Config"]["User"] == "1000:1000"
    assert config["Config"]["Entrypoint"] == ["/opt/embark/bin/entrypoint.sh"]
    assert image_store.run("id", "-u").stdout.strip() == "1000"
    print(f"image: {config['Size'] / 1e9:.2f} GB")


def test_one_command_in_a_fresh_clone_built_it_with_embark_s_own_wheel(image_store):
    """`embark image run.toml` of the quickstart's folder; the store did it."""
    folder = image_store.quickstart
    assert tomllib.loads((folder / "run.toml").read_text())["place"]["image"] == NAME
    assert f"image: {NAME}\n" in (folder / "kubernetes_job.yaml").read_text()
    (wheel,) = (folder / "dist").glob("*.whl")
    code = ("import importlib.metadata as m, json; d = m.distribution('embark-rec'); "
            "print(json.loads(d.read_text('direct_url.json'))['url'], d.version)")
    assert image_store.run("python", "-c", code).stdout.split() == [f"file:///tmp/dist/{wheel.name}", __version__]


def test_the_quickstart_s_script_trains_in_it(image_store):
    words = ("--num_batches_per_epoch", "5", "--batch_size", "64", "--num_embeddings_per_feature", "100,100,100")
    done = image_store.run(SCRIPT, *words)
    assert "loss" in done.stdout.lower(), done.stdout + done.stderr


def test_image_contains_the_bytecode_of_what_a_rank_imports(image_store):
    code = ("import importlib.util as found, pathlib\n"
            "for name in ('torchrec', 'fbgemm_gpu', 'embark'):\n"
            "    cached = found.cache_from_source(found.find_spec(name).origin)\n"
            "    print(name, pathlib.Path(cached).exists())")
    output = image_store.run("python", "-c", code).stdout.splitlines()
    assert output == ["torchrec True", "fbgemm_gpu True", "embark True"]


def test_alone_it_trains_the_quickstart(image_store):
    words = ("run", "--rm", "--name", "alone", "--network", "none", *LIMITS, NAME)
    process = subprocess.Popen([image_store.wrapper / "podman", *words], text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "loss" in line and "step" in line:
                break
        assert any("quickstart" in line for line in lines), "".join(lines)
        # It would train on for minutes: told to stop, it saves and says "start me again".
        image_store.podman("stop", "--time", "60", "alone")
        rest = process.communicate(timeout=HANG_S)[0]
        assert process.returncode == 75, "".join(lines) + rest
        assert "saved" in rest
    finally:
        process.kill()


def test_a_wrong_spec_comes_through_torchrun(image_store):
    words = ("--standalone", "--nproc-per-node=2", "-m", "embark", "train", "laptop", "--set", "train.batch_size=97")
    wrong = image_store.run("python", "-m", "embark.torchrun", *words, check=False)
    assert wrong.returncode == 64, wrong.stdout + wrong.stderr
