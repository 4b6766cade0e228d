"""`embark evaluate`: a run's model on other rows, and which features it depends on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from embark.errors import UserError
from embark.events.metrics import ranking_rows, task_rows
from embark.formatting import format_float
from .console import Console, Flag, OptionalInt

if TYPE_CHECKING:
    from embark.run.evaluate_run import EvaluationResult
    from embark.run.feature_metrics import Estimate, ImportanceResult

Optional = Parameter(show_default=False)


def evaluate(
    run: str, /, *, split: Annotated[Literal["train", "validation", "test"] | None, Optional] = None, data: str = "",
    step: OptionalInt = None, importance: Flag = False,
    rows: OptionalInt = None, console: Console = Console()
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
    importance
        Show what each feature is worth: permute it and measure how much worse the predictions become.
    rows
        With --importance: how many rows to use, spread evenly (default 50,000).
    """
    if rows is not None and not importance:
        raise UserError("--rows needs --importance", "add it, or leave --rows out")
    from embark.trainers import evaluate as evaluate_run
    from embark.trainers import feature_importance

    if importance:
        with console.stages() as show:
            found = feature_importance(
                run, data=data, split=split or "", step=step, rows=50_000 if rows is None else rows,
                on_progress=lambda done, total: show("permuting features", done / total, f"{done} of {total}"))
        console.show(found, _render_importance)
        return
    with console.waiting("evaluating"):
        result = evaluate_run(run, data=data, split=split or "", step=step)
    console.show(result, _render)


def _render(console: Console, result: EvaluationResult) -> None:
    for note in result.notes:
        console.warning(note)
    if result.rankings:
        console.result(f"{result.run}, step {result.step:,}, on {result.device}\n{result.rows}")
        console.table(ranking_rows(result.rankings))
        return
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
    if result.auc != result.auc:
        console.text("AUC is undefined on these rows: it needs both labels.")
    if rows := task_rows({"tasks": result.tasks}, {}):
        console.table([{"task": row.task, "metric": row.metric, "value": row.held_out, "ceiling": row.ceiling}
                       for row in rows], title="Tasks; the figures above are the first binary task's, and the weighted "
                                               "sum of the losses")
    if result.split == "train":
        console.text("The model was trained on these rows: held-out rows show how it does on new ones.")


def _render_importance(console: Console, found: ImportanceResult) -> None:
    for note in found.notes:
        console.warning(note)
    console.table(
        [{"feature": one.feature, "kind": one.kind, "loss": f"{one.log_loss_increase.mean:.4f}",
          "loss_range": _interval(one.log_loss_increase), "auc": f"{one.auc_drop.mean:.4f}",
          "auc_range": _interval(one.auc_drop), "differs": not one.log_loss_increase.includes_zero}
         for one in found.features],
        {"feature": "feature", "kind": "kind", "loss": "log loss increase", "loss_range": "95% interval",
         "auc": "AUC drop", "auc_range": "95% interval", "differs": "differs from 0"},
        title=f"{found.run}, step {found.step:,}: {found.num_samples:,} rows, {found.rows}; "
              f"AUC {format_float(found.auc)}, log loss {format_float(found.log_loss)}")
    console.text(f"\n{found.method[:1].upper()}{found.method[1:]}.")


def _interval(estimate: Estimate) -> str:
    return f"{estimate.low:.4f} to {estimate.high:.4f}"
