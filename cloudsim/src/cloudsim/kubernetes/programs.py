"""The programs of a job's pods: `embark data copy`, `embark export`, and training by a rehearsal that leaves its run in
the account's bucket."""

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from urllib.parse import urlsplit

import yaml

from cloudsim.kubernetes.cluster import Cluster, Object, Outcome
from cloudsim.kubernetes.kubelet import missing_file, path_trouble, route, volume_of_path
from embark.errors import UserError
from embark.kubernetes.objects import K8sObject, name_of, namespace_of
from embark.kubernetes.pods import Pod
from embark.rehearse.controller import Observer
from embark.rehearse.downscale import RehearsedRun, downscale_spec
from embark.rehearse.manifest import read_texts
from embark.rehearse.rehearsal import rehearse
from embark.rehearse.training import PreparedTraining, prepare_training
from embark.rehearse.workload import NO_RAY
from embark.render.command import SPEC_VARIABLE
from embark.spec import to_toml
from embark.spec.load import parse_spec

SPEC_FILE = "spec.toml"
NUM_SAMPLES = 256  # Rows of the run's data that its pods train on here, and as many to evaluate.
WORLD_SIZE = 2  # Number of ranks whose batch the pods have here, whatever their number is.
BESIDE = ("ConfigMap", "Secret", "Service", "TrainingRuntime", "ClusterTrainingRuntime", "PersistentVolumeClaim")


def run_program(cluster: Cluster, kind: str, job: K8sObject, pods: Sequence[Pod], stored: Sequence[Object]
                ) -> Outcome:
    """Run what the commands of the pods say, once all of them have started."""
    words = [word for pod in pods[:1] for part in pod.words for word in _split(part)]
    if words[:3] == ["embark", "data", "copy"]:
        return _copy(cluster, pods[0], stored[0], words[3:])
    if words[:2] == ["embark", "export"]:
        return _export(cluster, pods[0], stored[0], words[2:])
    # A Ray cluster's head and the pod that submits its driver read no data.
    trouble = next(filter(None, (missing_file(pod) or spec_trouble(cluster, pod, one)
                                 for pod, one in zip(pods, stored, strict=True) if pod.trains)), "")
    if trouble:
        return _failed(pods, trouble, 64)
    if kind == "RayJob" and find_spec("ray") is None:
        return Outcome(True, "", logs={pods[-1].name: f"not run: {NO_RAY}\n"})
    return _train(cluster, job)


def _failed(pods: Sequence[Pod], sentence: str, code: int) -> Outcome:
    names = [pod.name for pod in pods]
    return Outcome(False, sentence, logs=dict.fromkeys(names, f"{sentence}\n"), codes=dict.fromkeys(names, code))


def _copy(cluster: Cluster, pod: Pod, stored: Object, words: Sequence[str]) -> Outcome:
    source, target = [word for word in words if not word.startswith("-")][:2]
    for path, write in ((source, False), (target, True)):
        trouble = path_trouble(cluster, stored, path, write=write)
        if trouble:
            return _failed([pod], trouble, 1)
    found = volume_of_path(cluster, stored, target)
    if found is None:
        return Outcome(True, "", logs={pod.name: f"copied {source} to {target}\n"})
    folder = found[0].folder / found[1]
    folder.mkdir(parents=True, exist_ok=True)
    return _run_embark(cluster, pod, ["data", "copy", *(str(folder) if word == target else word for word in words)])


def _export(cluster: Cluster, pod: Pod, stored: Object, words: Sequence[str]) -> Outcome:
    """Export the run in the account's bucket, as the pod would; a volume of the pod is not mounted."""
    target = words[words.index("--to") + 1] if "--to" in words else words[0]
    for path, write in ((words[0], False), (target, True)):
        if trouble := path_trouble(cluster, stored, path, write=write):
            return _failed([pod], trouble, 70)
    return _run_embark(cluster, pod, ["export", *words])


def _run_embark(cluster: Cluster, pod: Pod, words: Sequence[str]) -> Outcome:
    """Run a command of Embark to its end, with the variables of its pod."""
    account = store_environment(cluster)
    if not account:
        return Outcome(True, "", logs={pod.name: f"not run: {shlex.join(words)}\n"})
    done = subprocess.run([sys.executable, "-m", "embark", *words], text=True, capture_output=True, cwd=cluster.folder,
                          env={**os.environ, **account, **pod.env, "HOME": str(cluster.folder)}, check=False)
    text = done.stdout + done.stderr
    return Outcome(done.returncode == 0, "" if done.returncode == 0 else text, logs={pod.name: text},
                   codes={pod.name: done.returncode})


def store_environment(cluster: Cluster) -> dict[str, str]:
    """Return the variables that lead a program to the account's object store; none if no account serves one."""
    file = next((path for folder in cluster.folder.parents if (path := folder / "environment.json").exists()), None)
    found: dict[str, str] = json.loads(file.read_text()) if file else {}
    if found:
        cluster.folder.mkdir(parents=True, exist_ok=True)
    return found


