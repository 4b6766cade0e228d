"""How much a spec trains, and how large its samples are."""

import numpy as np
import pytest

from embark.errors import UserError
from embark.features.layout import Feature, Layout, Rows, fill
from embark.plan.workload import DataSize, sample_bytes, workload_of
from embark.spec import load_spec, resolve


def test_synthetic_data_says_its_own_size():
    work = workload_of(load_spec("quickstart"))
    assert (work.steps_per_epoch, work.num_steps) == (2_000_000 // 2048, 976)
    assert work.num_evals == 1 + 975 // 250
    assert work.eval_steps == 4 * 64
    assert not work.is_stored


@pytest.mark.parametrize(
    ("sets", "steps", "epochs"),
    [(["train.num_epochs=3"], 3 * 305, 3.0), (["train.num_steps=61"], 61, 0.2), (["train.num_steps=610"], 610, 2.0)],
)
def test_epochs_and_steps_are_the_trainer_s(sets, steps, epochs):
    work = workload_of(load_spec("criteo-1tb", sets))
    assert work.num_steps == steps
    assert work.num_epochs == pytest.approx(epochs)


def test_a_sample_is_as_large_as_a_block_s_row():
    sets = ["model.num_dense=3", "model.num_tables=3", "model.rows_per_table=[200,60000,100000]"]
    spec = load_spec("quickstart", sets)
    features = tuple(Feature(t.name, t.rows) for t in spec.model.table_list())
    num = 32_768
    rows = Rows(np.zeros(num), np.zeros((num, 3), np.float32), tuple(np.zeros((num, 1), int) for _ in features),
                (None, None, None))
    block = fill(Layout(("a", "b", "c"), features), rows)
    assert sample_bytes(spec) == len(block) / num
    assert sample_bytes(spec) == pytest.approx(1 + 3 * 4 + 1 + 2 + 4, abs=0.05)


def test_prepared_data_elsewhere_must_be_counted():
    sets = ["data.kind=prepared", "data.path=s3://bucket/rows", "train.batch_size=65536"]
    with pytest.raises(UserError, match="s3://bucket/rows") as caught:
        workload_of(resolve({}, sets))
    assert "--samples" in caught.value.fix
    assert "data.num_train_samples" in caught.value.fix
    work = workload_of(resolve({}, sets), DataSize(4_195_197_692))
    assert work.num_steps == 4_195_197_692 // 65_536
    assert work.num_eval_samples == 41_951_976
    assert work.is_stored
    stepped = workload_of(resolve({}, [*sets, "train.num_steps=10"]))
    assert (stepped.num_steps, stepped.num_epochs) == (10, 1.0)


def test_prepared_data_elsewhere_has_the_size_that_the_spec_says():
    sets = ["data.kind=prepared", "data.path=s3://bucket/rows", "train.batch_size=100", "data.num_train_samples=2000",
            "data.num_eval_samples=300"]
    work = workload_of(resolve({}, sets))
    assert (work.num_train_samples, work.num_eval_samples, work.num_steps) == (2000, 300, 20)
    assert work.source == "data.num_train_samples; s3://bucket/rows cannot be read from here"
    assert work.is_stored
    assert workload_of(resolve({}, sets), DataSize(5000)).num_steps == 50, "what was counted comes first"


def test_fewer_samples_than_a_batch_are_refused():
    with pytest.raises(UserError, match=r"100 rows to train on, fewer than train\.batch_size"):
        workload_of(load_spec("criteo-1tb"), DataSize(100))
