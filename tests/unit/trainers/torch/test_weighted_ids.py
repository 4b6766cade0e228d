"""Ids with weights: from files, from data of one's own and from synthetic samples, into TorchRec's weighted pooling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embark.data import Batch, open_source, resolve_from_data
from embark.data.loader import pooling_weights
from embark.data.permuted_rows import RowsInMemory
from embark.errors import DataError, SpecError, UserError
from embark.spec import Table, resolve

TABLES = "model.tables=[{{name='seen', rows=9, multi_hot=4, pooling='{pooling}'{seen}}}, {{name='shop', rows=5}}]"
FILE = ("model.num_dense=1", "data.kind=columns", "data.dense_columns=['price']", "data.label=click",
        "train.batch_size=32", "train.num_steps=6")
WEIGHTED = TABLES.format(pooling="sum", seen=", weights_column='seconds'")
OWN = """
import numpy as np

class Source:
    num_train_samples, num_eval_samples = 512, 64

    def __init__(self, data, model):
        pass

    def rows(self, split, positions):
        lengths = positions % 4 + 1
        ids = np.arange(lengths.sum()) % 9
        return positions % 2, np.zeros((len(positions), 3)), {
            "seen": (ids, lengths), "seconds": ids / 4, "shop": positions % 5}
"""


def written(path: Path, *, repeats: bool, weight: str = "2") -> Path:
    """Rows that have an id twice, or once with a weight of 2."""
    rng = np.random.default_rng(1)
    lines = ["click,price,seen,seconds,shop"]
    for row in range(400):
        first, other = rng.choice(9, 2, replace=False)
        ids, weights = (f"{first}|{first}|{other}", "1|1|1") if repeats else (f"{first}|{other}", f"{weight}|1")
        lines.append(f"{row % 3 % 2},{row % 7},{ids},{weights},{row % 5}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_a_weight_of_two_trains_as_an_id_that_is_there_twice(train_tiny, tmp_path, pooling):
    plain = train_tiny(*FILE, TABLES.format(pooling=pooling, seen=""),
                       f"data.path={written(tmp_path / 'twice.csv', repeats=True)}", "train.engine=pipeline")
    weighted = train_tiny(*FILE, TABLES.format(pooling=pooling, seen=", weights_column='seconds'"),
                          f"data.path={written(tmp_path / 'weighted.csv', repeats=False)}", "train.engine=pipeline")
    assert weighted.losses() == pytest.approx(plain.losses(), rel=1e-5)
    assert weighted.of("eval")[-1]["log_loss"] == pytest.approx(plain.of("eval")[-1]["log_loss"], rel=1e-5)


@pytest.mark.parametrize(("weight", "what"), [
    ("-1", "line 2: column 'seconds': '-1|1' has a weight that is negative or empty; such rows: 400"),
    ("2|3", "has another number of weights than seen has ids"),
    ("many", "line 2: column 'seconds': 'many|1' is not a number"),
])
def test_weights_that_are_none_are_refused_with_their_column(tiny, tmp_path, weight, what):
    path = written(tmp_path / "bad.csv", repeats=False, weight=weight)
    with pytest.raises(DataError) as raised:
        open_source(tiny(*FILE, WEIGHTED, f"data.path={path}"))
    assert what in raised.value.what


def test_data_of_one_s_own_gives_weights_by_their_name(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_data.py").write_text(OWN)
    spec = tiny("data.kind=my_data:Source", WEIGHTED, "train.batch_size=8")
    batch = open_source(resolve_from_data(spec)).eval_rows(0, 4)
    assert batch.weights is not None
    assert batch.weights.tolist() == [*(batch.ids[:10] / 4), 1, 1, 1, 1]
    Path("my_data.py").write_text(OWN.replace("ids / 4", "-ids"))
    with pytest.raises(DataError, match=r"returned weights seconds = -1\.0 for position 1 of eval"):
        open_source(resolve_from_data(spec)).eval_rows(0, 4)


def test_synthetic_weights_belong_to_their_sample(train_tiny, tiny):
    source = open_source(tiny(WEIGHTED, "data.ragged=true"))
    all_rows, some = source.eval_rows(0, 50), source.eval_rows(10, 20)
    assert all_rows.weights is not None
    assert all_rows.weights.min() > 0
    assert all_rows.weights.max() == 1
    taken = RowsInMemory(all_rows).taken(np.arange(10, 20)).batch
    assert taken.weights.tolist() == some.weights.tolist() == RowsInMemory(all_rows).eval_rows(10, 20).weights.tolist()
    turned = RowsInMemory(some).permuted(0, np.arange(10)[::-1]).permuted(0, np.arange(10)[::-1]).batch
    assert turned.weights.tolist() == some.weights.tolist()
    filled_up = some.take(np.minimum(np.arange(13), len(some.label) - 1))
    assert len(filled_up.weights) == len(filled_up.ids)
    with pytest.raises(UserError, match="embedding_l2 has no gradient for weighted ids"):
        train_tiny(TABLES.format(pooling="sum", seen="").replace("multi_hot=4", "weights_column='seconds'"),
                   "train.engine=cuda_graph", "train.embedding_l2=0.1")
    with pytest.raises(SpecError, match="holds no weights"):
        tiny(WEIGHTED, "data.kind=interactions", "data.path=x")


def test_a_mean_is_by_the_weights_of_each_sample():
    batch = Batch(np.zeros((2, 0), np.float32), np.arange(5, dtype=np.int32), np.array([[3, 0], [1, 1]], np.int32),
                  np.zeros(2, np.float32), weights=np.array([1, 2, 1, 5, 0], np.float32))
    tables = (Table(name="a", rows=9, multi_hot=3, pooling="mean"), Table(name="b", rows=9))
    assert pooling_weights(batch, tables).tolist() == [0.25, 0.5, 0.25, 5, 0]


def test_a_spec_without_weights_is_stored_as_before():
    (table,) = resolve({"model": {"tables": [{"name": "a", "rows": 5}]}}).model.tables
    assert "weights_column" not in table.model_dump()
