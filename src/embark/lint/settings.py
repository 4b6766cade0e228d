"""Environment variables wherever they are set: in pods, in scripts, in images."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from embark.lint.edit import remove_item, remove_line
from embark.lint.job import TrainingJob
from embark.lint.pods import Container, Pod
from embark.lint.rule import World
from embark.lint.source import Edit, Place
from embark.lint.yaml_nodes import Node


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
        made = [one for command in script.commands for one in command.assignments]
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
