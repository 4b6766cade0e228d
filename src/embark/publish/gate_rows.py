"""The rows of the gate: read once, scored by two artifacts as a server would, cut into slices, counted for drift."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from embark.data.evaluation_rows import EvaluationRows, open_rows
from embark.data.permuted_rows import RowsInMemory
from embark.data.prepared import Rows
from embark.data.task_labels import main_label
from embark.errors import DataError, UserError, nearest
from embark.events.drift import drift
from embark.export.artifact import Artifact
from embark.export.reference import Reference, encoded_rows
from embark.features.arrays import Doubles, Int64s
from embark.features.encoding import RowEncoder
from embark.run.feature_metrics import feature_names, slices_of
from embark.spec import PublishSpec, main_task
from embark.store.checkpoint_inspect import TrainedRun
from embark.values import frozen
from .gate import ColumnDrift, EarlierGate, GateSlice, ScoredRows

_CHUNK_ROWS = 8_192
_NEWS = 4  # Bins of two popular ids that others replace: that happens, and a fault moves most bins.


@frozen
class GateRows:
    """Labelled rows in memory."""

    opened: EvaluationRows
    rows: RowsInMemory

    def scored(self, candidate: Artifact, published: Artifact | None, bounds: PublishSpec, model_file: str = "",
               earlier: EarlierGate | None = None) -> ScoredRows:
        """Score the rows with both artifacts; `model_file` is a custom model's code."""
        spec = self.opened.spec
        label = main_label(self.rows.batch.label, spec.model.tasks) > 0.5
        return ScoredRows(
            label=label, candidate=self._scores(candidate, model_file),
            published=self._scores(published, model_file) if published else None, slices=self.slices(bounds),
            drifts=self.drifts(published.reference, published.encoder) if published else (), earlier=earlier)

    def _scores(self, artifact: Artifact, model_file: str) -> Doubles:
        from embark.trainers.torch.scoring.open_model import open_on_cpu

        model, tasks = open_on_cpu(artifact, model_file), self.opened.spec.model.tasks
        found = np.concatenate([model.score_encoded(rows) for rows in self._portions(artifact.encoder)])
        if found.ndim == 2:
            position = main_task(tasks)
            found = found[:, sum(task.num_outputs for task in tasks[:position])]
        if not np.isfinite(found).all():
            raise DataError(f"version {artifact.version}: {int((~np.isfinite(found)).sum()):,} scores are not finite",
                            "publish another checkpoint")
        return found.astype(np.float64)

    def _portions(self, encoder: RowEncoder) -> Iterator[Rows]:
        for start in range(0, self.rows.num_eval_samples, _CHUNK_ROWS):
            batch = self.rows.eval_rows(start, min(start + _CHUNK_ROWS, self.rows.num_eval_samples))
            yield encoded_rows(batch, self.opened.spec.model.table_list(), encoder)

    def slices(self, bounds: PublishSpec) -> list[GateSlice]:
        """Return slices by the values of the features that `[publish]` names."""
        names = feature_names(self.opened)
        for wanted in bounds.slices:
            if not any(wanted in (column, table) for column, _, table in names):
                raise UserError(f"publish.slices: {wanted}: the model has no such feature",
                                nearest(wanted, [column for column, _, _ in names]))
        return [GateSlice(f"{column} = {part.label}", part.samples)
                for number, (column, kind, table) in enumerate(names)
                if (column in bounds.slices or table in bounds.slices if bounds.slices else kind == "sparse")
                for part in slices_of(self.rows, self.opened, number, bounds.slice_values)]

    def drifts(self, reference: Reference, encoder: RowEncoder) -> list[ColumnDrift]:
        """Compare every column with the rows of the reference."""
        rng = np.random.default_rng(0)
        counts: list[Int64s] = []
        for rows in self._portions(encoder):
            found = reference.count(rows, encoder, rng)
            counts = found if not counts else [a + b for a, b in zip(counts, found, strict=True)]
        # In columns of ids with edges, some ids share a bin.
        return [ColumnDrift(f"column {column.name}" + (" (number of ids)" if column.kind == "length" else ""),
                            drift(column.counts, now, without=_NEWS if column.kind == "ids" and column.edges else 0))
                for column, now in zip(reference.columns, counts, strict=True)]


@contextmanager
def open_gate_rows(trained: TrainedRun, bounds: PublishSpec) -> Iterator[GateRows]:
    """Open the rows that `[publish]` names."""
    model = trained.spec.model
    if model.kind == "two_tower" or model.is_next_item or (model.tasks and main_task(model.tasks) < 0):
        raise UserError(f"{trained.run_dir.uri}: the gate needs predicted probabilities, and this model has none",
                        "publish.gate = false publishes without it")
    if trained.spec.stream.is_on and trained.spec.data.kind == "synthetic" and not bounds.data:
        raise UserError(f"{trained.run_dir.uri}: follows a stream, and the gate has no labelled rows",
                        "--set publish.data=ROWS names some; publish.gate = false, or --no-gate, publishes without "
                            "them")
    with open_rows(trained.spec, trained.fingerprint, bounds.data, run_uri=trained.run_dir.uri) as opened:
        if not (num := opened.source.num_eval_samples):
            raise DataError(f"{opened.description}: has no rows for the gate", "name rows with publish.data")
        yield GateRows(opened, RowsInMemory(opened.source.eval_rows(0, num)) if num <= bounds.rows else
                       RowsInMemory.folds(opened.source, bounds.rows, 1)[0])
