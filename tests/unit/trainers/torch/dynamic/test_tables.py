"""Dynamic tables in a run: what a step changes, what an evaluation does not, and what words and raw ids become."""

import numpy as np
import pytest
import torch
from dynamic_reference import ReferenceTable
from dynamic_streams import WIDE_IDS

from embark.data import Loader, eval_batches, open_source
from embark.errors import SpecError
from embark.trainers.torch.dynamic.tables import first_values

TABLES = """model.tables=[
    { name = "user", ids = "dynamic", rows = 900, capacity = 64, evict = "lfu", half_life = 2 },
    { name = "item", ids = "dynamic", rows = 400, capacity = 32, admit = "count", max_new = 100, multi_hot = 2 },
    { name = "seen", shares = "item", multi_hot = 3 }, { name = "shop", rows = 7 }]"""




def state_of(trainer) -> dict[str, torch.Tensor]:
    return {f"{table}.{name}": getattr(value, "tensor", value).clone()
            for table, of_table in trainer.dynamic.map.state().items() for name, value in of_table.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad"])
def test_new_rows_begin_with_values_of_their_ids_and_an_empty_state(built, optimizer):
    trainer = built(TABLES, f"train.optimizer={optimizer}", "data.ragged=true")
    source = open_source(trainer.spec)
    reference = ReferenceTable(trainer.spec.model.tables[0], trainer.spec.train.seed)
    shard = next(one for one in trainer.dynamic.reset.shards if one.table == 0)
    shard.weights.fill_(7.0)
    shard.states[0].fill_(7.0)
    with Loader(source, batch_size=128, rank=0, world_size=1, start_step=0, stop_step=4) as loader:
        for step, batch in enumerate(loader):
            mapped = trainer.dynamic.assign(batch, step)
            users = batch.lengths[0].sum()
            rows, new = reference.step(batch.ids[:users].tolist(), step)
            assert mapped.ids[:users].tolist() == rows
            assert mapped.ids.dtype == np.int32
            assert mapped.ids[-batch.lengths[3].sum():].tolist() == batch.ids[-batch.lengths[3].sum():].tolist()
            for row, _ in new:
                ids = trainer.dynamic.map
                expected = first_values(ids.hashes[row - 1 : row], torch.arange(8), ids, 0)[0]
                assert shard.weights[row].equal(expected)
                assert expected.abs().max() <= (1 / 65) ** 0.5
                assert not shard.states[0][row].any()
    assert reference.statistics["evictions"] > 0
    assert shard.weights[0].eq(7.0).all()  # ids without a row keep the default row


def test_an_evaluation_neither_admits_nor_evicts(built):
    trainer = built(TABLES)
    source = open_source(trainer.spec)
    with trainer.feed(source, 0, 3) as batches:
        for step in range(3):
            trainer.step(batches, step)
    before = state_of(trainer)
    with trainer.evaluating(3) as evaluator:
        for batch in eval_batches(source, batch_size=128, rank=0, world_size=1):
            evaluator.add(batch)
        assert evaluator.metrics()["num_samples"] == 300
    assert same(state_of(trainer), before)
    assert trainer.dynamic.metrics()["table_fullness"] == {"user": 1.0, "item": 1.0}


def test_a_resumed_run_has_the_metrics_of_an_uninterrupted_one(train_tiny):
    whole = train_tiny(TABLES, "train.num_steps=9", "name=whole", "watch.every=2")
    train_tiny(TABLES, "train.num_steps=4", "store.checkpoint_at_end=true", "watch.every=2")
    resumed = train_tiny(TABLES, "train.num_steps=9", "watch.every=2", fresh=False)
    keys = ("step", "loss", "id_hit_rate", "id_default_rate", "ids_admitted", "ids_evicted", "table_fullness")
    kept = [[event[key] for key in keys] for event in whole.of("step")]
    assert [[event[key] for key in keys] for event in resumed.of("step")][-3:] == kept[-3:]
    assert kept[-1][4]["user"] > 0
    assert resumed.of("eval")[-1]["auc"] == whole.of("eval")[-1]["auc"]


def test_words_and_numbers_of_any_size_are_ids(tmp_path, train_tiny):
    lines = [f"{number % 2},user-{number % 40},{2**62 + number % 30}" for number in range(400)]
    (tmp_path / "rows.csv").write_text("\n".join(["label,user,item", *lines]) + "\n")
    done = train_tiny("model.num_dense=0", f"data.path={tmp_path / 'rows.csv'}", "data.kind=columns",
                      'model.tables=[{name="user", ids="dynamic", capacity=64}, '
                      '{name="item", ids="dynamic", capacity=64}]', "train.num_steps=4")
    assert done.of("step")[-1]["table_fullness"] == {"user": 40 / 64, "item": 30 / 64}


@pytest.mark.parametrize(("tables", "field"), [
    ('{name="a", ids="dynamic"}', "model.tables.0.capacity"),
    ('{name="a", rows=4, capacity=3}', "model.tables.0.capacity"),
    ('{name="a", ids="dynamic", capacity=3, admit_count=5}', "model.tables.0.admit_count"),
    ('{name="a", ids="dynamic", capacity=3, half_life=5}', "model.tables.0.half_life"),
])
def test_fields_without_effect_are_refused(tiny, tables, field):
    with pytest.raises(SpecError) as refused:
        tiny(f"model.tables=[{tables}]")
    assert field in str(refused.value)


@pytest.mark.parametrize("sets", [(), ("data.ragged=true",), WIDE_IDS])
def test_the_captured_step_gives_the_losses_and_the_map_of_the_pipeline(train_tiny, sets):
    pipeline = train_tiny(TABLES, "train.num_steps=5", *sets)
    captured = train_tiny(TABLES, "train.num_steps=5", "train.engine=cuda_graph", *sets)
    assert captured.of("start")[0]["engine"] == "cuda_graph"
    assert captured.losses() == pytest.approx(pipeline.losses(), rel=2e-5)
    for name in ("id_hit_rate", "id_default_rate", "ids_admitted", "ids_evicted", "table_fullness"):
        assert [event[name] for event in captured.of("step")] == [event[name] for event in pipeline.of("step")]
