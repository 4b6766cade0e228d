"""The guide for Google Cloud runs as written from a fresh clone and an empty project."""

from __future__ import annotations

import re

import pytest
from integration.account.guide import (
    RAY_HAS_RUN,
    SCORE,
    SECOND_DAY,
    WarmSession,
    copy_of_clone,
    read_guide,
    walk,
)

pytestmark = pytest.mark.slow


def test_gcp_guide_trains_serves_recovers_and_leaves_nothing_paid(tmp_path, warm_ray_python):
    clone, account = tmp_path / "clone", tmp_path / "account"
    account.mkdir()
    folder = copy_of_clone(clone) / "examples" / "cloud_deployment" / "gcp"
    with WarmSession("gcp", account, warm_ray_python) as session:
        walked = walk(session, read_guide(folder / "README.md"), folder, faults=SECOND_DAY)
    assert {block.section for block in walked.ran} >= {
        "Before you begin", "Step 1: names", "Step 2: the image", "Step 3: the cluster", "Step 4: data",
        "Step 5: train", "Vertex AI", "VMs", "TPUs", "Spot machines", "Serve", "Clean up"}
    print(walked.coverage())  # Commands by real programs and by stand-ins.
    # Job, JobSet, TrainJob, PyTorchJob, RayJob, four machines and spot machines.
    assert len(re.findall(r"^done$", walked.output, re.MULTILINE)) >= 7
    assert RAY_HAS_RUN.search(walked.output)
    assert re.search(r"^dlrm on 2 x \S+: 16 ranks: succeeded$", walked.output, re.MULTILINE)  # `embark launch` says so.
    assert re.search(r"^dlrm-serve: 2 to 10 replicas: running$", walked.output, re.MULTILINE)
    assert SCORE.search(walked.output)  # By the model that the guide trained.
    # The sections on Vertex AI, plain machines and TPUs.
    assert walked.output.count("4 steps") >= 9
    assert walked.report is not None
    assert walked.report.paid == ()
