"""Who is told what: the run's own files, and whoever watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from embark.data import Source
from embark.errors import MissingPackage
from embark.spec import RunSpec, to_toml
from embark.store import RunDir, write_whole
from embark.train.build import Built
from embark.train.device_memory import device_bytes, host_bytes
from embark.train.world import World
from embark.watch import Event, EventLog, Fanout, Sink, TensorBoardSink, plan_text

Foresee = Callable[[RunSpec, dict[str, Any]], dict[str, Any] | None]
"""From a spec and the machine at hand to what the run should take there."""


class Telling:
    """Rank 0 tells; on the other ranks every call is for nothing."""

    def __init__(self, view: Sequence[Sink], files: Sequence[Sink]) -> None:
        self._files = Fanout(files)
        self._view = Fanout(view)
        self._all = Fanout([*files, *view])

    def tell(self, kind: str, values: dict[str, Any]) -> None:
        """To everyone."""
        self._all.emit(Event(kind, values))

    def warn(self, text: str) -> None:
        """A sentence that a person should read."""
        self.tell("note", {"level": "warning", "text": text})

    def record(self, kind: str, values: dict[str, Any]) -> None:
        """Into the run's files only."""
        self._files.emit(Event(kind, values))

    def tick(self, values: dict[str, Any]) -> None:
        """To whoever watches now; nothing is kept."""
        self._view.emit(Event("progress", values))

    def close(self) -> None:
        self._all.close()


@contextmanager
def telling(spec: RunSpec, world: World, run_dir: RunDir, view: Sequence[Sink]) -> Iterator[Telling]:
    """Open the run's files on rank 0, and close them whatever happens."""
    files: list[Sink] = []
    missing = ""
    if world.is_first:
        files.append(EventLog(run_dir.events))
        if spec.watch.tensorboard:
            try:
                files.append(TensorBoardSink(run_dir.tensorboard))
            except MissingPackage as error:
                missing = f"no TensorBoard curves: {error.what}; {error.fix}"
    told = Telling(view if world.is_first else (), files)
    try:
        if missing:
            told.tell("note", {"level": "info", "text": missing})
        yield told
    finally:
        told.close()
        if world.is_first:
            run_dir.publish()


def tell_start(
    told: Telling, spec: RunSpec, world: World, run_dir: RunDir, source: Source, built: Built, *, step: int,
    num_steps: int, per_epoch: int,
) -> None:
    """What is about to run, and how it is laid out."""
    if world.is_first:
        write_whole(run_dir.spec, to_toml(spec))
        write_whole(run_dir.plan, plan_text(built.layout))
    told.tell("start", {
        "name": spec.name, "run_dir": run_dir.uri, "device": world.device.type,
        "device_name": world.device_name, "world_size": world.world_size, "engine": built.engine.name,
        "engine_reason": built.engine.reason, "precision": built.precision, "num_steps": num_steps,
        "first_step": step, "steps_per_epoch": per_epoch, "batch_size": spec.train.batch_size,
        "num_parameters": built.num_parameters, "table_bytes": sum(t["bytes"] for t in built.layout["tables"]),
        "num_train_samples": source.num_train_samples, "num_eval_samples": source.num_eval_samples,
    })
    told.tell("plan", built.layout)
    for note in source.notes:
        told.tell("note", {"level": "warning", "text": note})
    if step:
        told.tell("resume", {"step": step, "path": run_dir.shelf.where(step)})


def tell_foresight(told: Telling, spec: RunSpec, world: World, built: Built, foresee: Foresee | None) -> None:
    """What the run should take here, said before it has taken anything."""
    if foresee is None or not world.is_first:
        return
    foreseen = foresee(spec, {
        "device": world.device.type, "device_name": world.device_name, "engine": built.engine.name,
        "precision": built.precision, "world_size": world.world_size, "host_bytes": host_bytes(),
        "device_bytes": device_bytes(world.device) if world.device.type == "cuda" else 0,
    })
    if foreseen is not None:
        told.tell("predict", foreseen)
