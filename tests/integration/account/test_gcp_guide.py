"""The guide for Google Cloud runs as written from a fresh clone and an empty project."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from integration.account.guide import (
    RAY_HAS_TRAINED,
    SERVE_SKIPS,
    WarmSession,
    copy_of_clone,
    read_guide,
    trained_run,
    walk,
)

pytestmark = pytest.mark.slow

SKIPS = {
    "pip install": "the package under test is installed already",
    "embark data copy gs://$BUCKET/runs": "the rehearsal's curves are not in the bucket, and TensorBoard does not end",
    **SERVE_SKIPS,
}
NUM_ROWS = 64


def write_days(folder: Path) -> None:
    """Write two days of Criteo's logs with few rows."""
    rng = np.random.default_rng(1)
    for day in (0, 23):
        rows = [[str(rng.integers(2)), *map(str, rng.integers(0, 50, 13)),
                 *(f"{value:08x}" for value in rng.integers(0, 1000, 26))] for _ in range(NUM_ROWS)]
        with gzip.open(folder / f"day_{day}.gz", "wt") as file:
            file.writelines("\t".join(row) + "\n" for row in rows)


def test_gcp_guide_trains_and_leaves_nothing_that_costs_money(tmp_path, warm_ray_python):
    clone, account = tmp_path / "clone", tmp_path / "account"
    account.mkdir()
    folder = copy_of_clone(clone) / "examples" / "cloud_deployment" / "gcp"
    write_days(folder)
    with WarmSession("gcp", account, warm_ray_python) as session:
        copy = f"embark data copy {trained_run(tmp_path / 'run')} gs://$BUCKET/runs/dlrm"
        walked = walk(session, read_guide(folder / "README.md"), folder, skips=SKIPS, before={"Serve": copy})
    assert {block.section for block in walked.ran} >= {
        "Before you begin", "Step 1: names", "Step 2: the image", "Step 3: the cluster", "Step 4: data",
        "Step 5: train", "Vertex AI", "VMs", "TPUs", "Spot machines", "Serve", "Clean up"}
    print(walked.coverage())  # Commands by real programs and by stand-ins.
    # Job, JobSet, TrainJob, PyTorchJob, RayJob, four machines and spot machines.
    assert len(re.findall(r"^done$", walked.output, re.MULTILINE)) >= 7
    assert RAY_HAS_TRAINED.search(walked.output)
    assert re.search(r"^dlrm on 2 x \S+: 16 ranks: succeeded$", walked.output, re.MULTILINE)  # `embark launch` says so.
    assert re.search(r"^dlrm-serve: 2 to 10 replicas: running$", walked.output, re.MULTILINE)
    # The sections on Vertex AI, plain machines and TPUs.
    assert walked.output.count("4 steps ·") >= 9
    assert walked.report is not None
    assert walked.report.paid == ()
