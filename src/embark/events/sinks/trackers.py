"""Weights & Biases and MLflow: every point of the curves, the spec as the run's configuration, and how the run ended.

A run that is resumed continues the run it has there, found by an id that the run directory keeps.
"""

import json
import logging
import os
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from embark.events.events import Event
from embark.events.metrics import readings
from embark.formatting import redact
from embark.spec import flatten
from embark.values import JsonDict, JsonMap, frozen
from .services import NewestReadings, SendingSink, batched, require_packages
from .tensorboard import STEPS, tag_of

MAX_WAITING = 20_000  # Points kept for a service that does not answer; then the oldest are dropped.
MAX_AT_ONCE = 1000  # MLflow takes so many metrics in a request, and a tenth of them as parameters.
MAX_PARAMETER = 6000  # Characters of a parameter that MLflow accepts.
KINDS = frozenset({"step", "eval", "phases"})  # Events of every rank and machine would be too many.
PROJECT = "embark"
TAG = "embark.id"
STATUS = {"done": "FINISHED", "interrupt": "KILLED", "interrupted": "KILLED", "budget": "KILLED"}
"""MLflow's words for outcomes; anything else failed."""
ANSWER_S = 10.0  # Limit for W&B to begin a run and to upload its end: the process cannot exit meanwhile.


@frozen
class TrackedRun:
    """The description of a run that a service receives."""

    name: str
    project: str  # Empty: the environment's, else `embark`.
    spec: JsonMap  # The resolved spec, in JSON's types.
    folder: Path  # The run directory on this machine.
    id_file: Path

    @property
    def config(self) -> JsonDict:
        return dict(_without_secrets(self.spec))

    def find_or_make_id(self) -> str:
        """Return the id of the run, which is the same for every start."""
        if not self.id_file.is_file():
            self.id_file.write_text(f"{secrets.token_hex(6)}\n", encoding="ascii")
        return self.id_file.read_text(encoding="ascii").strip()


@frozen
class Point:
    """The metrics of one event, by their TensorBoard tags."""

    step: int
    time_s: float
    values: Mapping[str, float]


class Points(NewestReadings):
    """Every point of the curves that was not sent yet, and how the run ended."""

    def __init__(self) -> None:
        self._waiting: deque[Point] = deque(maxlen=MAX_WAITING)
        self.outcome = ""

    def add(self, event: Event) -> None:
        if event.kind == "end":
            self.outcome = str(event.values.get("outcome", ""))
        elif event.kind in ("error", "interrupt"):
            self.outcome = event.kind
        elif event.kind in KINDS and event.values.get("step") is not None:
            values = {tag_of(event.kind, one): one.value for one in readings(event) if one.metric.name not in STEPS}
            if values:
                self._waiting.append(Point(int(event.values["step"]), event.time_s, values))

    def fresh(self) -> list[Point]:
        return list(self._waiting)

    def sent(self, points: Sequence[Point]) -> None:
        """Forget these points; new ones may have come meanwhile, and driven out some of these."""
        gone = set(map(id, points))
        while self._waiting and id(self._waiting[0]) in gone:
            self._waiting.popleft()


def tracker_sink(name: Literal["wandb", "mlflow"], run: TrackedRun, every_s: float) -> SendingSink:
    """Open W&B or MLflow; server, project and credentials are those of WANDB_API_KEY, WANDB_ENTITY, WANDB_BASE_URL,
    WANDB_MODE and netrc, or of MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN and their like."""
    title, package = {"wandb": ("W&B", "wandb"), "mlflow": ("MLflow", "mlflow-skinny")}[name]
    require_packages(f"{title} needs the {package} package, which is not installed", name, name)
    run.find_or_make_id()
    points = Points()
    return SendingSink(title, lambda: Wandb(run, points) if name == "wandb" else Mlflow(run, points), every_s, points)


class Wandb:
    """A client of W&B. What it collects by itself, console output, code, arguments and packages, is off: nothing would
    redact it."""

    def __init__(self, run: TrackedRun, points: Points) -> None:
        import wandb

        self._points = points
        settings = wandb.Settings(
            silent=True, console="off", disable_code=True, disable_git=True, disable_job_creation=True, symlink=False,
            x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
            init_timeout=ANSWER_S, finish_timeout=ANSWER_S
        )
        wandb.setup(settings=settings)  # also silences what comes before the run, and its question for a key
        try:
            self._run: Any = wandb.init(
                project=run.project or os.getenv("WANDB_PROJECT") or PROJECT, name=run.name,
                id=run.find_or_make_id(), resume="allow", config=run.config, dir=run.folder, settings=settings,
                allow_val_change=True)
        except Exception:
            wandb.teardown()  # else the next attempt finds the id in use
            raise
        # W&B's own step only grows, and a resumed run begins again at its checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({**point.values, "step": point.step, "time_s": point.time_s})

    def close(self) -> None:
        self._run.finish(exit_code=0 if self._points.outcome == "done" else 1)


class Mlflow:
    """A run of MLflow's experiment, with the spec's fields as parameters, which keep their first value."""

    def __init__(self, run: TrackedRun, points: Points) -> None:
        # Without them, the client tries for minutes before anyone is told.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        import mlflow
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "urllib3"):  # the sink reports a failure once, and these would each time
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._points, self._metric = points, Metric
        self._client: Any = MlflowClient()
        name = run.project or os.getenv("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = mlflow.set_experiment(name).experiment_id
        found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{run.find_or_make_id()}'", max_results=1)
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
        else:
            found = [self._client.create_run(experiment, run_name=run.name, tags={TAG: run.find_or_make_id()})]
        self._id: str = found[0].info.run_id
        new = [Param(name, value[:MAX_PARAMETER]) for name, value in parameters(run.config).items()
               if name not in found[0].data.params]
        for some in batched(new, MAX_AT_ONCE // 10):
            self._client.log_batch(self._id, params=some)

    def send(self, points: Sequence[Point]) -> None:
        metrics = [self._metric(tag, value, int(point.time_s * 1000), point.step)
                   for point in points for tag, value in point.values.items()]
        for some in batched(metrics, MAX_AT_ONCE):
            self._client.log_batch(self._id, metrics=some)

    def close(self) -> None:
        self._client.set_terminated(self._id, STATUS.get(self._points.outcome, "FAILED"))


def parameters(config: JsonMap) -> dict[str, str]:
    """Return the fields of a spec as text by their dotted names."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in flatten(config).items()}


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_secrets(held) for name, held in value.items()}
    if isinstance(value, list):
        return [_without_secrets(held) for held in value]
    return redact(value) if isinstance(value, str) else value
