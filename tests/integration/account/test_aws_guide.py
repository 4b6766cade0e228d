"""The guide for AWS runs as written from a fresh clone and an empty account."""

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


def test_aws_guide_trains_serves_recovers_and_leaves_nothing_paid(tmp_path, warm_ray_python):
    clone, account = tmp_path / "clone", tmp_path / "account"
    account.mkdir()
    folder = copy_of_clone(clone) / "examples" / "cloud_deployment" / "aws"
    blocks = read_guide(folder / "README.md")
    with WarmSession("aws", account, warm_ray_python) as session:
        walked = walk(session, blocks, folder, faults=SECOND_DAY)
    report = walked.report
    assert report is not None
    assert report.paid == ()
    print(walked.coverage())  # Commands by real programs and by stand-ins.
    # Job, JobSet, TrainJob, PyTorchJob, RayJob, four machines and spot machines: each job ends.
    assert len(re.findall(r"^done$", walked.output, re.MULTILINE)) >= 7
    assert RAY_HAS_RUN.search(walked.output)
    assert re.search(r"^dlrm on 2 x \S+: 16 ranks: succeeded$", walked.output, re.MULTILINE)  # `embark launch` says so.
    assert re.search(r"^dlrm-serve: 2 to 10 replicas: running$", walked.output, re.MULTILINE)
    assert SCORE.search(walked.output)  # By the model that the guide trained.
    assert re.search(r"^training in \d{12}\.dkr\.ecr\.us-west-2\.amazonaws\.com/embark", walked.output, re.MULTILINE)
    assert {one.program for one in report.records if one.answered_by == "real"} >= {"aws"}
