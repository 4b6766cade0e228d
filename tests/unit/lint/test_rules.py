"""Every listed fault is found in the fixtures, and nothing is found where there is none."""

from __future__ import annotations

import datetime
import importlib.util
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from embark.lint.check import lint_paths, lint_texts
from embark.lint.rules import ALL_RULES

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures" / "lint"
GROUPS = ("guides", "accepted", "faulty", "good")
EXPECTED = tomllib.loads((FIXTURES / "expected.toml").read_text())
FILES = [path for group in GROUPS for path in sorted((FIXTURES / group).iterdir())]
JOB = (FIXTURES / "good" / "job_eks_p4d.yaml").read_text()
SERVICE, TRAINING = JOB.split("---\n")


TODAY = datetime.date(2026, 11, 18)
"""The day of the fixtures: support of the versions in them ends."""


def lint_text(name, text):
    return lint_texts({name: text}, TODAY)


def codes(findings):
    return {finding.code for finding in findings}


@cache
def linted(path):
    return lint_paths([path], today=TODAY)


def name_of(path):
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_s_faults_are_found_and_no_others(path):
    found = linted(path)
    listed = "\n".join(f"{one.line}: {one.code} {one.what}" for one in found)
    assert codes(found) == set(EXPECTED.get(path.parent.name, {}).get(path.name, [])), listed


def test_every_expectation_has_its_file():
    named = {(group, name) for group in EXPECTED for name in EXPECTED[group]}
    assert named <= {(path.parent.name, path.name) for path in FILES}


def test_every_rule_is_shown_by_a_fixture():
    shown = {code for group in EXPECTED.values() for listed in group.values() for code in listed}
    assert shown == {rule.code for rule in ALL_RULES}


def test_there_are_clean_files_of_many_shapes():
    assert len(list((FIXTURES / "good").iterdir())) >= 15
    assert "good" not in EXPECTED


def test_a_rule_has_a_code_a_name_and_a_source():
    assert len({rule.code for rule in ALL_RULES}) == len({rule.name for rule in ALL_RULES}) == len(ALL_RULES)
    assert [rule.code for rule in ALL_RULES] == sorted(rule.code for rule in ALL_RULES)
    assert len({rule.group for rule in ALL_RULES}) >= 8
    for rule in ALL_RULES:
        assert re.fullmatch(r"EMB\d{3}", rule.code)
        assert rule.source.startswith("https://")
        assert rule.happens.endswith(".")
        assert rule.level in ("error", "warning")


def test_a_finding_has_a_place_in_its_file_and_a_fix():
    for one in (one for path in FILES for one in linted(path)):
        assert one.what
        assert one.fix
        assert 1 <= one.line <= max(1, len(one.hit.location.source.starts))


def test_rules_with_can_fix_and_no_others_have_edits():
    with_edits = {one.code for path in FILES for one in linted(path) if one.can_fix}
    say_so = {rule.code for rule in ALL_RULES if rule.can_fix}
    assert with_edits == say_so


def test_a_service_of_another_file_is_found():
    assert codes(lint_text("job.yaml", TRAINING)) == {"EMB105"}
    assert codes(lint_texts({"job.yaml": TRAINING, "service.yaml": SERVICE})) == set()


def test_a_service_of_another_file_is_checked_against_what_it_must_be():
    wrong = SERVICE.replace("publishNotReadyAddresses: true", "publishNotReadyAddresses: false")
    found = lint_texts({"job.yaml": TRAINING, "service.yaml": wrong})
    assert [(one.code, one.path) for one in found] == [("EMB107", "service.yaml")]


def test_a_manifest_in_a_here_document_is_read_with_the_script_s_lines():
    script = "#!/bin/sh\nset -e\ncat <<EOF | kubectl apply -f -\n" + TRAINING + "EOF\n"
    one, = lint_text("apply.sh", script)
    assert one.code == "EMB105"
    assert script.splitlines()[one.line - 1].strip() == "subdomain: dlrm"


