"""Vertex AI's own types read the job, and its machines find their numbers."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml
from limits import HANG_S
from render_jobs import job_of
from shell_words import words_of

from embark.errors import SpecError
from embark.render.targets.vertex import ACCELERATORS, render_vertex

GPU_MACHINES = ["n1-standard-8+1xT4", "g2-standard-48", "a2-highgpu-8g", "a2-ultragpu-8g", "a3-highgpu-8g",
                "a3-megagpu-8g", "a3-ultragpu-8g", "a4-highgpu-8g"]


def files_of(machine: str, **place) -> dict[str, str]:
    job = job_of(machine, target="vertex", account="my-project", **place)
    return {file.path: file.text for file in render_vertex(job)}


@pytest.mark.parametrize("machine", [*GPU_MACHINES, "v2-8", "v3-8", "v5litepod-16", "v6e-4"])
def test_vertex_s_types_read_the_job(machine):
    from google.cloud.aiplatform_v1.types import CustomJobSpec  # takes seconds

    nodes = 1 if machine.startswith("v") else 3
    files = files_of(machine, nodes=nodes, spot=True, max_hours=2.0)
    spec = CustomJobSpec.from_json(json.dumps(yaml.safe_load(files["vertex_job.yaml"])), ignore_unknown_fields=False)
    assert sum(pool.replica_count for pool in spec.worker_pool_specs) == nodes
    assert spec.worker_pool_specs[0].replica_count == 1
    assert spec.scheduling.strategy.name == "SPOT"
    assert spec.scheduling.timeout.total_seconds() == 7200


def test_every_gpu_has_a_name_that_vertex_knows():
    from google.cloud.aiplatform_v1.types import AcceleratorType

    known = {member.name for member in AcceleratorType}
    assert set(ACCELERATORS.values()) | {"NVIDIA_H100_MEGA_80GB", "TPU_V2", "TPU_V3"} <= known


def test_a_tpu_that_vertex_does_not_train_on_is_refused():
    with pytest.raises(SpecError, match="trains on no v4-8"):
        files_of("v4-8", nodes=1)


def test_torchrun_has_the_machine_s_number_and_the_ranks_do_not():
    pools = yaml.safe_load(files_of("a2-highgpu-8g", nodes=2)["vertex_job.yaml"])["workerPoolSpecs"]
    line = pools[0]["containerSpec"]["command"][2].partition("exec ")[2]
    words = words_of(line, RANK="1", WORLD_SIZE="2", MASTER_ADDR="10.0.0.2", MASTER_PORT="2222")
    assert words[:5] == ["env", "-u", "RANK", "-u", "WORLD_SIZE"]
    meeting = {"--nnodes=2", "--nproc-per-node=8", "--node-rank=1", "--master-addr=10.0.0.2", "--master-port=2222"}
    assert meeting <= set(words)


@pytest.mark.needs("shellcheck")
def test_the_script_submits_the_file():
    files = files_of("a2-highgpu-8g", identity="trainer@my-project.iam.gserviceaccount.com")
    spec = yaml.safe_load(files["vertex_job.yaml"])
    assert spec["serviceAccount"] == "trainer@my-project.iam.gserviceaccount.com"
    assert "my-project" in files["vertex_job.sh"]
    assert "--config=vertex_job.yaml" in files["vertex_job.sh"]
    done = subprocess.run(["shellcheck", "-"], input=files["vertex_job.sh"], text=True,
                          capture_output=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout
