"""Two tasks in one model against a model of each alone, where the best AUC of both is known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

SETS = ("model.kind=dcnv2", "model.num_cross_layers=1", "model.cross_rank=8", "model.num_dense=4", "model.num_tables=2",
        "model.rows_per_table=20", "model.embedding_dim=16", "model.bottom_mlp=[8]", "model.top_mlp=[32]",
        "model.tower_mlp=[8]", "data.num_train_samples=32000", "data.num_eval_samples=20000", "data.task_conflict=1",
        "data.seed=2", "train.seed=2", "train.batch_size=256", "train.learning_rate=0.15", "train.dense_optimizer=adam",
        "train.dense_learning_rate=0.004", "train.engine=pipeline", "watch.every=100")


def test_conflicting_tasks_learn_as_well_together_as_alone(train_tiny):
    def held_out(tasks: Sequence[str], head: str) -> dict[str, dict[str, float]]:
        named = ", ".join(f"{{name='{task}'}}" for task in tasks)
        return train_tiny(*SETS, f"model.tasks=[{named}]", f"model.task_head={head}").values["tasks"]

    alone = held_out(["click"], "shared_bottom") | held_out(["buy"], "shared_bottom")
    shared, mmoe = (held_out(["click", "buy"], head) for head in ("shared_bottom", "mmoe"))
    # Of 20,000 samples the difference of two models' AUC has a standard error of about 0.0005.
    for task, of_task in alone.items():
        assert of_task["best_auc"] - 0.02 < of_task["auc"] < of_task["best_auc"]
        assert shared[task]["best_auc"] == mmoe[task]["best_auc"] == of_task["best_auc"]
        assert shared[task]["auc"] == pytest.approx(of_task["auc"], abs=0.01)
        assert mmoe[task]["auc"] == pytest.approx(of_task["auc"], abs=0.01)
    assert sum(mmoe[task]["auc"] - shared[task]["auc"] for task in alone) / 2 > -0.002
