"""How good the model of a finished run is, on any rows. The run's directory is only read, and its lease not taken."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import field
from tempfile import TemporaryDirectory

from embark.data import open_source
from embark.data.evaluation_rows import EvaluationRows, open_rows
from embark.errors import EmbarkError
from embark.events.results import Tabular
from embark.spec import RunSpec
from embark.spec.train import RANKING_METRICS
from embark.store import RunDir
from embark.store.checkpoint_inspect import TrainedRun
from embark.values import JsonDict, frozen
from .evaluation import Evaluation
from .resolve import resolve_evaluation
from .trainer import Trainer, TrainerBackend, World


@frozen
class EvaluationResult(Tabular):
    """The metrics of one checkpoint on some rows."""

    run: str
    step: int
    data: str  # Path of the rows; empty for synthetic data.
    split: str  # Empty for a raw file.
    rows: str  # Data and split in words.
    device: str
    num_samples: int
    auc: float
    normalized_entropy: float
    log_loss: float
    calibration: float
    ranking: Mapping[str, float] | None = None  # The metrics of two towers and of the next item.
    rankings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Hit, NDCG and MRR of a model of the next item at several K, by what the held-out item is ranked among:
    `all_items`, `unseen_items`, and `sampled_negatives`, which compares with other such figures only."""
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # Metrics of `model.tasks`, by name.
    notes: tuple[str, ...] = ()

    def to_rows(self) -> list[JsonDict]:
        """Return the metrics in one row, or in one for each task."""
        where = {"run": self.run, "step": self.step, "split": self.split, "num_samples": self.num_samples}
        if self.tasks:
            return [{**where, "task": name, **metrics} for name, metrics in self.tasks.items()]
        metrics = self.ranking if self.ranking is not None else {
            "auc": self.auc, "normalized_entropy": self.normalized_entropy, "log_loss": self.log_loss,
            "calibration": self.calibration}
        return [{**where, **metrics}]


@frozen
class LoadedRun:
    """A trainer with the weights of a checkpoint."""

    trainer: Trainer
    world: World
    step: int


@contextmanager
def loaded(trained: TrainedRun, backend: TrainerBackend, rows: EvaluationRows) -> Iterator[LoadedRun]:
    """Load the model on this machine. What libraries cache goes into a folder of its own, and nothing into the
    run's."""
    with backend.join(rows.spec.place) as world, TemporaryDirectory(prefix="embark-cache-") as cache:
        spec = resolve_evaluation(rows.spec, world)
        step = trained.checkpoint.step
        try:
            source = rows.source
            if spec.model.retrieved and rows.path not in ("", trained.spec.data.path):
                source = open_source(trained.spec)  # which has the items, and what users have seen
            trainer = backend.build(spec, world, max(1, step), source, RunDir(cache))
            with closing(trainer.checkpointer(trained.run_dir)) as checkpointer:
                checkpointer.load(trained.checkpoint)
                yield LoadedRun(trainer, world, step)
        except Exception as error:
            if not isinstance(error, EmbarkError) and (explained := backend.explain(error)):
                raise explained from error
            raise


def evaluate_run(
    trained: TrainedRun, open_backend: Callable[[RunSpec], TrainerBackend], *, data: str = "", split: str = ""
) -> EvaluationResult:
    """Measure the metrics on `split` of the run's data, or of the prepared data or the raw files at `data`."""
    with (
        open_rows(trained.spec, trained.fingerprint, data, split, run_uri=trained.run_dir.uri) as rows,
        loaded(trained, open_backend(trained.spec), rows) as model
    ):
        found = Evaluation(rows.source, rows.spec.train.batch_size, model.world, rows.spec.model.tasks).run(
            model.trainer, model.step, lambda: False)
        return EvaluationResult(
            run=trained.run_dir.uri, step=model.step, data=rows.path, split=rows.split, rows=rows.description,
            device=model.world.device_name, num_samples=int(found["num_samples"]),
            **{name: found.get(name, math.nan) for name in ("auc", "normalized_entropy", "log_loss", "calibration")},
            ranking={name: found[name] for name in (*RANKING_METRICS, "k", "num_users")} if "k" in found else None,
            rankings=found.get("rankings", {}), tasks=found.get("tasks", {}),
            notes=(*rows.notes, *rows.source.notes)
        )
