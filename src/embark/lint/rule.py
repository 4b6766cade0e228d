"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from embark.catalog.machine import Catalog, Machine
from embark.lint.job import TrainingJob, jobs_of
from embark.lint.pods import Pod, pods_of
from embark.lint.read import Document, Files
from embark.lint.shell import Command
from embark.lint.source import Edit, Place

Level = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule's fault, found at a place."""

    place: Place
    what: str
    """What will happen, with the values of this file."""
    fix: str
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class World:
    """All that was given, together: an object of one file may refer to one of another."""

    files: Files
    catalog: Catalog

    @property
    def documents(self) -> tuple[Document, ...]:
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
        return [command for script in self.files.scripts for command in script.commands]

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


Check = Callable[[World], Iterable[Hit]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One mistake that validates and yet fails."""

    code: str
    name: str
    level: Level
    happens: str
    """What will happen, whatever the values."""
    source: str
    """Where it is known from."""
    check: Check
    can_fix: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule's hit, as it is told."""

    rule: Rule
    hit: Hit

    @property
    def line(self) -> int:
        return self.hit.place.line

    @property
    def path(self) -> str:
        return str(self.hit.place.source.path)


@dataclass(slots=True)
class Rules:
    """The rules of one file, in order."""

    all: list[Rule] = field(default_factory=list)

    def add(self, code: str, name: str, level: Level, happens: str, source: str,
            *, can_fix: bool = False) -> Callable[[Check], Check]:
        """A function that finds the fault, as a rule."""
        def register(check: Check) -> Check:
            self.all.append(Rule(code, name, level, happens, source, check, can_fix))
            return check
        return register

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.all)
