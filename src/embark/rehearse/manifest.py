"""The manifests to rehearse, and which of their objects is the job."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from embark.errors import UserError
from embark.kubernetes.objects import K8sObject, Objects, name_of, rows
from embark.kubernetes.pods import pod_specs, trains
from embark.kubernetes.yaml_nodes import SourceFile
from embark.lint.read import read_sources
from embark.values import JsonMap

KINDS = ("Job", "JobSet", "TrainJob", "PyTorchJob", "RayJob")  # Kinds of objects whose pods train.
MANIFEST_SUFFIXES = (".yaml", ".yml", ".json")
TARGETS = ("job", "jobset", "trainjob", "pytorchjob", "ray", "slurm", "follow", "serve")


def load_manifests(spec: str, sets: Sequence[str], num_nodes: int | None) -> dict[str, str]:
    """Return the manifests' texts by path, from files or as `embark render` would write them."""
    path = Path(spec)
    if path.is_dir() or (path.suffix in MANIFEST_SUFFIXES and path.is_file()):
        if num_nodes is not None or sets:
            raise UserError("--nodes and --set change a spec, and these are manifests",
                            "embark rehearse SPEC --nodes …, or render it again")
        return manifest_texts(path)
    if path.suffix in MANIFEST_SUFFIXES:
        raise UserError(f"{path}: no such file", "embark render SPEC --out FOLDER writes it")
    from embark.catalog import load_catalog
    from embark.lint.rendered import resolve_spec
    from embark.render.job import make_job
    from embark.render.render import own_files
    from embark.spec import load_spec

    sets = [*sets, *([f"place.nodes={num_nodes}"] if num_nodes is not None else [])]
    job = make_job(resolve_spec(load_spec(spec, sets))[0], load_catalog())
    if job.spec.place.target not in TARGETS:
        raise UserError(f'place.target = "{job.spec.place.target}" has no pods to rehearse',
                        f"set it to {', '.join(TARGETS)}")
    if job.target == "slurm":
        from .batch_job import batch_job

        return {"slurm_job.json": batch_job(job)}
    return {file.path: file.text for file in own_files(job) if file.path.endswith(MANIFEST_SUFFIXES)}


def read_texts(texts: Mapping[str, str]) -> Objects:
    """Return the objects of texts by their names, such as those that a renderer is about to write."""
    files = read_sources(SourceFile.of(Path(name), text) for name, text in texts.items())
    for bad in files.unread:
        raise UserError(f"{bad.source.path}:{bad.source.line_of(bad.index)}: {bad.what}", bad.fix)
    return Objects(tuple(one.root.plain() for one in files.documents if one.root.is_map))


def manifest_texts(path: Path) -> dict[str, str]:
    """Return the text of a manifest, or of all manifests of a folder."""
    paths = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.suffix in MANIFEST_SUFFIXES)
    texts = {}
    for one in paths:
        try:
            texts[str(one)] = one.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{one}: cannot be read: {error}",
                            "it must be a YAML file in UTF-8 that you may read") from error
    if not texts:
        raise UserError(f"{path}: has no manifest in it", "embark render SPEC --out FOLDER writes one")
    return texts


def find_training_job(objects: Objects, where: str) -> K8sObject:
    """Return the job that trains, if one of several does; else the only one."""
    all_jobs = objects.of_kind(*KINDS)
    training = [one for one in all_jobs if one["kind"] in ("JobSet", "TrainJob", "PyTorchJob")
                or any(map(trains, pod_specs(one)))]
    jobs = training or all_jobs
    if len(jobs) == 1:
        return jobs[0]
    if jobs:
        listed = ", ".join(f"{one['kind']} {name_of(one)}" for one in jobs)
        raise UserError(f"{where}: has {len(jobs)} jobs in it: {listed}", "name the file of one")
    kinds = sorted({str(one["kind"]) for one in objects.all if one.get("kind")})
    if not kinds:
        raise UserError(f"{where}: has no object of Kubernetes in it, only a part of one",
                        "give the whole manifest, with apiVersion and kind")
    raise UserError(f"{where}: has no job in it, only {', '.join(kinds)}",
                    f"what can be rehearsed is a {', a '.join(KINDS)}")


def selects(selector: JsonMap | None, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector selects an object; a missing one selects nothing."""
    return selector is not None and has_labels(labels, selector.get("matchLabels") or {}) and all(
        meets(labels, one) for one in rows(selector, "matchExpressions"))


def meets(labels: Mapping[str, str], expression: JsonMap) -> bool:
    value, values = labels.get(str(expression.get("key"))), expression.get("values") or []
    return {"In": value in values, "NotIn": value not in values, "Exists": value is not None,
            "DoesNotExist": value is None}.get(str(expression.get("operator")), False)


def has_labels(labels: JsonMap, wanted: JsonMap | Iterable[tuple[str, Any]]) -> bool:
    return all(str(labels.get(name)) == str(value) for name, value in dict(wanted).items())
