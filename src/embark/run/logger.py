"""A run's log: its own files, the configured sinks, and the person who watches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from embark import __version__
from embark.data.kept_maps import keep_id_maps, keep_log_maps
from embark.errors import EmbarkError, Interrupted, MissingPackage, OverBudget, Preempted, UserError
from embark.events import Event, EventLog, Fanout, Sink, TensorBoardSink, plan_text
from embark.events.events import Change
from embark.events.sinks.services import SendingSink, cloudwatch_sink, otlp_sink
from embark.plan.predict import predict_local
from embark.spec import RunSpec, to_toml
from embark.stack.versions import installed
from embark.store import EVENTS, RunDir, write_atomic
from embark.values import JsonDict
from .budget import PROCESS, usd_per_hour
from .host import host_bytes
from .resolve import ResolvedRun
from .trainer import Ranks, Trainer, World


class RunLogger:
    """Logs on rank 0; on the other ranks it has no sinks."""

    def __init__(
        self, view: Sequence[Sink], files: Sequence[Sink], is_lost: Callable[[], bool] = lambda: False
    ) -> None:
        """Create the logger. `is_lost` returns whether another process has taken over the run and writes its log."""
        self._is_lost = is_lost
        self._files = Fanout(files)
        self._view = Fanout(view)
        self._all = Fanout([*files, *view])
        self._senders = [sink for sink in files if isinstance(sink, SendingSink)]

    def log(self, kind: str, values: JsonDict) -> None:
        """Emit an event to all sinks."""
        if self._is_lost():
            return
        self._all.emit(Event(kind, values))
        self._log_problems()

    def note(self, text: str, level: str = "info") -> None:
        """Emit a sentence for a person."""
        self.log("note", {"level": level, "text": text})

    def warn(self, text: str) -> None:
        self.note(text, "warning")

    def record(self, kind: str, values: JsonDict) -> None:
        """Emit an event into the run's files only."""
        if self._is_lost():
            return
        self._files.emit(Event(kind, values))

    def tick(self, values: JsonDict) -> None:
        """Emit progress to the live view only."""
        self._view.emit(Event("progress", values))

    def close(self) -> None:
        """Close the senders first: problems with their last batch are still logged."""
        for sink in self._senders:
            sink.hurry()  # all of them in parallel
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
    is_lost = run_dir.lease.is_lost if run_dir.lease else lambda: False
    files: list[Sink] = [EventLog(run_dir.events, is_lost, run_dir.check_lease)] if world.is_first else []
    missing: list[str] = []
    for what, open_sink in _configured_sinks(spec, run_dir) if world.is_first else ():
        try:
            files.append(open_sink())
        except MissingPackage as error:
            missing.append(f"no {what}: {error.what}; {error.fix}")
        except OSError as error:
            missing.append(f"no {what}: {error.strerror or error}")
    logger = RunLogger(view if world.is_first else (), files, is_lost)
    try:
        for text in missing:
            logger.note(text)
        with EventUploader(run_dir, is_on=world.is_first):
            yield logger
    finally:
        logger.close()
        if world.is_first:
            run_dir.publish()
        PROCESS.run_ended()


def _configured_sinks(spec: RunSpec, run_dir: RunDir) -> Iterator[tuple[str, Callable[[], Sink]]]:
    """Open the sinks that the spec asks for besides the event log. None of them can stop a run."""
    watch = spec.watch
    if watch.tensorboard:
        yield "TensorBoard curves", lambda: TensorBoardSink(run_dir.tensorboard)
    if watch.prometheus_port:
        from embark.events.sinks.prometheus import PrometheusSink

        yield "Prometheus endpoint", lambda: PrometheusSink(spec.name, watch.prometheus_port, watch.prometheus_host)
    if "cloudwatch" in watch.sinks:
        yield "CloudWatch", lambda: cloudwatch_sink(spec.name, watch.cloudwatch_namespace, watch.send_every_s)
    if "otlp" in watch.sinks:
        yield "OTLP", lambda: otlp_sink(spec.name, watch.send_every_s)
    if {"wandb", "mlflow"} & set(watch.sinks):
        from embark.events.sinks.trackers import TrackedRun, tracker_sink

        tracked = TrackedRun(run_dir.uri.rstrip("/").rsplit("/", 1)[-1], watch.project, spec.model_dump(mode="json"),
                             run_dir.path, run_dir.tracking_id)
        if "wandb" in watch.sinks:
            yield "W&B", lambda: tracker_sink("wandb", tracked, watch.send_every_s)
        if "mlflow" in watch.sinks:
            yield "MLflow", lambda: tracker_sink("mlflow", tracked, watch.send_every_s)


