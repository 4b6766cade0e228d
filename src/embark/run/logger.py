"""Who is told what: the run's own files, and whoever watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from embark import __version__
from embark.data import Source
from embark.errors import MissingPackage
from embark.events import Event, EventLog, Fanout, Sink, TensorBoardSink, plan_text
from embark.events.sinks.background import SendingSink
from embark.run.budget import process_age_s, usd_per_hour
from embark.run.host_memory import host_bytes
from embark.run.protocols import Model, Ranks, Shown
from embark.run.upload import Copying
from embark.spec import RunSpec, to_toml
from embark.stack.versions import installed
from embark.store import RunDir, write_atomic

PredictLocal = Callable[[RunSpec, dict[str, Any]], dict[str, Any] | None]
"""From a spec and the machine at hand to what the run should take there."""


class RunLogger:
    """Rank 0 tells; on the other ranks every call is for nothing."""

    def __init__(self, view: Sequence[Sink], files: Sequence[Sink]) -> None:
        self._files = Fanout(files)
        self._view = Fanout(view)
        self._all = Fanout([*files, *view])
        self._senders = [sink for sink in files if isinstance(sink, SendingSink)]

    def log(self, kind: str, values: dict[str, Any]) -> None:
        """To everyone."""
        self._all.emit(Event(kind, values))
        self._log_problems()

    def warn(self, text: str) -> None:
        """A sentence that a person should read."""
        self.log("note", {"level": "warning", "text": text})

    def record(self, kind: str, values: dict[str, Any]) -> None:
        """Into the run's files only."""
        self._files.emit(Event(kind, values))

    def tick(self, values: dict[str, Any]) -> None:
        """To whoever watches now; nothing is kept."""
        self._view.emit(Event("progress", values))

    def close(self) -> None:
        """The senders first: what they have to say of their last sending is still logger."""
        for sink in self._senders:
            sink.hurry()  # all at once
        Fanout(self._senders).close()
        self._log_problems()
        self._all.close()

    def _log_problems(self) -> None:
        for sink in self._senders:
            if problem := sink.take_problem():
                self._all.emit(Event("note", {"level": "warning", "text": problem}))


@contextmanager
def open_run_logger(spec: RunSpec, world: Ranks, run_dir: RunDir, view: Sequence[Sink]) -> Iterator[RunLogger]:
    """Open the run's files on rank 0, and close them whatever happens."""
    files: list[Sink] = [EventLog(run_dir.events)] if world.is_first else []
    missing: list[str] = []
    for what, open_sink in _others(spec, run_dir) if world.is_first else ():
        try:
            files.append(open_sink())
        except MissingPackage as error:
            missing.append(f"no {what}: {error.what}; {error.fix}")
        except OSError as error:
            missing.append(f"no {what}: {error.strerror or error}")
    logger = RunLogger(view if world.is_first else (), files)
    try:
        for text in missing:
            logger.log("note", {"level": "info", "text": text})
        with Copying(run_dir, is_on=world.is_first):
            yield logger
    finally:
        logger.close()
        if world.is_first:
            run_dir.publish()


def _others(spec: RunSpec, run_dir: RunDir) -> Iterator[tuple[str, Callable[[], Sink]]]:
    """Who is told besides the run's own record, as the spec has it. None of them can stop a run."""
    watch = spec.watch
    if watch.tensorboard:
        yield "TensorBoard curves", lambda: TensorBoardSink(run_dir.tensorboard)
    if watch.prometheus_port:
        from embark.events.sinks.prometheus import PrometheusSink

        yield "Prometheus endpoint", lambda: PrometheusSink(spec.name, watch.prometheus_port, watch.prometheus_host)
    if "cloudwatch" in watch.sinks:
        from embark.events.sinks.cloudwatch import cloudwatch_sink

        yield "CloudWatch", lambda: cloudwatch_sink(spec.name, watch.cloudwatch_namespace, watch.send_every_s)
    if "otlp" in watch.sinks:
        from embark.events.sinks.otlp import otlp_sink

        yield "OTLP", lambda: otlp_sink(spec.name, watch.send_every_s)


def log_start(
    logger: RunLogger, spec: RunSpec, world: Shown, run_dir: RunDir, source: Source, built: Model, *, step: int,
    num_steps: int, per_epoch: int,
) -> None:
    """What is about to run, and how it is laid out."""
    if world.is_first:
        write_atomic(run_dir.spec, to_toml(spec))
        write_atomic(run_dir.plan, plan_text(built.layout))
    logger.log("start", {
        "name": spec.name, "run_dir": run_dir.uri, "device": world.device.type,
        "device_name": world.device_name, "world_size": world.world_size, "engine": built.engine.name,
        "engine_reason": built.engine.reason, "precision": built.precision, "num_steps": num_steps,
        "first_step": step, "steps_per_epoch": per_epoch, "batch_size": spec.train.batch_size,
        "num_parameters": built.num_parameters, "table_bytes": sum(t["bytes"] for t in built.layout["tables"]),
        "num_train_samples": source.num_train_samples, "num_eval_samples": source.num_eval_samples,
        "age_s": process_age_s(), "usd_per_hour": usd_per_hour(), "budget_usd": spec.place.budget_usd,
        "num_machines": max(1, world.world_size // world.local_world_size), "is_spot": spec.place.spot,
        "versions": {"embark": __version__, **{name: found for name, found in installed().items() if found}},
    })
    logger.log("plan", built.layout)
    for note in source.notes:
        logger.log("note", {"level": "warning", "text": note})
    if step:
        logger.log("resume", {"step": step, "path": run_dir.checkpoints.where(step)})


def log_prediction(logger: RunLogger, spec: RunSpec, world: Shown, built: Model, foresee: PredictLocal | None) -> None:
    """What the run should take here, said before it has taken anything."""
    if foresee is None or not world.is_first:
        return
    foreseen = foresee(spec, {
        "device": world.device.type, "device_name": world.device_name, "engine": built.engine.name,
        "precision": built.precision, "world_size": world.world_size, "host_bytes": host_bytes(),
        "local_world_size": world.local_world_size,
        "device_bytes": world.device_bytes,
    })
    if foreseen is not None:
        logger.log("predict", foreseen)
