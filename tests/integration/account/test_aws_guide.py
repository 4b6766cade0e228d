"""The guide for AWS runs as written from a fresh clone and an empty account."""

from __future__ import annotations

import re

import pytest
from integration.account.guide import (
    RAY_HAS_TRAINED,
    SERVE_SKIPS,
    WarmSession,
    copy_of_clone,
    criteo_days,
    read_guide,
    trained_run,
    walk,
)

pytestmark = pytest.mark.slow

SKIPS = {
    "pip install": "the package under test is installed already",
    "embark data copy s3://$BUCKET/runs": "the rehearsal's curves are not in the bucket, and TensorBoard does not end",
    **SERVE_SKIPS,
}


def test_aws_guide_trains_and_leaves_nothing_that_costs_money(tmp_path, warm_ray_python):
    clone, account = tmp_path / "clone", tmp_path / "account"
    account.mkdir()
    folder = copy_of_clone(clone) / "examples" / "cloud_deployment" / "aws"
    criteo_days(folder)
    blocks = read_guide(folder / "README.md")
    with WarmSession("aws", account, warm_ray_python) as session:
        copy = f"embark data copy {trained_run(tmp_path / 'run')} s3://$BUCKET/runs/dlrm"
        walked = walk(session, blocks, folder, skips=SKIPS, before={"Serve": copy})
    report = walked.report
    assert report is not None
    assert report.paid == ()
    print(walked.coverage())  # Commands by real programs and by stand-ins.
    # Job, JobSet, TrainJob, PyTorchJob, RayJob, four machines and spot machines: each job ends.
    assert len(re.findall(r"^done$", walked.output, re.MULTILINE)) >= 7
    assert RAY_HAS_TRAINED.search(walked.output)
    assert re.search(r"^dlrm on 2 x \S+: 16 ranks: succeeded$", walked.output, re.MULTILINE)  # `embark launch` says so.
    assert re.search(r"^dlrm-serve: 2 to 10 replicas: running$", walked.output, re.MULTILINE)
    assert re.search(r"^training in \d{12}\.dkr\.ecr\.us-west-2\.amazonaws\.com/embark", walked.output, re.MULTILINE)
    assert {one.program for one in report.records if one.answered_by == "real"} >= {"aws"}
