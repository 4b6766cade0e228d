"""The clouds' own command lines know every command and flag that the scripts use.

tests/fixtures/cli has the flags of kubectl as its help shows them, the stand-in's tables those of az's and gcloud's own
parsers. For aws, botocore's models say what each call takes.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore import xform_name
from botocore.validate import ParamValidator
from recorded_commands import run_script
from render_jobs import job_of

from cloudsim.grammar import load_grammar
from cloudsim.state import Refusal
from embark.render.clouds.aws import bucket_statements
from embark.render.monitoring import render_budget
from embark.render.render import render_infrastructure

CLI = Path(__file__).parents[2] / "fixtures" / "cli"
SETTINGS = {"PROJECT": "my-project", "EMAIL": "me@example.com", "SUBNET_ID": "subnet-1"}
VERBS = {
    "vm.sh": (["up"], ["status"], ["logs", "1"], ["down"]), "tpu_vm.sh": (["up"], ["status"], ["logs"], ["down"]),
    "budget.sh": (["budget"], ["quota"]), "eks_cluster.sh": (["up"], ["machines"], ["stop"], ["delete"]),
    "aks_cluster.sh": (["up"], ["machines"], ["stop"], ["delete"]),
}
LAUNCH_VERBS = ("check", "status", "logs", "stop", "clean", "destroy")
CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "aws": [("p5.48xlarge", {"spot": True, "volume": "fsx-lustre-250"}),
            ("p4d.24xlarge", {"target": "vm", "spot": True}),
            ("g5.xlarge", {"target": "vm", "nodes": 1})],
    "azure": [("Standard_ND96asr_v4", {"volume": "azure-netapp-premium"}), ("Standard_ND96asr_v4", {"target": "vm"}),
              ("Standard_NC24ads_A100_v4", {"target": "vm", "spot": True})],
    "gcp": [("a3-ultragpu-8g", {"volume": "managed-lustre-500"}), ("a3-highgpu-8g", {"volume": "filestore-regional"}),
            ("a2-highgpu-8g", {"target": "vm", "spot": True}), ("v5litepod-16", {"target": "tpu-vm"})],
}
AWS_ANYWHERE = {"region", "query", "output"}
AWS_OWN = {("eks", "update-kubeconfig"), ("ssm", "start-session"), ("s3", "ls"), ("ec2", "wait")}
"""Commands of the aws program itself, or of its plugin: there is no call of that name."""
AWS_RENAMED = {("subscribe", "notification-endpoint"): ("endpoint",),
               ("run-instances", "count"): ("min-count", "max-count"),
               ("delete-data-repository-association", "no-delete-data-in-file-system"): ("delete-data-in-file-system",)}
"""Flags that the aws program has under another name than the call."""


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> dict[str, list[list[str]]]:
    """What each program was called with, over all scripts."""
    found: dict[str, list[list[str]]] = {}
    for cases in CASES.values():
        for machine, place in cases:
            files = render_infrastructure(job_of(machine, image="ghcr.io/me/embark:1", **place))
            folder = tmp_path_factory.mktemp("scripts")
            for file in files:
                if not file.is_executable or file.path == "tpu_node.sh":
                    continue
                launch = [["--yes", verb] for verb in LAUNCH_VERBS]
                for words in launch if file.path.startswith("train_") else VERBS.get(file.path, ([],)):
                    for call in run_script(files, file.path, words, folder, SETTINGS).commands:
                        found.setdefault(call[0], []).append(call)
    return found


def test_gcloud_knows_every_command_and_flag(calls):
    grammar, wrong, seen = load_grammar("gcloud"), [], set()
    for call in calls["gcloud"]:
        try:
            seen.add(grammar.parse(call[1:]).name)
        except Refusal as refusal:
            wrong.append((call, refusal.text))
    assert not wrong
    assert len(seen) > 35, "the scripts were not run through"


def test_az_knows_every_command_and_flag_and_has_what_it_requires(calls):
    grammar = load_grammar("az")
    seen = {grammar.parse(call[1:]).name for call in calls["az"]}
    assert len(seen) > 35, "the scripts were not run through"


def test_kubectl_knows_every_flag(calls):
    table = load("kubectl")
    flags = [(longest(call, table), word.partition("=")[0]) for call in calls["kubectl"] for word in call[1:]
             if word.startswith("-")]
    assert flags
    assert not [pair for pair in flags if pair[1] not in table[pair[0]] and pair[1] != "-"]


def test_aws_calls_have_parameters_that_the_services_take(calls):
    wrong, seen = [], set()
    for call in calls["aws"]:
        service, command = call[1], call[2]
        if (service, command) in AWS_OWN:
            continue
        seen.add((service, command))
        operation = operations(service)[command]
        taken = operation.input_shape.members if operation.input_shape else {}
        members = {xform_name(name, "-"): name for name in taken}
        given = {name: words for flag, words in flags_of(call[3:]).items()
                 for name in AWS_RENAMED.get((command, flag), (flag,))}
        unknown = set(given) - set(members) - AWS_ANYWHERE
        wrong += [(command, flag) for flag in unknown]
        if unknown:
            continue
        parameters = {members[flag]: value_of(words, operation.input_shape.members[members[flag]])
                      for flag, words in given.items() if flag in members}
        if operation.input_shape is not None:
            report = ParamValidator().validate(parameters, operation.input_shape)
            wrong += [(command, report.generate_report())] if report.has_errors() else []
    assert not wrong
    assert len(seen) > 30, "the scripts were not run through"


def test_what_the_services_refuse_is_found():
    """The check itself: a PERSISTENT_2 file system without its throughput, which other checkers let pass."""
    shape = operations("fsx")["create-file-system"].input_shape.members["LustreConfiguration"]
    assert value_of(["DeploymentType=PERSISTENT_2,PerUnitStorageThroughput=250"], shape) == {
        "DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 250}
    nested = operations("fsx")["create-data-repository-association"].input_shape.members["S3"]
    assert value_of(["AutoImportPolicy={Events=[NEW,CHANGED]}"], nested) == {
        "AutoImportPolicy": {"Events": ["NEW", "CHANGED"]}}
    complete = operations("fsx")["create-file-system"].input_shape
    report = ParamValidator().validate({"FileSystemType": "LUSTRE"}, complete)
    assert "SubnetIds" in report.generate_report()


def test_lustre_that_lasts_has_its_throughput(calls):
    made = [call for call in calls["aws"] if call[2] == "create-file-system"]
    assert made
    assert all("PerUnitStorageThroughput=250" in " ".join(call) for call in made)


def test_the_budget_is_one_that_aws_takes():
    budget = json.loads(next(f.text for f in render_budget(job_of("p4d.24xlarge")) if f.path == "budget.json"))
    shape = operations("budgets")["create-budget"].input_shape.members["Budget"]
    assert not ParamValidator().validate(budget, shape).has_errors()


def test_a_run_may_touch_its_own_places_and_no_others():
    statements = bucket_statements(job_of("p4d.24xlarge", data="s3://input/criteo/day_0", root="s3://training/runs"))
    below = {s["Resource"]: s["Action"] for s in statements if s["Resource"].endswith("*")}
    assert set(below) == {"arn:aws:s3:::input/criteo/day_0/*", "arn:aws:s3:::training/runs/*"}
    assert below["arn:aws:s3:::input/criteo/day_0/*"] == ["s3:GetObject"]


def load(program: str) -> dict[str, Any]:
    return json.loads((CLI / f"{program}.json").read_text())["commands"]


def longest(call: list[str], table: dict[str, Any]) -> str:
    words = " ".join(call[1:]) + " "
    found = [command for command in table if words.startswith(f"{command} ")]
    assert found, f"{' '.join(call[:5])}: not in the table of {call[0]}"
    return max(found, key=len)


@cache
def operations(service: str) -> dict[str, Any]:
    model = botocore.session.get_session().get_service_model({"s3api": "s3"}.get(service, service))
    return {xform_name(name, "-"): model.operation_model(name) for name in model.operation_names}


def flags_of(words: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag = word[2:]
            found[flag] = []
        else:
            found[flag].append(word)
    return found


def value_of(words: list[str], shape: Any) -> Any:
    """As the aws program reads it: JSON, or its shorthand."""
    if shape.type_name == "list":
        if words and words[0].startswith("["):
            return json.loads(words[0])
        return [value_of([word], shape.member) for word in words]
    if shape.type_name == "boolean":
        return True if not words else words[0] == "true"
    text = words[0]
    if text.startswith(("file://", "fileb://")):
        return "{}"
    if shape.type_name in ("structure", "map"):
        if text.startswith("{"):
            return json.loads(text)
        value, rest = shorthand(text, shape)
        assert not rest, f"{rest!r} is left of {text!r}"
        return value
    return scalar(text, shape)


def shorthand(text: str, shape: Any, end: str = "") -> tuple[dict[str, Any], str]:
    """`A=b,C={D=e},F=[g,h]`, and what follows."""
    found: dict[str, Any] = {}
    while text and not (end and text.startswith(end)):
        name, _, text = text.partition("=")
        inner = shape.value if shape.type_name == "map" else shape.members[name]
        if text.startswith("{"):
            found[name], text = shorthand(text[1:], inner, "}")
            text = text[1:]
        elif text.startswith("["):
            found[name], text = items(text[1:], inner.member)
        elif inner.type_name == "list":
            # Bare words up to the next NAME= are one list.
            parts = text.split(",")
            size = next((i for i, part in enumerate(parts) if i and "=" in part), len(parts))
            found[name], text = [scalar(part, inner.member) for part in parts[:size]], ",".join(["", *parts[size:]])
        else:
            size = min([text.index(c) for c in ("," + end) if c in text] or [len(text)])
            found[name], text = scalar(text[:size], inner), text[size:]
        text = text.removeprefix(",")
    return found, text


def items(text: str, shape: Any) -> tuple[list[Any], str]:
    found: list[Any] = []
    while not text.startswith("]"):
        if text.startswith("{"):
            value, text = shorthand(text[1:], shape, "}")
            text = text[1:]
        else:
            size = min(text.index(c) for c in ",]" if c in text)
            value, text = scalar(text[:size], shape), text[size:]
        found.append(value)
        text = text.removeprefix(",")
    return found, text[1:]


def scalar(text: str, shape: Any) -> Any:
    if shape.type_name in ("integer", "long"):
        return int(text)
    if shape.type_name in ("double", "float"):
        return float(text)
    return text == "true" if shape.type_name == "boolean" else text
