"""How good the model of a finished run is, on any rows. The run's directory is only read, and its lease not taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from embark.data.evaluation_rows import EvaluationRows, open_rows
from embark.errors import EmbarkError
from embark.run.evaluation import Evaluation
from embark.run.loop import check_against
from embark.run.trainer import Trainer, TrainerBackend, World
from embark.spec import RunSpec
from embark.store import RunDir
from embark.store.trained_run import TrainedRun


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The metrics of one checkpoint on some rows."""

    run: str
    step: int
    data: str  # Where the rows are from; empty of synthetic data.
    split: str  # Empty of a raw file.
    rows: str  # The same for a person.
    device: str
    num_samples: int
    auc: float
    normalized_entropy: float
    log_loss: float
    calibration: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A trainer with the weights of a checkpoint."""

    trainer: Trainer
    world: World
    step: int


@contextmanager
def loaded(trained: TrainedRun, backend: TrainerBackend, rows: EvaluationRows) -> Iterator[LoadedRun]:
    """The model on this machine. What libraries cache goes into a folder of its own, and none of it into the run's."""
    spec = rows.spec
    with backend.join(spec.place) as world, TemporaryDirectory(prefix="embark-cache-") as cache:
        if world.device_type == "cpu":  # where there is one engine, whichever trained it
            spec = spec.model_copy(update={"train": spec.train.model_copy(update={"engine": "auto"})})
        check_against(spec, world)
        step = trained.checkpoint.step
        try:
            trainer = backend.build(spec, world, max(1, step), rows.source, RunDir(cache))
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
    """The metrics on `split` of the run's data, or of the prepared data or the raw files at `data`."""
    with (
        open_rows(trained.spec, trained.fingerprint, data, split) as rows,
        loaded(trained, open_backend(trained.spec), rows) as model,
    ):
        found = Evaluation(rows.source, rows.spec.train.batch_size, model.world).run(
            model.trainer, model.step, lambda: False)
        return EvaluationResult(
            run=trained.run_dir.uri, step=model.step, data=rows.path, split=rows.split, rows=rows.description,
            device=model.world.device_name, num_samples=int(found["num_samples"]), auc=found["auc"],
            normalized_entropy=found["normalized_entropy"], log_loss=found["log_loss"],
            calibration=found["calibration"], notes=(*rows.notes, *rows.source.notes),
        )
