"""Tables in bf16, from the first step to what is exported, on a CPU: the captured step, one operation at a time."""

import numpy as np

from embark import export_run
from embark.export.artifact import open_artifact

BF16 = ("train.table_dtype=bf16", "data.ragged=true", "store.checkpoint_every=4", "train.num_steps=8",
        "store.checkpoint_at_end=true", "model.tables=[{name='a', rows=9, multi_hot=4, pooling='mean'}, "
        "{name='b', rows=60, dtype='fp32'}, {name='c', rows=50}]")


def test_a_resumed_run_has_the_losses_and_rows_of_an_undisturbed_one(train_tiny, tmp_path):
    whole = train_tiny(*BF16, "name=whole")
    assert whole.of("start")[0]["engine"] == "cuda_graph"
    train_tiny(*BF16, "name=parts", "train.num_steps=4", fresh=False)
    resumed = train_tiny(*BF16, "name=parts", fresh=False)
    assert resumed.of("resume")[0]["step"] == 4
    assert resumed.losses() == whole.losses()
    assert resumed.of("eval")[-1]["log_loss"] == whole.of("eval")[-1]["log_loss"]
    exported = []
    for run in (whole, resumed):
        uri = str(tmp_path / str(len(exported)))
        export_run(run.values["run_dir"], uri)
        exported.append(open_artifact(uri).weights)
    assert all(np.array_equal(values, exported[1][name]) for name, values in exported[0].items())
    has_digits = {table: bool((exported[0][f"tables.embedding_bags.{table}.weight"].view(np.uint32) & 0xFFFF).any())
                  for table in "abc"}
    assert has_digits == {"a": False, "b": True, "c": False}
