"""Softmax over lists of rows: loss and metrics of a known answer, lists that stay whole, and what is learned."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from embark import export_run, score_file
from embark.data import open_source, resolve_from_data
from embark.errors import DataError, SpecError, UserError
from embark.spec.tasks import Task
from embark.trainers import evaluate, feature_importance
from embark.trainers.torch.task_metrics import TaskHeldOut, TaskLoss, TaskWindow

LISTS = Task(name="chosen", loss="listwise", list_size=4, k=2)
SETS = ("model.num_dense=0", "model.tables=[{name='item', rows=8}, {name='query', rows=5}]", "data.kind=columns",
        "model.tasks=[{name='chosen', loss='listwise', list_size=4, k=2}]", "data.eval_fraction=0.2",
        "train.batch_size=32", "train.num_steps=60", "train.learning_rate=0.3", "watch.every=60")
OWN = """
import numpy as np

class Source:
    num_train_samples, num_eval_samples = 96, 16

    def __init__(self, data, model):
        pass

    def rows(self, split, positions):
        return {"chosen": positions % 4 == 1}, None, {"item": positions % 8, "query": positions // 4 % 5}
"""


def written(path: Path, num_lists: int, *, more: str = "") -> Path:
    """Of each list the item with the largest number is chosen; every third one has three rows and one to fill up."""
    rng, lines = np.random.default_rng(1), ["query,item,chosen"]
    for number in range(num_lists):
        items = rng.choice(8, 4, replace=False)
        num = 3 if number % 3 == 0 else 4
        labels = [str(int(item == items[:num].max())) for item in items[:num]] + [""] * (4 - num)
        lines += [f"{number % 5},{item},{label}" for item, label in zip(items, labels, strict=True)]
    path.write_text("\n".join(lines) + "\n" + more)
    return path


def test_the_loss_and_the_metrics_of_lists_are_those_of_a_known_answer(alone):
    labels = torch.tensor([1, 0, 0, math.nan, 0, 0, 0, 0, 0, 3, 1, 0, math.nan, math.nan, math.nan, math.nan])[:, None]
    outputs = torch.tensor([0.0, 1, 2, 50, 1, 2, 3, 4, 3, 1, 2, 0, 1, 1, 1, 1])[:, None].requires_grad_()
    first = math.log(1 + math.e + math.e**2)  # of scores 0, 1, 2 the first is relevant; the fourth row is not there
    total = math.log(math.e**3 + math.e + math.e**2 + 1)
    third = 0.75 * (total - 1) + 0.25 * (total - 2)
    loss = TaskLoss([LISTS])(outputs, labels)
    assert loss.item() == pytest.approx((first + third) / 4)
    loss.backward()
    gradient = outputs.grad[:, 0]
    assert gradient.isfinite().all()
    assert gradient[[3, 4, 5, 6, 7, 12, 13, 14, 15]].abs().max() == 0
    assert gradient[0].item() == pytest.approx((math.exp(-first) - 1) / 4)
    halves = [TaskLoss([LISTS])(outputs[part], labels[part]).item() for part in (slice(0, 8), slice(8, 16))]
    assert sum(halves) / 2 == pytest.approx(loss.item())  # as two ranks have it
    # The first list's relevant row is third; of the third list's ranking 0, 1, 3, 0 the first two are 0 and 1.
    ndcg = (0 + (1 / math.log2(3)) / (3 + 1 / math.log2(3))) / 2
    window, held_out = TaskWindow([LISTS], torch.device("cpu")), TaskHeldOut([LISTS], alone)
    window.add(outputs.detach(), labels)
    held_out.add(outputs.detach(), labels)
    for found in (window.take(alone), held_out.metrics()):
        assert found["tasks"]["chosen"] == pytest.approx(
            {"cross_entropy": (first + third) / 2, "ndcg_at_k": ndcg, "hit_at_k": 0.5, "num_samples": 2})
    with pytest.raises(UserError, match="6 rows, a rank's part of the batch, are not whole lists of 4"):
        TaskLoss([LISTS])(outputs[:6], labels[:6])


def test_lists_are_shuffled_and_held_out_whole(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_lists.py").write_text(OWN)
    path = written(tmp_path / "lists.csv", 50)
    for sets in ((f"data.path={path}",), ("data.kind=my_lists:Source",)):
        source = open_source(resolve_from_data(tiny(*SETS, *sets)))
        assert source.num_eval_samples % 4 == 0 < source.num_eval_samples
        num = source.num_train_samples
        orders = [source.train_rows(epoch, 0, num) for epoch in (0, 1)]
        for batch in (*orders, source.eval_rows(0, source.num_eval_samples)):
            query = batch.ids[len(batch.label) :].reshape(-1, 4)
            assert (query == query[:, :1]).all()
            assert (np.nansum(batch.label.reshape(-1, 4), axis=1) == 1).all()
        assert not np.array_equal(orders[0].ids, orders[1].ids)
        assert np.array_equal(np.concatenate([source.train_rows(0, start, start + 8).ids[:8] for start in (8, 16)]),
                              orders[0].ids[8:24])


def test_a_ranking_is_learned_and_scores_of_rows_sort_their_list(train_tiny, tiny, tmp_path):
    run = train_tiny(*SETS, f"data.path={written(tmp_path / 'lists.csv', 300)}", "store.checkpoint_at_end=true")
    held = run.of("eval")[-1]["tasks"]["chosen"]
    assert held["ndcg_at_k"] > 0.97  # of a random order: 0.41
    assert held["hit_at_k"] > 0.98
    found = evaluate(run.values["run_dir"])
    assert found.tasks["chosen"]["ndcg_at_k"] == pytest.approx(held["ndcg_at_k"])
    rows = tmp_path / "rows.csv"
    rows.write_text("query,item\n" + "".join(f"2,{item}\n" for item in (3, 7, 1, 5)))
    score_file(export_run(run.values["run_dir"], str(tmp_path / "models")).uri, str(rows), tmp_path / "s.parquet")
    scores = pq.read_table(tmp_path / "s.parquet").column("chosen").to_numpy()
    assert np.argsort(-scores).tolist() == [1, 3, 0, 2]
    with pytest.raises(UserError, match="has a task over lists of rows"):
        feature_importance(run.values["run_dir"])


def test_what_cannot_keep_lists_whole_is_refused(tiny, tmp_path):
    for change, what in {"data.kind=synthetic": "does not keep the rows of a list together",
                         "train.batch_size=30": "is not a multiple of list_size = 4",
                         "data.time_column=day": "would hold out some rows of a list",
                         "model.tasks=[{name='chosen', loss='listwise'}]": "of at least 2 rows"}.items():
        with pytest.raises(SpecError, match=what):
            tiny(*SETS, "data.path=x.csv", change)
    with pytest.raises(DataError, match="201 rows are not whole lists of 4"):
        open_source(tiny(*SETS, f"data.path={written(tmp_path / 'lists.csv', 50, more='1,2,0')}"))
    text = written(tmp_path / "lists.csv", 50).read_text()
    (tmp_path / "lists.csv").write_text(text.replace(",1\n", ",-1\n", 1))
    with pytest.raises(DataError, match="is no label of chosen"):
        open_source(tiny(*SETS, f"data.path={tmp_path / 'lists.csv'}"))
