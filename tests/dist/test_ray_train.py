"""The rendered Ray Train script trains for real: two machines of a Ray cluster on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from embark.render.ray_script import script_text
from tests.dist.conftest import SPEC

pytestmark = pytest.mark.slow

CLUSTER = """
import os, subprocess, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
for _ in range(2):
    cluster.add_node(num_cpus=1)
code = subprocess.run([sys.executable, sys.argv[1]], env={**os.environ, "RAY_ADDRESS": cluster.address}).returncode
cluster.shutdown()
sys.exit(code)
"""


def run(folder: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    spec = folder / "spec.toml"
    spec.write_text(SPEC.replace("[store]", f'[store]\nroot = "{folder}/runs"'))
    script = folder / "ray_train.py"
    script.write_text(script_text(name="ranks", spec_path=str(spec), num_machines=2, num_processes=1, num_cpus=1,
                                  use_gpu=False))
    cluster = folder / "cluster.py"
    cluster.write_text(CLUSTER)
    with TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:  # Ray's sockets have short names
        done = subprocess.run([sys.executable, str(cluster), str(script)], cwd=folder, text=True, capture_output=True,
                              timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": short})
    return done, folder / "runs" / "ranks"


def test_ray_places_one_worker_a_machine_and_the_ranks_train(tmp_path_factory):
    done, run_dir = run(tmp_path_factory.mktemp("r"))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["world_size"] for event in events if event["event"] == "start"] == [2]
    assert events[-1]["event"] == "end"
