"""Trains the containers of Vertex AI and the services of machines by a rehearsal of an indexed Job."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from embark.errors import UserError
from embark.rehearse.controller import Observer
from embark.rehearse.rehearsal import RehearsalOptions, prepare, rehearse
from embark.render.command import SPEC_PATH

FOLDER, FILE = SPEC_PATH.rpartition("/")[0], SPEC_PATH.rpartition("/")[2]
NUM_STEPS = 4


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How a training ended, and the log of each host."""

    is_ok: bool
    sentence: str
    logs: tuple[str, ...]


def train(name: str, commands: Sequence[Sequence[str]], env: Mapping[str, str], spec: str) -> TrainingResult:
    """Run each command on a host of its own; they reach the first host as `NAME-0` and the spec as a file."""
    lines = [f"{index}) exec {shlex.join(words)} ;;" for index, words in enumerate(commands)]
    line = "case $JOB_COMPLETION_INDEX in\n" + "\n".join(lines) + "\nesac"
    line = re.sub(rf"\b{re.escape(name)}-0(?=[:\s'\"])", f"{name}-0.{name}", line)
    labels = {"job-name": name}
    pod: dict[str, Any] = {
        "restartPolicy": "Never", "subdomain": name,
        "containers": [{
            "name": "trainer", "image": "trainer", "command": ["/bin/sh", "-c", line],
            "env": [{"name": key, "value": value} for key, value in env.items()],
            "volumeMounts": [{"name": "spec", "mountPath": FOLDER}, {"name": "tmp", "mountPath": "/tmp"},
                             {"name": "scratch", "mountPath": "/scratch"}]}],
        "volumes": [{"name": "spec", "configMap": {"name": name}}, {"name": "tmp", "emptyDir": {}},
                    {"name": "scratch", "emptyDir": {}}]}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {
        "completionMode": "Indexed", "completions": len(commands), "parallelism": len(commands), "backoffLimit": 0,
        "template": {"metadata": {"labels": labels}, "spec": pod}}}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {
        "clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {FILE: spec}}
    options = RehearsalOptions(num_processes=1, num_steps=NUM_STEPS, engine="processes")
    logs: dict[str, list[str]] = {f"{name}-{index}": [] for index in range(len(commands))}
    observer = Observer(lambda host, rank, text: logs.setdefault(host, []).append(text), lambda text: None)
    try:
        prepared = prepare({"job.yaml": yaml.safe_dump_all([config, service, job])}, "job.yaml", options)
        report = rehearse(prepared, options, observer, on_start=lambda changes, engine: None)
    except UserError as error:
        return TrainingResult(False, error.what, tuple("" for _ in commands))
    said = tuple("".join(f"{text}\n" for text in logs[f"{name}-{index}"]) for index in range(len(commands)))
    return TrainingResult(report.verdict.is_ok, report.verdict.sentence, said)