def test_a_list_of_objects_is_read_as_its_objects():
    items = "".join("- " + part.strip().replace("\n", "\n  ") + "\n" for part in (SERVICE, TRAINING))
    assert codes(lint_text("all.yaml", "apiVersion: v1\nkind: List\nitems:\n" + items)) == set()


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("--rdzv-endpoint=dlrm-0.dlrm:29500", "--rdzv-endpoint=$(HOST):29500", "EMB101"),
        ("--nnodes=2", "--nnodes=1:2", "EMB118"),
        ("--nnodes=2", "--nnodes 2", None),
        ("--nnodes=2", "--nnodes 3", "EMB109"),
        ("torchrun --nnodes=2", "python3 -m torch.distributed.run --nnodes=5", "EMB109"),
        ("--nproc-per-node=8", "--nproc_per_node=4", "EMB146"),
        ("--rdzv-id=dlrm ", "", "EMB113"),
        ("--max-restarts=3 ", "", "EMB114"),
        ("dlrm-0.dlrm:29500", "dlrm-0.dlrm.training.svc.cluster.local:29500", None),
        ("dlrm-0.dlrm:29500", "10.0.0.7:29500", None),
        ("hugepages-2Mi: 5120Mi", "ephemeral-storage: 100Gi", "EMB410"),
        ("add: [IPC_LOCK]", "add: [SYS_PTRACE]", "EMB145"),
        ("key: nvidia.com/gpu", "key: dedicated", "EMB141"),
        ("instance-type: p4d.24xlarge", "instance-type: p5.48xlarge", "EMB409"),
        ("sha256:1f38", "latest@sha256:1f38", None),
    ],
)
def test_a_job_is_followed_in_its_meaning(old, new, code):
    assert old in JOB
    assert codes(lint_text("job.yaml", JOB.replace(old, new))) == ({code} if code else set())


def test_torchrun_s_options_may_come_from_the_environment():
    moved = JOB.replace("--nnodes=2 ", "").replace("        env:\n", "        env:\n        - name: PET_NNODES\n"
                                                   '          value: "3"\n')
    assert codes(lint_text("job.yaml", moved)) == {"EMB109"}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("kubectl -n training logs job/dlrm", "EMB132"),
        ("kubectl logs -f job/dlrm", "EMB132"),
        ("kubectl get job/dlrm", None),
        ("echo 'kubectl logs job/dlrm'", None),
        ("echo \"$(gsutil ls)\"", "EMB619"),
        ("true && sudo gsutil cp a b", "EMB619"),
        ("# gsutil cp a b", None),
        ("export NCCL_NET_GDR_LEVEL=0", "EMB607"),
        ("NCCL_NET_GDR_LEVEL=0 torchrun --standalone x.py", "EMB607"),
        ("export NCCL_NET_GDR_LEVEL=5", None),
        ("pip install torch==2.6.0 torchrec==1.1.0 fbgemm-gpu==1.1.0", None),
        ("pip install torch==2.6.0 torchrec==1.2.0 fbgemm-gpu==1.1.0", "EMB302"),
        ("python -m pip install torch==2.13.0 torchrec==1.8.0 fbgemm-gpu", "EMB303"),
        ("pip install torch numpy", None),
        ("gcloud container node-pools create p --cluster c --location us-central1 --num-nodes 2", "EMB613"),
        ("gcloud container node-pools create p --cluster c --location us-central1-a --num-nodes 2", None),
        ("aws fsx create-file-system --file-system-type LUSTRE --storage-capacity 4800 --lustre-configuration "
         "'{\"DeploymentType\": \"PERSISTENT_2\", \"PerUnitStorageThroughput\": 1000}'", None),
        ("aws fsx create-file-system --file-system-type LUSTRE --storage-capacity 4800 --lustre-configuration "
         "'{\"DeploymentType\": \"PERSISTENT_2\"}'", "EMB420"),
        ("az aks create -n x -s Standard_D4s_v5", None),
        ("eksctl create cluster --name a --version 1.35 --node-type m6i.large", None),
    ],
)
def test_a_command_is_read_as_the_shell_would(text, code):
    assert codes(lint_text("x.sh", text + "\n")) == ({code} if code else set())


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import signal, sys\nsignal.signal(signal.SIGTERM, stop)\ndef stop(s, f):\n    sys.exit()\n", "EMB126"),
        ("import signal, sys\nsignal.signal(signal.SIGINT, stop)\ndef stop(s, f):\n    sys.exit(0)\n", None),
        ("import signal, sys\nsignal.signal(signal.SIGTERM, stop)\ndef stop(s, f):\n    sys.exit(75)\n", None),
        ("import torch\ntorch.save({}, 's3://b/x.pt')\n", "EMB801"),
        ("import torch\ntorch.save({}, path)\n", None),
    ],
)
def test_python_is_followed_in_its_meaning(text, code):
    assert codes(lint_text("x.py", text)) == ({code} if code else set())


