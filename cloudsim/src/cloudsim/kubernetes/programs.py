"""The programs of a job's pods: `embark data copy` on a volume, and training by a rehearsal."""

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import yaml

from cloudsim.kubernetes.cloud import NodePool
from cloudsim.kubernetes.cluster import Cluster, Object, Outcome
from cloudsim.kubernetes.kubelet import path_trouble, volume_of_path
from embark.errors import UserError
from embark.kubernetes.objects import K8sObject
from embark.kubernetes.pods import Pod
from embark.rehearse.controller import Observer
from embark.rehearse.manifest import read_texts
from embark.rehearse.rehearsal import rehearse
from embark.rehearse.training import prepare_training
from embark.rehearse.workload import NO_RAY
from embark.render.command import SPEC_VARIABLE
from embark.spec.load import parse_spec

SPEC_FILE = "spec.toml"
BESIDE = ("ConfigMap", "Secret", "Service", "TrainingRuntime", "ClusterTrainingRuntime", "PersistentVolumeClaim")


def run_program(cluster: Cluster, kind: str, job: K8sObject, pods: Sequence[Pod], stored: Sequence[Object]
                ) -> Outcome:
    """Run what the commands of the pods say, once all of them have started."""
    pools = [next(cluster.pools[node.pool] for node in cluster.nodes if node.name == one["spec"]["nodeName"])
             for one in stored]
    words = [word for pod in pods[:1] for part in pod.words for word in _split(part)]
    if words[:3] == ["embark", "data", "copy"]:
        return _copy(cluster, pods[0], stored[0], pools[0], words[3:])
    if words[:2] == ["embark", "export"]:
        return _export(cluster, pods[0], stored[0], pools[0], words[2:])
    trouble = _training_trouble(cluster, pods, stored, pools)
    if trouble:
        return Outcome(False, trouble, logs={pod.name: f"{trouble}\n" for pod in pods},
                       codes={pod.name: 64 for pod in pods})
    if kind == "RayJob" and find_spec("ray") is None:
        return Outcome(True, "", logs={pods[-1].name: f"not run: {NO_RAY}\n"})
    return _train(cluster, job)


def _copy(cluster: Cluster, pod: Pod, stored: Object, pool: NodePool, words: Sequence[str]) -> Outcome:
    source, target = [word for word in words if not word.startswith("-")][:2]
    for path, write in ((source, False), (target, True)):
        trouble = path_trouble(cluster, stored, path, pool, write=write)
        if trouble:
            return Outcome(False, trouble, logs={pod.name: f"{trouble}\n"}, codes={pod.name: 1})
    found = volume_of_path(cluster, stored, target, pool)
    if found is not None:
        facts, below = found
        (facts.folder / below).mkdir(parents=True, exist_ok=True)
    return Outcome(True, "", logs={pod.name: f"copied {source} to {target}\n"})


def _export(cluster: Cluster, pod: Pod, stored: Object, pool: NodePool, words: Sequence[str]) -> Outcome:
    """Export the run in the account's bucket, as the pod would; a volume of the pod is not mounted."""
    target = words[words.index("--to") + 1] if "--to" in words else words[0]
    for path, write in ((words[0], False), (target, True)):
        if trouble := path_trouble(cluster, stored, path, pool, write=write):
            return Outcome(False, trouble, logs={pod.name: f"{trouble}\n"}, codes={pod.name: 70})
    root = next(folder for folder in cluster.folder.parents if (folder / "environment.json").exists())
    account = json.loads((root / "environment.json").read_text())
    done = subprocess.run([sys.executable, "-m", "embark", "export", *words], text=True, capture_output=True,
                          cwd=root, env={**os.environ, **account, **pod.env, "HOME": str(root)}, check=False)
    text = done.stdout + done.stderr
    return Outcome(done.returncode == 0, "" if done.returncode == 0 else text, logs={pod.name: text},
                   codes={pod.name: done.returncode})


def _training_trouble(cluster: Cluster, pods: Sequence[Pod], stored: Sequence[Object], pools: Sequence[NodePool]
                      ) -> str:
    """Return which path or address of the spec a pod cannot reach, and why."""
    for pod, one, pool in zip(pods, stored, pools, strict=True):
        text = next((mount.files[SPEC_FILE] for mount in pod.mounts if SPEC_FILE in mount.files), "")
        if not pod.trains:
            continue  # A Ray cluster's head and the pod that submits its driver read no data.
        if SPEC_VARIABLE in pod.env:
            text = base64.b64decode(pod.env[SPEC_VARIABLE]).decode()
        if not text:
            continue
        spec = parse_spec(text)
        if spec is None:
            return f"{SPEC_FILE}: is not a spec"
        found = ""
        if spec.data.kind != "synthetic" and spec.data.path:
            found = path_trouble(cluster, one, str(spec.data.path), pool, write=False)
        found = found or path_trouble(cluster, one, str(spec.store.root), pool, write=True)
        if found:
            return found
    return ""


def _train(cluster: Cluster, job: K8sObject) -> Outcome:
    """Rehearse the job with the objects that are in the cluster."""
    space = job["metadata"]["namespace"]
    beside = [one for (kind, where, _), one in cluster.objects.items() if kind in BESIDE and where in ("", space)]
    objects = [{key: value for key, value in one.items() if key != "status"} for one in (*beside, job)]
    outcome = rehearse_objects(objects, cluster.num_processes, cluster.num_steps)
    # KubeRay writes Ray's message about a driver into the RayJob.
    ray = re.search(r"Status message: (.+)", "".join(outcome.logs.values()))
    return replace(outcome, sentence=ray[1]) if ray else outcome


def rehearse_objects(objects: Sequence[Object], num_processes: int, num_steps: int) -> Outcome:
    """Train the job among these objects in processes of this machine."""
    logs: dict[str, list[str]] = {}
    observer = Observer(lambda pod, rank, line: logs.setdefault(pod, []).append(line),
                        lambda line: logs.setdefault("", []).append(line))
    try:
        texts = {"job.yaml": yaml.safe_dump_all(objects)}
        prepared = prepare_training(texts, read_texts(texts), num_processes=num_processes, num_steps=num_steps)
        report = rehearse(prepared, observer)
    except UserError as error:
        return Outcome(False, error.what)
    said = {pod: "\n".join(lines) + "\n" for pod, lines in logs.items() if pod}
    codes = {end.name: end.code for end in report.ends}
    return Outcome(report.verdict.is_ok, report.verdict.sentence, logs=said, codes=codes)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return [text]
