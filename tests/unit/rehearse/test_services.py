"""A name resolves only where a real Service would make it resolve, and where not, the reason is said."""

from __future__ import annotations

import pytest
from render_jobs import job_of

from embark.rehearse.manifest import find_training_job, read_texts
from embark.rehearse.pods import why_not
from embark.rehearse.workload import Workload, make_workload
from embark.render.targets.kubernetes import render_job

GOOD = render_job(job_of("p4d.24xlarge"))[0].text


def workload_of(text: str) -> Workload:
    objects = read_texts({"a.yaml": text})
    return make_workload(find_training_job(objects, "a.yaml"), objects)[0]


def test_a_pod_has_its_name_in_every_length():
    names = workload_of(GOOD).names
    for host in ("dlrm-0.dlrm", "dlrm-0.dlrm.embark", "dlrm-0.dlrm.embark.svc", "dlrm-0.dlrm.embark.svc.cluster.local"):
        assert names.pods_of(host) == ["dlrm-0"]
    assert names.pods_of("dlrm") == ["dlrm-0", "dlrm-1"]
    assert not names.resolves("dlrm-0")
    assert not names.resolves("dlrm-2.dlrm")


@pytest.mark.parametrize(("old", "new", "host", "why"), [
    ("clusterIP: None", "clusterIP: 10.0.0.9", "dlrm-0.dlrm", "is not headless"),
    ("    batch.kubernetes.io/job-name: dlrm\n", "    app: other\n", "dlrm-0.dlrm", "does not select the pods"),
    ("      subdomain: dlrm\n", "", "dlrm-0.dlrm", "no subdomain, not dlrm"),
    ("      subdomain: dlrm\n", "      subdomain: other\n", "dlrm-0.dlrm", "subdomain other, not dlrm"),
    ("kind: Service\nmetadata:\n  name: dlrm\n", "kind: Service\nmetadata:\n  name: meet\n", "dlrm-0.dlrm",
     "there is no Service dlrm"),
    ("kind: Service\nmetadata:\n  name: dlrm\n  namespace: embark", "kind: Service\nmetadata:\n  name: dlrm\n"
     "  namespace: other", "dlrm-0.dlrm", "does not select the pods"),
    ("", "", "dlrm-0", "a pod's name alone"),
    ("", "", "dlrm-7.dlrm", "no pod and no Service is called dlrm-7"),
    ("completionMode: Indexed", "completionMode: NonIndexed", "dlrm-0.dlrm", "random names"),
])
def test_every_way_to_miss_it_has_its_sentence(old, new, host, why):
    assert old in GOOD
    workload = workload_of(GOOD.replace(old, new))
    assert not workload.names.resolves(host)
    said, fix = why_not(host, workload.pods, workload.services)
    assert why in said
    assert fix


def test_without_not_ready_addresses_a_probe_hides_the_pod():
    text = GOOD.replace("publishNotReadyAddresses: true", "publishNotReadyAddresses: false")
    assert workload_of(text).names.resolves("dlrm-0.dlrm")  # ready as soon as it runs
    probed = workload_of(text.replace("        workingDir: /scratch",
                                      "        readinessProbe: {tcpSocket: {port: 1}}\n        workingDir: /scratch"))
    assert not probed.names.resolves("dlrm-0.dlrm")
    assert "only once it is ready" in why_not("dlrm-0.dlrm", probed.pods, probed.services)[0]
