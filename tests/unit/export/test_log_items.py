"""A model of a log's next item is exported with the log's own ids, wherever the log is by then."""

import json
import random
import shutil

import pyarrow.parquet as parquet
import pytest

from embark import export_run, score_file, train
from embark.data.prepare.prepare import prepare_from_spec
from embark.export.artifact import open_artifact
from embark.spec import resolve

TABLES = ('model.tables=[{ name = "item", rows = 40, pooling = "none", max_length = 8 }, '
          '{ name = "negatives", shares = "item", pooling = "none", max_length = 10 }]')


@pytest.mark.parametrize("kind", ["prepared", "interactions"])
def test_rows_to_score_have_the_words_of_the_log(tmp_path, kind):
    draw = random.Random(1)
    rows = [f"u{user},it-{(user + step) % 30},{1_700_000_000 + 60 * step}\n" for user in range(80) for step in range(9)]
    draw.shuffle(rows)
    log = tmp_path / "log.csv"
    log.write_text("user,item,at\n" + "".join(rows))
    path = tmp_path / "data" if kind == "prepared" else log
    spec = resolve({"name": "next", "model": {"kind": "sasrec", "num_dense": 0, "embedding_dim": 8,
                                              "sequence": {"history": "item", "negatives": "negatives"}},
                    "data": {"kind": kind, "path": str(path), "time_column": "at"},
                    "train": {"batch_size": 16, "num_epochs": 6, "learning_rate": 0.1}},
                   [TABLES, f"store.root={tmp_path}/runs",
                    *([f"data.prepare.input={log}"] if kind == "prepared" else [])])
    if kind == "prepared":
        prepare_from_spec(spec)
    run = train(spec)["run_dir"]
    log.unlink()
    shutil.rmtree(tmp_path / "data", ignore_errors=True)
    found = export_run(run)
    artifact = open_artifact(found.uri)
    assert {"item.keys", "item.ids", "candidate.keys", "candidate.ids"} <= {*artifact.id_maps}
    histories = [(["it-3", "it-4", "it-5"], "it-6"), (["it-3", "it-4", "it-5"], "it-20"),
                 (["it-3", "of another shop", "it-4", "it-5"], "it-6"), (["unknown"], "it-6"), ([], "it-6")]
    given = tmp_path / "rows.jsonl"
    given.write_text("".join(json.dumps({"item": items, "candidate": one}) + "\n" for items, one in histories))
    score_file(found.uri, str(given), str(tmp_path / "scores.parquet"))
    scores = parquet.read_table(tmp_path / "scores.parquet")["score"].to_pylist()
    assert scores[0] > scores[1]
    assert scores[2] == pytest.approx(scores[0], rel=1e-6)
    assert scores[3] == pytest.approx(scores[4], rel=1e-6)