def spec_trouble(cluster: Cluster, pod: Pod, stored: Object) -> str:
    """Return what a pod with a spec cannot reach: its data, its stream or its store; an empty text if it can."""
    text = _spec_of(pod)
    spec = parse_spec(text) if text else None
    if spec is None:
        return f"{SPEC_FILE}: is not a spec" if text else ""
    for address in map(urlsplit, spec.stream.servers):
        host = str(address.hostname)
        service = cluster.find("Service", host, pod.namespace)
        if service is None and "." not in host:
            return f"{host}: Name or service not known: namespace {pod.namespace} has no Service of this name"
        if service and (error := route(cluster, service, str(address.port))[2]):
            return error
    if spec.data.kind != "synthetic" and spec.data.path and (
            error := path_trouble(cluster, stored, str(spec.data.path), write=False)):
        return error
    return path_trouble(cluster, stored, str(spec.store.root), write=True)


def _spec_of(pod: Pod) -> str:
    if SPEC_VARIABLE in pod.env:
        return base64.b64decode(pod.env[SPEC_VARIABLE]).decode()
    return next((mount.files[SPEC_FILE] for mount in pod.mounts if SPEC_FILE in mount.files), "")


def _train(cluster: Cluster, job: K8sObject) -> Outcome:
    """Rehearse the job with the objects that are in the cluster."""
    space = namespace_of(job)
    beside = [one for (kind, where, _), one in cluster.objects.items() if kind in BESIDE and where in ("", space)]
    objects = [{key: value for key, value in one.items() if key != "status"} for one in (*beside, job)]
    env = store_environment(cluster)
    outcome = rehearse_objects(objects, cluster.num_processes, cluster.num_steps, env,
                               partial(_with_account, cluster, job) if env else None)
    # KubeRay writes Ray's message about a driver into the RayJob.
    ray = re.search(r"Status message: (.+)", "".join(outcome.logs.values()))
    return replace(outcome, sentence=ray[1]) if ray else outcome


def _with_account(cluster: Cluster, job: K8sObject, prepared: PreparedTraining) -> PreparedTraining:
    """Let the pods train on rows of the data that they mount, and write the run to the account's own bucket. The small
    run is the same for any number of pods, as the real one is, so that it is resumed where the real one would be."""
    from embark.data.sample import take_sample

    key = (cluster.kind_of(job).key, namespace_of(job), name_of(job))
    pod = next((one for one in cluster.runs[key].pods if one.trains and _spec_of(one)), None)
    spec = parse_spec(_spec_of(pod)) if pod is not None else None
    if pod is None or spec is None:
        return prepared
    stored = cluster.objects[("Pod", key[1], pod.name)]
    found = volume_of_path(cluster, stored, spec.data.path)
    here = str(found[0].folder / found[1]) if found else spec.data.path
    data = spec.data.model_copy(update={"path": here})
    sample, _ = take_sample(spec.model_copy(update={"data": data}), num_train=NUM_SAMPLES, num_eval=NUM_SAMPLES) \
        if spec.data.kind != "synthetic" else (None, "")
    small = downscale_spec(spec, WORLD_SIZE, cluster.num_steps * spec.train.num_epochs, sample)
    text = to_toml(small.model_copy(update={"store": small.store.model_copy(update={"root": spec.store.root})}))
    pods = tuple(replace(
        one, env={**one.env, **({SPEC_VARIABLE: base64.b64encode(text.encode()).decode()} if SPEC_VARIABLE in one.env
                                else {})},
        mounts=tuple(replace(mount, files={**mount.files, SPEC_FILE: text}) if SPEC_FILE in mount.files else mount
                     for mount in one.mounts)) for one in prepared.workload.pods)
    return replace(prepared, workload=replace(prepared.workload, pods=pods), run=RehearsedRun(small, sample))


def rehearse_objects(
    objects: Sequence[Object], num_processes: int, num_steps: int, env: Mapping[str, str] | None = None,
    change: Callable[[PreparedTraining], PreparedTraining] | None = None,
) -> Outcome:
    """Train the job among these objects in processes of this machine, with `env`. `change` replaces parts of what was
    prepared for them; then their exit codes alone decide, as in a cluster."""
    logs: dict[str, list[str]] = {}
    observer = Observer(lambda pod, rank, line: logs.setdefault(pod, []).append(line),
                        lambda line: logs.setdefault("", []).append(line))
    try:
        texts = {"job.yaml": yaml.safe_dump_all(objects)}
        prepared = prepare_training(texts, read_texts(texts), num_processes=num_processes, num_steps=num_steps)
        report = rehearse(change(prepared) if change else prepared, observer, env=env)
    except UserError as error:
        return Outcome(False, error.what)
    said = {pod: "\n".join(lines) + "\n" for pod, lines in logs.items() if pod}
    codes = {end.name: end.code for end in report.ends}
    is_ok = report.finish == "succeeded" if change else report.verdict.is_ok
    return Outcome(is_ok, report.verdict.sentence, logs=said, codes=codes)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return [text]
