"""All rules, in the order of their codes: rows of rules.toml, each with the function of its name as its check. Imports
as `lint` does."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embark.lint.rule import Rule
from embark.lint.rules import aws, azure, files, gcp, jobs, kubeflow, rendezvous

_CHECKS = {name: check for module in (aws, azure, files, gcp, jobs, kubeflow, rendezvous)
           for name, check in vars(module).items()}


def _rule(row: Mapping[str, Any]) -> Rule:
    return Rule(check=_CHECKS[row["name"].replace("-", "_")], **{**row, "kinds": frozenset(row.get("kinds", ()))})


ALL_RULES: tuple[Rule, ...] = tuple(
    _rule(row) for row in tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))["rule"])
