"""Logs in the form of the real ones, each with what must be said of it, and logs of which nothing must be."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]

from embark.diagnose.report import diagnose
from embark.diagnose.scan import load_rules
from embark.diagnose.source import fold, sources_of
from embark.events.quality import quality_rules

FIXTURES = Path(__file__).parents[2] / "fixtures" / "diagnose"
EXPECTED: dict[str, list[str]] = tomllib.loads((FIXTURES / "expected.toml").read_text())["faulty"]
HEALTHY = sorted(path.name for path in (FIXTURES / "healthy").iterdir())
BY_CHECKS = {"checkpoint-ignored", "slower-than-planned", "host-memory-nearly-full", *quality_rules()}
"""Rules that no log alone can show: test_checks.py and events/test_quality.py have them."""

GUIDES = {
    "EFA not detected": "efa-not-found",
    "NCCL timeout: security groups, firewall rules": "connection-refused-by-firewall",
    "NCCL timeout": "collective-timed-out",
    "FSx slow, Filestore slow": "file-system-slow",
    "OOM errors, OOM on GPU, CUDA Out of Memory, OOM during training": "gpu-out-of-memory",
    "Slow data loading": "slow-loader",
    "Job preemption, Preemption": "spot-taken-back",
    "GPU not detected": "no-gpu-found",
    "Quota exceeded": "quota-exceeded",
    "Job stuck in PENDING": "vertex-job-pending",
    "Container fails to start, missing dependencies": "package-missing",
    "Container fails to start, script not there": "file-not-found",
    "Job timeout": "vertex-timed-out",
    "Permission denied": "cloud-permission-denied",
    "Permission denied, storage access": "store-access-denied",
    "Pod Scheduling Issues, Insufficient nvidia.com/gpu": "not-enough-gpus",
    "FailedScheduling: no node matches requirements": "no-node-matches",
    "literal $(MASTER_ADDR)": "rendezvous-endpoint-malformed",
    "no headless Service": "rendezvous-name-unknown",
    "nnodes is not parallelism": "rendezvous-timed-out",
    "SIGTERM handler ends with 0": "ended-as-if-done",
    "container not named pytorch": "refused-by-server",
    "python instead of torchrun": "launched-without-torchrun",
    "memory above allocatable": "request-too-large",
    "EFA not among limits": "resource-name-unknown",
    "torch.save to s3://": "checkpoint-on-local-path",
    "AKS spot taint": "taint-not-tolerated",
    "fsx-pvc never created": "volume-not-bound",
    "PerUnitStorageThroughput": "fsx-needs-throughput",
    "NCCL_NET_GDR_LEVEL=0": "gpudirect-off",
    "TCPX sidecar": "tcpx-daemon-missing",
    "staging_bucket": "vertex-spec-wrong",
    "pip install google-cloud-sdk": "pip-could-not-install",
    "unpinned torchrec": "fbgemm-does-not-match",
    "Volcano, Docker daemon": "torchx-failed",
    "Kubernetes 1.28": "cluster-version-refused",
    "IPC_LOCK": "memory-not-locked",
    "huge pages": "huge-pages-missing",
    "jobs that stay suspended": "job-suspended",
    "fall-back to TCP": "tcp-instead-of-fabric",
    "restarts that ignore checkpoints": "checkpoint-ignored",
    "Indexed is missing, so no pod has that name": "rendezvous-name-unknown",
    "nobody is the rendezvous's host": "rendezvous-unreachable",
    "backoffLimit 6 is spent": "backoff-limit-reached",
    "podFailurePolicy beside OnFailure, numProcPerNode auto": "refused-by-server",
    "a grace that is shorter than a save": "notice-shorter-than-save",
    "a grace that ran out": "killed",
    "one pod of a plain Job has no node": "waits-in-scheduling",
    "training on one node where four were meant": "world-size-wrong",
    "training-operator's overlay and the device plugin's file are gone": "install-source-gone",
    "stock image without libfabric": "libfabric-missing",
    "aws-ofi-nccl is not in the image": "network-plugin-missing",
    "an implicit placement group without capacity": "no-capacity",
    "NCCL_TOPO_FILE is not in the container": "topology-file-missing",
    "NCCL_SOCKET_IFNAME=eth0 where there is none": "no-network-interface",
    "an image of the wrong name": "image-not-pulled",
    "a TPU runtime of another generation": "tpu-not-ready",
    "fbgemm has no XLA kernels": "no-kernel-for-backend",
    "rendezvous that hangs": "rendezvous-timed-out",
    "one preempted node": "pod-preempted",
}


def test_a_faulty_log_gets_its_diagnosis_and_no_other():
    found = {name: diagnose(sources_of([str(FIXTURES / "faulty" / f"{name}.log")]).sources).diagnoses
             for name in EXPECTED}
    assert {name: [one.name for one in diagnoses] for name, diagnoses in found.items()} == EXPECTED
    for one in (one for diagnoses in found.values() for one in diagnoses):
        assert one.evidence.line > 0
        assert one.evidence.text
        assert one.fix
        assert "{" not in one.cause.replace("{{", "")


def test_a_healthy_or_unrelated_log_gets_none():
    found = {name: diagnose(sources_of([str(FIXTURES / "healthy" / name)]).sources).diagnoses for name in HEALTHY}
    assert {name: diagnoses for name, diagnoses in found.items() if diagnoses} == {}


def test_all_healthy_logs_together_get_none():
    assert diagnose(sources_of([str(FIXTURES / "healthy")]).sources).diagnoses == ()


def test_the_corpus_is_large_and_every_log_of_it_is_expected():
    assert len(EXPECTED) >= 60
    assert len(HEALTHY) >= 20
    assert {path.stem for path in (FIXTURES / "faulty").iterdir()} == set(EXPECTED)


def test_every_rule_is_shown_by_a_log():
    shown = {name for names in EXPECTED.values() for name in names}
    assert {rule.name for rule in load_rules()} - shown == BY_CHECKS


def test_every_row_of_the_guides_tables_has_a_rule_and_a_log_that_shows_it():
    assert set(GUIDES.values()) <= {rule.name for rule in load_rules()}
    assert set(GUIDES.values()) <= BY_CHECKS | {names[0] for names in EXPECTED.values()}


def test_codes_and_names_are_unique_and_refer_to_rules_that_are_there():
    rules = load_rules()
    codes = {rule.code for rule in rules}
    assert len(codes) == len(rules) == len({rule.name for rule in rules})
    for rule in rules:
        assert {*rule.unless, *rule.explains} <= codes, rule.code
        assert rule.code not in (*rule.unless, *rule.explains)
        assert rule.source.startswith("https://")
        assert rule.fix
        assert rule.command, rule.code
        assert "…" not in rule.command, "a command is run as it stands, or with its words in capitals filled in"


def test_a_command_of_embark_s_is_one_of_its_commands():
    texts = "\n".join(f"{rule.command} {rule.fix}" for rule in load_rules())
    assert set(re.findall(r"\bembark ([a-z]+)", texts)) <= {
        "bench", "catalog", "checkpoints", "data", "diagnose", "doctor", "evaluate", "launch", "lint", "logs", "plan",
        "rehearse", "render", "rollback", "train", "watch"}


def test_no_rule_is_hidden_by_one_that_it_hides():
    rules = {rule.code: rule for rule in load_rules()}
    assert not [(code, other) for code, rule in rules.items() for other in rule.unless if code in rules[other].unless]


def test_whatever_a_pattern_matches_has_its_needle():
    for pattern in (pattern for rule in load_rules() for pattern in (*rule.patterns, *rule.cured_by)):
        for runs in literal_runs(parser.parse(pattern.regex.pattern)):
            assert any(pattern.needle in fold(run) for run in runs), pattern.regex.pattern
            assert any(pattern.also in fold(run) for run in runs), pattern.regex.pattern


def test_the_search_for_literal_runs_knows_what_must_be_there():
    assert literal_runs(parser.parse(r"ab(?:cc|xd)e?f")) == [["abcc", "f"], ["abxd", "f"]]
    assert literal_runs(parser.parse(r"a(?:b.)c")) == [["ab", "c"]]


def literal_runs(parsed) -> list[list[str]]:
    """For each way through a regular expression, the texts that stand in all it matches."""
    ways = [[""]]
    for op, value in parsed:
        if op is ops.LITERAL:
            ways = [[*way[:-1], way[-1] + chr(value)] for way in ways]
        elif op is ops.SUBPATTERN:
            ways = joined(ways, literal_runs(value[3]))
        elif op is ops.BRANCH:
            ways = joined(ways, [way for branch in value[1] for way in literal_runs(branch)])
        elif op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            ways = [[*way, ""] for way in ways]
            if value[0] >= 1:
                ways = [[*way, ""] for way in joined(ways, literal_runs(value[2]))]
        elif op not in (ops.AT, ops.ASSERT_NOT):
            ways = [[*way, ""] for way in ways]
    return ways


def joined(ways: list[list[str]], more: list[list[str]]) -> list[list[str]]:
    return [[*way[:-1], way[-1] + rest[0], *rest[1:]] for way in ways for rest in more]
