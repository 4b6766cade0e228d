"""All rules, in the order of their codes: rows of rules.toml, each with a check: the function of its name, or of what
it names as `check`, with the row's `with`. A check gets what its first parameter names, one at a time; one that yields
tuples fills the next parameters too, and `manifests` is last."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from embark.lint.edits import replace_within
from embark.lint.manifests import Manifests, Setting, settings
from embark.lint.read import Document
from embark.lint.rule import Hit, Hits, Rule
from embark.lint.shell import Command
from embark.values import read_table
from . import aws_azure, files, following, gcp, jobs, kubeflow, rendezvous, serving, slurm

SUBJECTS: dict[str, Callable[[Manifests], Iterable[Any]]] = {
    "manifests": lambda manifests: [manifests], "job": lambda manifests: manifests.jobs,
    "pod": lambda manifests: manifests.pods,
    "trainer": lambda manifests: [(pod.main, pod) for pod in manifests.pods
                                  if pod.is_training and pod.main is not None],
    "command": lambda manifests: manifests.commands, "document": lambda manifests: manifests.documents,
    "file": lambda manifests: manifests.files.pythons, "setting": settings, "group": aws_azure.node_groups,
    "lustre": aws_azure.file_systems, "aks_pool": aws_azure.aks_pools, "fabric_job": gcp.jobs_on_fabrics,
    "gke_pool": gcp.node_pools, "pool": gcp.vertex_pools, "text": gcp.texts, "pins": files.pins,
    "image": files.training_images, "torchx": kubeflow.torchx_runs, "served_job": rendezvous.jobs_with_services,
    "own_job": rendezvous.own_jobs, "server": serving.servers, "follower": following.followers,
    "batch": slurm.batch_scripts
}


def lacks_field(document: Document, *, field: str) -> Hits:
    if not document.at(field):
        yield Hit(document)


def flag_value(command: Command, *, begins: str, flag: str, pattern: str, says: str = "", new: str = "",
               fix: str = "") -> Hits:
    value = command.flag(flag) or ""
    if command.begins(begins) and re.fullmatch(pattern, value):
        location, right = command.value_location(flag), re.sub(pattern, new, value)
        yield Hit(location, says.format(value), fix.format(right),
                  replace_within(location, value, right) if new else ())


def word_in_command(command: Command, *, begins: list[str], pattern: str, without: str = "") -> Hits:
    if any(command.begins(one) for one in begins) and not command.has(without):
        yield from (Hit(word) for word in command.words if re.search(pattern, word.text))


def setting_is(setting: Setting, *, name: str, value: str = ".*", only: str = "", says: str = "") -> Hits:
    if setting.name == name and re.fullmatch(value, setting.value) and (not only or getattr(setting, only)):
        yield Hit(setting, says.format(setting=setting))


_CHECKS = {name: check for module in (aws_azure, files, following, gcp, jobs, kubeflow, rendezvous, serving, slurm)
           for name, check in vars(module).items()} | globals()


def _rule(row: Mapping[str, Any]) -> Rule:
    known = {"kinds": (), "with": {}, "check": row["name"].replace("-", "_"), **row}
    check = partial(_CHECKS[known.pop("check")], **known.pop("with"))
    return Rule(**{**known, "check": check, "kinds": frozenset(known["kinds"])})


ALL_RULES: tuple[Rule, ...] = tuple(
    _rule(row) for row in read_table(__file__, "rules.toml")["rule"])
