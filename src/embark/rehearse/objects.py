"""The objects of a manifest, and which of them is the job to rehearse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embark.errors import UserError

Thing = Mapping[str, Any]
KINDS = ("Job", "JobSet", "TrainJob", "PyTorchJob", "Pod")
"""Those that make pods which train."""
_LAUNCHERS = ("torchrun", "torch.distributed", "embark.torchrun")
_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Objects:
    """All objects of some files, together."""

    all: tuple[Thing, ...]

    def of_kind(self, *kinds: str) -> list[Thing]:
        return [one for one in self.all if one.get("kind") in kinds]

    def find(self, kind: str, name: str, namespace: str) -> Thing | None:
        named = (one for one in self.of_kind(kind) if name_of(one) == name and namespace_of(one) == namespace)
        return next(named, None)


def read_texts(texts: Mapping[str, str]) -> Objects:
    """Of texts by their names, such as those that a renderer is about to write."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it was built
    found: list[Thing] = []
    for name, text in texts.items():
        try:
            for document in yaml.load_all(text, loader):
                found += _unpacked(document)
        except yaml.YAMLError as error:
            line = getattr(getattr(error, "problem_mark", None), "line", 0) + 1
            raise UserError(f"{name}:{line}: is no YAML: {getattr(error, 'problem', error)}",
                            fix="mend that line") from error
    return Objects(tuple(found))


def manifest_texts(path: Path) -> dict[str, str]:
    """A manifest, or all manifests of a folder."""
    paths = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.suffix in _SUFFIXES)
    texts = {}
    for one in paths:
        try:
            texts[str(one)] = one.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{one}: cannot be read: {error}") from error
    if not texts:
        raise UserError(f"{path}: has no manifest in it", fix="embark render SPEC --out FOLDER writes one")
    return texts


def the_job(objects: Objects, where: str) -> Thing:
    """The one that trains."""
    all_jobs = objects.of_kind(*KINDS)
    found = [one for one in all_jobs if _is_training(one)] or all_jobs
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(f"{one['kind']} {name_of(one)}" for one in found)
        raise UserError(f"{where}: has {len(found)} jobs in it: {listed}", fix="name the file of one")
    kinds = sorted({str(one["kind"]) for one in objects.all if one.get("kind")})
    if not kinds:
        raise UserError(f"{where}: has no object of Kubernetes in it, only a part of one",
                        fix="give the whole manifest, with apiVersion and kind")
    raise UserError(f"{where}: has no job in it, only {', '.join(kinds)}",
                    fix=f"what can be rehearsed is a {', a '.join(KINDS)}")


def name_of(thing: Thing) -> str:
    return str(at(thing, "metadata.name") or "")


def namespace_of(thing: Thing) -> str:
    return str(at(thing, "metadata.namespace") or "default")


def at(thing: Any, path: str) -> Any:
    """What stands at a dotted path; None where nothing does."""
    for word in path.split("."):
        thing = thing.get(word) if isinstance(thing, Mapping) else None
    return thing


def rows(thing: Any, path: str) -> list[Thing]:
    """The same for a list of objects: empty where there is none."""
    found = at(thing, path)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def templates(job: Thing) -> Iterator[Thing]:
    """The pod templates of a job, whatever its kind; of a Pod, itself."""
    kind = job.get("kind")
    if kind == "Job":
        yield at(job, "spec.template") or {}
    elif kind == "Pod":
        yield job
    elif kind in ("JobSet", "TrainingRuntime", "ClusterTrainingRuntime"):
        holder = "spec.replicatedJobs" if kind == "JobSet" else "spec.template.spec.replicatedJobs"
        for one in rows(job, holder):
            yield at(one, "template.spec.template") or {}
    elif kind == "PyTorchJob":
        for one in (at(job, "spec.pytorchReplicaSpecs") or {}).values():
            yield at(one, "template") or {}


def _is_training(job: Thing) -> bool:
    if job["kind"] in ("TrainJob", "PyTorchJob", "JobSet"):
        return True
    for template in templates(job):
        for container in rows(template, "spec.containers"):
            limits = at(container, "resources.limits") or {}
            words = " ".join(str(word) for word in [*(container.get("command") or ()), *(container.get("args") or ())])
            if any("gpu" in str(name) for name in limits) or any(name in words for name in _LAUNCHERS):
                return True
    return False


def _unpacked(document: Any) -> list[Thing]:
    if not isinstance(document, Mapping):
        return []
    if str(document.get("kind", "")).endswith("List") and isinstance(document.get("items"), list):
        return [one for one in document["items"] if isinstance(one, Mapping)]
    return [document]