@contextmanager
def recorded_errors(logger: RunLogger, explain: Callable[[Exception], EmbarkError | None]) -> Iterator[None]:
    """Record the error that ends the run, and raise it as one of Embark's if `explain` knows it."""
    try:
        yield
    except Exception as raised:
        if isinstance(raised, MemoryError):
            error: EmbarkError | None = UserError(f"out of host memory: {str(raised) or 'an allocation failed'}",
                                                  "a smaller train.batch_size, smaller tables, or more memory")
        else:
            error = raised if isinstance(raised, EmbarkError) else explain(raised)
        if not isinstance(error, Interrupted | Preempted | OverBudget):
            logger.record("error", {"text": str(error or raised)})  # the command itself shows it to the person
        if error is None or error is raised:
            raise
        raise error from raised


def log_start(
    logger: RunLogger, run: ResolvedRun, world: World, run_dir: RunDir, trainer: Trainer, step: int
) -> None:
    """Log what is about to run, from `step` on, and how it is laid out."""
    spec, source, layout = run.spec, run.source, trainer.layout
    if world.is_first:
        run_dir.check_lease()
        write_atomic(run_dir.spec, to_toml(spec))
        write_atomic(run_dir.plan, plan_text(layout))
    logger.log("start", {
        "name": spec.name, "model_kind": spec.model.kind, "run_dir": run_dir.uri, "is_fresh": run_dir.is_fresh,
        "attempt": run_dir.attempt,
        "device": world.device_type, "device_name": world.device_name,
        "world_size": world.num_devices, "engine": trainer.engine.name, "engine_reason": trainer.engine.reason,
        "precision": trainer.precision, "num_steps": 0 if run.data.is_endless else run.num_steps, "first_step": step,
        "steps_per_epoch": run.steps_per_epoch, "batch_size": spec.train.batch_size,
        "num_parameters": trainer.num_parameters, "table_bytes": sum(t["bytes"] for t in layout["tables"]),
        **run.data.start_values(), "num_eval_samples": source.num_eval_samples,
        "age_s": PROCESS.uncounted_s(),
        "usd_per_hour": usd_per_hour(), "budget_usd": spec.place.budget_usd,
        "num_machines": max(1, world.num_devices // world.devices_per_host), "is_spot": spec.place.spot,
        "versions": {"embark": __version__, **{name: found for name, found in installed().items() if found}}
    })
    logger.log("plan", layout)
    if world.is_first and spec.data.kind in ("prepared", "interactions"):
        try:
            if spec.data.kind == "prepared":
                keep_id_maps(run_dir.uri, spec.data.path)
            elif maps := getattr(source, "maps", None):
                keep_log_maps(run_dir.uri, maps)
        except EmbarkError as error:  # training needs no map
            logger.warn(f"the run keeps no id maps, so that it is exported only where its data is: {error.what}")
    for note in source.notes:
        logger.warn(note)
    if step:
        logger.log("resume", {"step": step, "path": run_dir.checkpoints.where(step)})


def log_changes(logger: RunLogger, changes: Sequence[Change]) -> None:
    """Log accepted changes: what the run learns from is no longer what it was at its checkpoint."""
    for change in changes:
        logger.log("change", {"step": change.step, "field": change.field, "old": change.old, "new": change.new})


def log_prediction(logger: RunLogger, spec: RunSpec, world: World, trainer: Trainer) -> None:
    """Log what the run should take on this machine, before it has taken anything."""
    if not world.is_first:
        return
    prediction = predict_local(spec, {
        "device": world.device_type, "device_name": world.device_name, "engine": trainer.engine.name,
        "precision": trainer.precision, "world_size": world.num_devices, "host_bytes": host_bytes(),
        "device_bytes": world.device_bytes
    })
    if prediction is not None:
        logger.log("predict", prediction)


EVERY_S = 60.0
BYTES_PER_S = 1e6  # A long run's file is uploaded less often: it goes as a whole each time.
JOIN_S = 20.0


class EventUploader:
    """Uploads a remote run's events in a thread while it is entered."""

    def __init__(self, run_dir: RunDir, *, is_on: bool = True, every_s: float = EVERY_S) -> None:
        self._run_dir, self._every_s = run_dir, every_s
        self._num_uploaded = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="embark-upload", daemon=True)
        self._is_on = is_on and run_dir.is_remote

    def __enter__(self) -> EventUploader:
        if self._is_on:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for an upload under way, so that it cannot overwrite the run's last."""
        if self._is_on:
            self._is_over.set()
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._is_over.wait(max(self._every_s, self._num_uploaded / BYTES_PER_S)):
            try:
                text = self._run_dir.events.read_bytes()
                if len(text) > self._num_uploaded:
                    self._run_dir.check_lease()
                    self._run_dir.store.write(EVENTS, text[: text.rfind(b"\n") + 1])
                    self._num_uploaded = len(text)
            except (EmbarkError, OSError):  # the next save says what is wrong with the store
                continue