def test_the_page_is_made_from_the_rules_and_is_current():
    spec = importlib.util.spec_from_file_location("make_lint", ROOT / "tools" / "make_lint.py")
    module = sys.modules["make_lint"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        page = module.page()
    finally:
        del sys.modules["make_lint"]
    assert (ROOT / "docs" / "reference" / "lint.md").read_text() == page, "make docs"
    assert "| **all** |" in page
    assert all(f"| {rule.code} | {rule.name} |" in page for rule in ALL_RULES)


@pytest.mark.parametrize(("today", "code"), [
    ("2026-10-02", None), ("2026-10-03", "EMB414"), ("2026-12-02", "EMB414"), ("2027-12-02", "EMB414"),
    ("2027-12-03", "EMB401")])
def test_the_end_of_a_version_s_support_comes_nearer_every_day(today, code):
    day = datetime.date.fromisoformat(today)
    found = lint_texts({"up.sh": "#!/bin/bash\neksctl create cluster --version 1.34\n"}, day)
    assert codes(found) == ({code} if code else set())
    if code == "EMB414":
        assert "2026-12-02" in found[0].what
        assert "$0.60 an hour" in found[0].what


@pytest.mark.parametrize(("text", "says"), [
    ("helm upgrade keda kedacore/keda --install --version 2.17.3", "KEDA 2.17 is out of support since 2026-02-02"),
    ("helm install gpu-operator nvidia/gpu-operator --version=v25.10.1", "out of support since 2026-08-20"),
    ("eksctl create cluster --version 1.35\nkubectl apply -f https://raw.githubusercontent.com/volcano-sh/volcano/v1.13.0/"
     "installer/volcano-development.yaml", "Volcano 1.13 supports Kubernetes up to 1.33, and the cluster's is 1.35"),
    ("helm upgrade keda kedacore/keda --install --version 2.20.2", ""), ("docker run nats:2.110", ""),
    ("kubectl apply -f https://github.com/kubernetes-sigs/kueue/releases/download/v0.19.2/manifests.yaml", ""),
])
def test_an_operator_at_its_end_or_on_a_newer_kubernetes_is_found(text, says):
    found = lint_texts({"up.sh": f"#!/bin/bash\n{text}\n"}, TODAY)
    assert [one.code for one in found] == (["EMB414"] if says else [])
    assert not says or says in found[0].what


def test_a_broker_at_its_end_is_found_by_its_image():
    text = (FIXTURES / "faulty" / "serve_open.yaml").read_text().replace("nats:2.14.0-alpine", "nats:2.11.4-alpine")
    assert {one.what for one in lint_text("a.yaml", text) if one.code == "EMB414"} == {
        "NATS 2.11 is out of support since 2026-04-30: then it gets no more corrections"}


@pytest.mark.parametrize(("text", "code"), [
    ("az aks create --name a --kubernetes-version 1.34.2", "EMB414"), ("az aks create --name a -k 1.33", "EMB510"),
    ("az aks create --name a --kubernetes-version 1.28", "EMB510"), ("az aks create --name a -k 1.35", None),
    ("az aks create --name a", None)])
def test_aks_creates_no_cluster_of_a_version_at_its_end(text, code):
    found = lint_texts({"up.sh": f"#!/bin/bash\n{text}\n"}, TODAY)
    assert codes(found) == ({code} if code else set())
