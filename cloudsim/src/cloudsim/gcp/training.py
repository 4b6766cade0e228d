"""Trains the containers of Vertex AI and the services of machines by a rehearsal of an indexed Job."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cloudsim.kubernetes.cluster import Outcome
from cloudsim.kubernetes.programs import rehearse_objects
from embark.render.command import SPEC_PATH

FOLDER, FILE = SPEC_PATH.rpartition("/")[0], SPEC_PATH.rpartition("/")[2]
NUM_STEPS = 4


def train(name: str, commands: Sequence[Sequence[str]], env: Mapping[str, str], spec: str) -> Outcome:
    """Run each command on a host of its own; they reach the first host as `NAME-0` and the spec as a file.
    The logs are in the order of the commands."""
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
    outcome = rehearse_objects([config, service, job], 1, NUM_STEPS)
    hosts = [f"{name}-{index}" for index in range(len(commands))]
    return replace(outcome, logs={host: outcome.logs.get(host, "") for host in hosts})
