"""A name resolves only where a real Service would make it resolve, and where not, the reason is said."""

from __future__ import annotations

import pytest
from render_jobs import job_of

from embark.rehearse.controller import Outcome, Progress
from embark.rehearse.manifest import find_training_job, read_texts
from embark.rehearse.training import prepare_training
from embark.rehearse.verdict import Case, Verdict, judge_outcome
from embark.rehearse.workload import Workload, make_workload
from embark.render.targets.kubernetes import render_job

GOOD = render_job(job_of("p4d.24xlarge"))[0].text


def workload_of(text: str) -> Workload:
    objects = read_texts({"a.yaml": text})
    return make_workload(find_training_job(objects, "a.yaml"), objects)[0]


def test_a_pod_has_its_name_in_every_length():
    names = workload_of(GOOD).names
    for host in ("dlrm-0.dlrm", "dlrm-0.dlrm.embark", "dlrm-0.dlrm.embark.svc", "dlrm-0.dlrm.embark.svc.cluster.local"):
        assert names[host] == ["dlrm-0"]
    assert names["dlrm"] == ["dlrm-0", "dlrm-1"]
    assert "dlrm-0" not in names
    assert "dlrm-2.dlrm" not in names


ENDPOINT = "--rdzv-endpoint=dlrm-0.dlrm:29500"


@pytest.mark.parametrize(("old", "new", "host", "why"), [
    ("clusterIP: None", "clusterIP: 10.0.0.9", "dlrm-0.dlrm", "is not headless"),
    ("    batch.kubernetes.io/job-name: dlrm\n", "    app: other\n", "dlrm-0.dlrm", "which the pods do not have"),
    ("      subdomain: dlrm\n", "", "dlrm-0.dlrm", "the pods have no subdomain"),
    ("      subdomain: dlrm\n", "      subdomain: other\n", "dlrm-0.dlrm", "the pods are under other"),
    ("kind: Service\nmetadata:\n  name: dlrm\n", "kind: Service\nmetadata:\n  name: meet\n", "dlrm-0.dlrm",
     "the headless Service dlrm is not among the files given"),
    ("kind: Service\nmetadata:\n  name: dlrm\n  namespace: embark", "kind: Service\nmetadata:\n  name: dlrm\n"
     "  namespace: other", "dlrm-0.dlrm", "is in namespace other, the pods in embark"),
    (ENDPOINT, "--rdzv-endpoint=dlrm-0:29500", "dlrm-0", "has no service in it, so no other pod can resolve it"),
    (ENDPOINT, "--rdzv-endpoint=dlrm-7.dlrm:29500", "dlrm-7.dlrm", "the first pod is dlrm-0, not dlrm-7"),
    ("completionMode: Indexed", "completionMode: NonIndexed", "dlrm-0.dlrm", "none has a fixed name"),
])
def test_every_way_to_miss_it_has_its_sentence(old, new, host, why):
    assert old in GOOD
    text = GOOD.replace(old, new)
    assert host not in workload_of(text).names
    verdict = verdict_of(text)
    assert verdict.sentence.startswith(f"pods 0 and 1 wait for {host}, a name that does not resolve: ")
    assert why in verdict.sentence
    assert verdict.fix


def test_without_not_ready_addresses_a_probe_hides_the_pod():
    text = GOOD.replace("publishNotReadyAddresses: true", "publishNotReadyAddresses: false")
    assert "dlrm-0.dlrm" in workload_of(text).names  # ready as soon as it runs
    assert "resolve" not in verdict_of(text).sentence
    probed = text.replace("        workingDir: /scratch",
                          "        readinessProbe: {tcpSocket: {port: 1}}\n        workingDir: /scratch")
    assert "dlrm-0.dlrm" not in workload_of(probed).names
    assert "names only pods that are Ready already" in verdict_of(probed).sentence


def verdict_of(text: str) -> Verdict:
    """Of pods that waited for each other until the time was over."""
    prepared = prepare_training({"a.yaml": text}, read_texts({"a.yaml": text}))
    outcome = Outcome("too long", "still running", Progress(), (), ("dlrm-0", "dlrm-1"), {}, (), (), 12.0)
    return judge_outcome(Case(prepared.workload, outcome, prepared.run, 2, prepared.findings))
