"""All rules, in the order of their codes: rows of rules.toml, each with the function of its name as its check."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embark.lint.rule import Rule
from embark.lint.rules import aws, azure, code, files, gcp, images, job_shape, kubeflow, pods, rendezvous, vertex

GROUPS = {
    "Files": files, "Rendezvous": rendezvous, "Jobs": job_shape, "Pods": pods, "Kubeflow and TorchX": kubeflow,
    "Images and packages": images, "AWS": aws, "Azure": azure, "Google Cloud": gcp, "Vertex AI": vertex,
    "Training code and TPU": code,
}


def _rule(row: Mapping[str, Any]) -> Rule:
    function = row["name"].replace("-", "_")
    group, module = next((title, module) for title, module in GROUPS.items() if hasattr(module, function))
    return Rule(group=group, check=getattr(module, function), **{**row, "kinds": frozenset(row.get("kinds", ()))})


ALL_RULES: tuple[Rule, ...] = tuple(
    _rule(row) for row in tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))["rule"])
