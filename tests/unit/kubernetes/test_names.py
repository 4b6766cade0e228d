"""Names of objects are valid and stay distinct; each cloud's spot nodes are known by one table."""

from __future__ import annotations

import pytest
from render_jobs import job_of

from embark.kubernetes.names import MAX_RUN_LABEL, SPOT_LABELS, dns_label, object_label
from embark.lint.check import lint_texts
from embark.render.targets.kubernetes import render_job


@pytest.mark.parametrize(("name", "label"), [
    ("My Run", "my-run"), ("a__b", "a-b"), ("7up", "run-7up"), ("-", "run"), ("x" * 40, "x" * 40),
])
def test_a_run_has_a_dns_label(name, label):
    assert dns_label(name) == label


def test_long_names_that_begin_alike_stay_two():
    first, second = dns_label("x" * 60 + "1"), dns_label("x" * 60 + "2")
    assert first != second
    assert len(first) == len(second) <= MAX_RUN_LABEL


def test_a_machine_s_label_may_begin_with_a_digit():
    assert object_label("3_v4.large") == "3-v4-large"


@pytest.mark.parametrize("machine", ["p5.48xlarge", "Standard_ND96asr_v4", "a2-highgpu-8g"])
def test_a_rendered_spot_pod_is_a_spot_pod_to_the_linter(machine):
    job = job_of(machine, spot=True)
    name, value = SPOT_LABELS[job.cloud][0]
    text = render_job(job)[0].text
    assert f"{name}: {value}" in text.replace("'", "")
    slow = text.replace("terminationGracePeriodSeconds:", "terminationGracePeriodSeconds: 3000 #")
    assert any("spot machine" in finding.what for finding in lint_texts({"job.yaml": slow}))
