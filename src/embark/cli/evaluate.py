"""`embark evaluate`: a run's model on other rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from embark.cli.console import Console
from embark.events.metrics import task_rows

if TYPE_CHECKING:
    from embark.run.evaluate_run import EvaluationResult

Optional = Parameter(show_default=False)


def evaluate(
    run: str, /, *, split: Annotated[Literal["train", "validation", "test"] | None, Optional] = None, data: str = "",
    step: Annotated[int | None, Optional] = None, console: Console = Console(),
) -> None:
    """Evaluate a run's newest checkpoint: AUC, normalized entropy, log loss, calibration.

    Uses the run's own held-out rows unless told otherwise. Only reads the run, in one process on this machine.

    Parameters
    ----------
    run
        A run's directory, its name under ./runs, or its URI; RUN@best for its best checkpoint, RUN@STEP for a step's.
    split
        Rows of this split.
    data
        Other prepared data, or raw CSV, JSON Lines or Parquet files: values get the ids of the run's own data.
    step
        The checkpoint of this step.
    """
    from embark.trainers import evaluate as evaluate_run

    with console.waiting("evaluating"):
        result = evaluate_run(run, data=data, split=split or "", step=step)
    console.show(result, _render)


def _render(console: Console, result: EvaluationResult) -> None:
    for note in result.notes:
        console.warning(note)
    if result.ranking is not None:
        k = int(result.ranking["k"])
        ranking = {f"{label}@{k}": result.ranking[name] for label, name in
                   (("Recall", "recall_at_k"), ("NDCG", "ndcg_at_k"), ("Hit", "hit_at_k"))}
        console.result(f"{result.run}, step {result.step:,}, on {result.device}\n{result.rows}")
        console.table([{**ranking, "users": int(result.ranking["num_users"]), "rows": result.num_samples}])
        return
    metrics = {"AUC": result.auc, "normalized entropy": result.normalized_entropy, "log loss": result.log_loss,
               "calibration": result.calibration, "rows": result.num_samples}
    console.result(f"{result.run}, step {result.step:,}, on {result.device}\n{result.rows}")
    console.table([metrics])
    if rows := task_rows({"tasks": result.tasks}, {}):
        console.table([{"task": row.task, "metric": row.metric, "value": row.held_out, "ceiling": row.ceiling}
                       for row in rows], title="Tasks; the figures above are the first binary task's, and the weighted "
                                               "sum of the losses")
    if result.split == "train":
        console.text("The model was trained on these rows: held-out rows show how it does on new ones.")
