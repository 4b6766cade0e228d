"""What a rule is, what it looks at, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from embark.catalog.machine import Catalog, Machine
from embark.lint.job import TrainingJob, jobs_of
from embark.lint.pods import Container, Pod, pods_of
from embark.lint.read import Document, Files
from embark.lint.shell import Command
from embark.lint.source import Edit, Node, Place, remove_item, remove_line

Level = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Hit:
    """A mistake, found at a place."""

    place: Place
    what: str = ""
    """What will happen, with the values of this file; the rule's own where it is empty."""
    fix: str = ""
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class World:
    """All that was given, together: an object of one file may refer to one of another."""

    files: Files
    catalog: Catalog

    @property
    def documents(self) -> list[Document]:
        return self.files.documents

    @cached_property
    def pods(self) -> list[Pod]:
        return [pod for document in self.documents for pod in pods_of(document)]

    def pods_in(self, document: Document) -> list[Pod]:
        return self._pods_by_root.get(id(document.root), [])

    @cached_property
    def jobs(self) -> list[TrainingJob]:
        return list(jobs_of(self.pods, self.catalog))

    @cached_property
    def commands(self) -> list[Command]:
        return [command for script in self.files.scripts for command in script]

    @cached_property
    def all_words(self) -> frozenset[str]:
        """Every word of every command, to ask whether something is installed anywhere."""
        return frozenset(word for command in self.commands for word in command.argv)

    def of_kind(self, *kinds: str) -> list[Document]:
        return [document for kind in kinds for document in self._by_kind.get(kind, ())]

    def named(self, kind: str, name: str, namespace: str) -> Document | None:
        return self._by_name.get((kind, name, namespace))

    def machine(self, name: str) -> Machine | None:
        """By any of its names; a machine type that cards are attached to is none of them."""
        return self._machines.get(name.lower())

    @cached_property
    def _pods_by_root(self) -> dict[int, list[Pod]]:
        found: dict[int, list[Pod]] = {}
        for pod in self.pods:
            found.setdefault(id(pod.document.root), []).append(pod)
        return found

    @cached_property
    def _by_kind(self) -> dict[str, list[Document]]:
        found: dict[str, list[Document]] = {}
        for document in self.documents:
            found.setdefault(document.kind, []).append(document)
        return found

    @cached_property
    def _by_name(self) -> dict[tuple[str, str, str], Document]:
        return {(one.kind, one.name, one.namespace): one for one in reversed(self.documents)}

    @cached_property
    def _machines(self) -> dict[str, Machine]:
        return {name.lower(): one for one in self.catalog.machines.values() for name in (one.name, *one.also)}


Check = Callable[..., Iterable[Hit]]
"""Takes what its first parameter names (`job`, `pod`, `command`, …), one at a time, and the world if it wants it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One mistake that validates and yet fails."""

    code: str
    name: str
    group: str
    level: Level
    happens: str
    """What will happen, whatever the values."""
    source: str
    """Where it is known from."""
    check: Check = field(repr=False)
    can_fix: bool = False
    kinds: frozenset[str] = frozenset()
    """Only objects of these kinds are checked; empty: all."""
    what: str = ""
    """What a hit says where it says nothing of its own."""
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule's hit, and what of both a user wants to know."""

    path: str
    line: int
    code: str
    name: str
    level: Level
    what: str
    fix: str
    happens: str
    source: str
    can_fix: bool
    hit: Hit = field(repr=False)

    @staticmethod
    def of(rule: Rule, hit: Hit) -> Finding:
        return Finding(
            path=str(hit.place.source.path), line=hit.place.line, code=rule.code, name=rule.name, level=rule.level,
            what=hit.what or rule.what, fix=hit.fix or rule.fix, happens=rule.happens, source=rule.source,
            can_fix=bool(hit.edits), hit=hit)


@dataclass(frozen=True, slots=True)
class Setting:
    """`NAME=value` at a place."""

    name: str
    value: str
    place: Place
    entry: tuple[Node, Node] | None = None
    """In a pod: the list that holds it, and its item."""
    is_exported: bool = False
    job: TrainingJob | None = None
    pod: Pod | None = None
    is_with_efa: bool = False
    """Settings of EFA stand in the same container, script or image."""

    @property
    def is_on_efa(self) -> bool:
        return self.job.cloud == "aws" if self.job is not None else self.is_with_efa

    @property
    def is_on_verbs(self) -> bool:
        return any(one.fabric.transport == "verbs" for one in self.job.machines) if self.job is not None else False

    @property
    def is_not_on_verbs(self) -> bool:
        return not self.is_on_verbs

    @property
    def is_anywhere(self) -> bool:
        """Nothing says which fabric it is meant for."""
        if self.job is not None:
            return not self.job.machines and self.job.cloud == ""
        return self.pod is None and not self.is_with_efa

    @property
    def removal(self) -> tuple[Edit, ...]:
        """What takes it away, where that can be done in place."""
        if self.entry is not None:
            return remove_item(*self.entry)
        return remove_line(self.place, "export") if self.is_exported else ()


def settings(world: World) -> Iterator[Setting]:
    """Of containers that train, of scripts and of Dockerfiles."""
    jobs = {id(job.container): job for job in world.jobs}
    by_pod = {id(job.pod): job for job in world.jobs}
    for pod in world.pods:
        if not pod.is_training:
            continue
        for container in pod.containers:
            with_efa = _has_efa(container.environment)
            for name, (entry, node) in container.environment.items():
                if node.place is not None and entry.place is not None:
                    yield Setting(name, node.text, entry.place, (container.env, entry), False,
                                  jobs.get(id(container)) or by_pod.get(id(pod)), pod, with_efa)
    for script in world.files.scripts:
        made = [one for command in script for one in command.assignments]
        with_efa = _has_efa(name for name, _, _ in made)
        for name, value, place in made:
            yield Setting(name, value, place, is_exported=True, is_with_efa=with_efa)
    for dockerfile in world.files.dockerfiles:
        contents = dockerfile.environment
        with_efa = _has_efa(name for name, _, _ in contents)
        for name, value, place in contents:
            yield Setting(name, value, place, is_with_efa=with_efa)


def set_in_pods(world: World) -> Iterator[tuple[Pod, Container, str, str, Place]]:
    """Of every pod, training or not."""
    for pod in world.pods:
        for container in pod.containers:
            for name, (_, value) in container.environment.items():
                if value.place is not None:
                    yield pod, container, name, value.text, value.place


def _has_efa(names: Iterable[str]) -> bool:
    return any(name.startswith("FI_") for name in names)
