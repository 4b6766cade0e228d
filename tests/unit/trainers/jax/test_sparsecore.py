"""With SparseCores a run learns what it learns without, and saves what either goes on from."""

from __future__ import annotations

import importlib
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from limits import HANG_S

from embark.data import Batch
from embark.errors import MissingPackage, SpecError
from embark.spec import to_toml
from embark.trainers.jax import state
from embark.trainers.jax.sparsecore import layout as sparsecore_layout
from embark.trainers.jax.sparsecore import programs
from embark.trainers.jax.sparsecore.layout import Choice, choose_cores, make_stacks

pytestmark = pytest.mark.x86_64
sparsecores = importlib.import_module("tests.unit.trainers.jax.sparsecores") if platform.machine() == "x86_64" else None
ROOT = Path(__file__).parents[4]
TOLERANCE = 1e-6
RAGGED = "adagrad, several ids or none, sums and means"
CASES = {
    "sgd": ("train.optimizer=sgd",),
    RAGGED: (
        "train.optimizer=adagrad", "data.ragged=true", "train.warmup_steps=5",
        'model.tables=[{name="a", rows=50, multi_hot=3, pooling="mean"}, {name="b", rows=400, multi_hot=5}, '
        '{name="c", rows=7, dim=16}, {name="d", rows=90, multi_hot=2}]', "model.kind=dcnv2",
    ),
}
FEW = ("train.num_steps=50", "data.num_train_samples=6400")


@pytest.fixture
def cores(monkeypatch):
    sparsecores.install(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "num_devices"), [("sgd", 1), (RAGGED, 4)])
def test_losses_are_those_of_the_ordinary_path(cores, train_tiny, case, num_devices):
    sets = (*CASES[case], *FEW)
    expected = train_tiny(*sets, "train.sparsecore=off", num_devices=num_devices)
    found = train_tiny(*sets, "train.sparsecore=on", num_devices=num_devices)
    assert len(found.losses()) == 50
    assert found.losses() == pytest.approx(expected.losses(), abs=TOLERANCE)
    assert found.of("eval")[-1]["auc"] == pytest.approx(expected.of("eval")[-1]["auc"], abs=1e-5)
    assert found.of("start")[0]["engine"] == "sparsecore"
    assert expected.of("start")[0]["engine"] == "jax"
    assert {t["kernel"] for t in found.of("plan")[0]["tables"]} == {"sparsecore"}


@pytest.mark.parametrize(("first", "second"), [("on", "off"), ("off", "on")])
def test_a_run_begun_with_them_continues_without_and_the_other_way_on_another_number_of_devices(
    cores, train_tiny, first, second
):
    sets = ("train.optimizer=adagrad", "store.checkpoint_at_end=true", "data.num_eval_samples=0")
    reference = train_tiny(*sets, "train.num_steps=6", "train.sparsecore=off", num_devices=4)
    train_tiny(*sets, "name=crossed", "train.num_steps=3", f"train.sparsecore={first}", num_devices=4, fresh=False)
    ended = train_tiny(*sets, "name=crossed", f"train.sparsecore={second}", "train.num_steps=6", num_devices=2,
                       fresh=False)
    assert [e["engine"] for e in ended.of("start")] == [{"on": "sparsecore", "off": "jax"}[one]
                                                        for one in (first, second)]
    assert ended.losses() == pytest.approx(reference.losses(), abs=TOLERANCE)


@pytest.mark.parametrize("block_bytes", [256, 64 << 20])
def test_rows_given_to_the_cores_come_back_with_their_bits(tiny, world_of, monkeypatch, block_bytes):
    """In one block and in dozens."""
    monkeypatch.setattr(state, "BLOCK_BYTES", block_bytes)
    spec = tiny("train.optimizer=adagrad", "train.batch_size=4096", "model.rows_per_table=[50,3,1003,77]")
    world, draw = world_of(4), np.random.default_rng(1)
    layout = make_stacks(spec, 4, sparsecores.NUM_CORES)
    assert len(layout.groups) == 1
    rows = {t.name: draw.standard_normal((t.rows, 8), np.float32) for t in spec.model.table_list()}
    made = state.make_state(spec, layout, world, lambda t, _: rows[t.name], lambda t, _: -rows[t.name], {}, {})
    for group in layout.groups:
        for kind, sign in (("tables", 1), ("slots", -1)):
            array = made[kind][group.name]
            pieces = sorted(state.table_pieces(array, group, world), key=lambda piece: (piece[0].feature, piece[1]))
            assert (len(pieces) > 10 * len(group.places)) == (block_bytes == 256)
            for place in group.places:
                found = np.concatenate([piece for of, _, piece in pieces if of == place])
                assert np.array_equal(found, sign * rows[place.table.name])


def test_as_many_tables_lie_together_as_a_core_can_ask_for_whatever_the_batch(tiny):
    spec = tiny("model.num_tables=7", "model.rows_per_table=1000", "train.batch_size=16384",
                "data.num_train_samples=100000")
    layout = make_stacks(spec, 4, 2)  # 2,048 samples a core
    assert [len(group.places) for group in layout.groups] == [2, 2, 2, 1]
    for group in layout.groups:
        taken: set[tuple[int, int]] = set()
        for place in group.places:
            for part in range(8):
                mine = {(part, place.first_row + at) for at in range(len(place.rows_on(part, 8)))}
                assert not taken & mine
                assert all(at < group.rows_per_part for _, at in mine)
                taken |= mine


def test_all_ids_of_a_batch_may_be_one_row_and_an_id_that_is_no_row_s_is_reported(tiny, world_of):
    spec = tiny("train.optimizer=sgd", "train.batch_size=4096")
    layout = make_stacks(spec, 4, 2)
    size = 4096
    ids = np.zeros((4, size), np.int32)
    batch = Batch(dense=np.zeros((size, 3), np.float32), ids=ids.reshape(-1), lengths=np.ones((4, size), np.int32),
                  label=np.zeros(size, np.float32), is_fixed=True)
    made = programs.to_devices(batch, spec, layout, world_of(4))
    shapes = programs.batch_shapes(spec, layout, world_of(4).mesh)
    assert jax.tree.map(lambda array: (array.shape, array.dtype), made) == jax.tree.map(
        lambda shape: (shape.shape, shape.dtype), shapes)
    assert num_ids(made) == 4 * size
    assert set(np.asarray(made["bad_table"])) == {4}
    ids[2, 7] = 1000
    bad = programs.to_devices(batch, spec, layout, world_of(4))
    assert set(np.asarray(bad["bad_table"])) == {2}
    assert num_ids(bad) == 4 * size - 1


@pytest.mark.parametrize("has_empty", [False, True])
def test_what_each_host_makes_of_its_samples_is_its_part_of_what_one_would_make_of_all(tiny, has_empty):
    spec = tiny("train.optimizer=sgd", 'model.tables=[{name="a", rows=50, multi_hot=3}, {name="b", rows=1003}]')
    layout, draw = make_stacks(spec, 4, 2), np.random.default_rng(3)
    ids = [draw.integers(-1 if has_empty else 0, t.rows, (128, t.multi_hot), np.int32) for t in spec.model.table_list()]
    complete = programs._requests(ids, spec, layout, 4)
    halves = [programs._requests([part[at : at + 64] for part in ids], spec, layout, 2) for at in (0, 64)]
    for stack, pointers in complete["pointers"].items():
        assert np.array_equal(pointers, np.concatenate([half["pointers"][stack] for half in halves]))
        used = np.concatenate([np.arange(len(complete["ids"][stack]) // 8) < end
                               for end in pointers.reshape(8, -1)[:, -1]])
        for kind in ("ids", "samples", "gains"):
            found = np.concatenate([half[kind][stack] for half in halves])
            is_same = (found == complete[kind][stack]) | ~used | (complete["ids"][stack] == 2**31 - 1)
            assert is_same.all()


def num_ids(made) -> int:
    """In the buffers of all cores: each says where its ids for every core end, and they begin at multiples of 8."""
    (pointers,) = made["requests"]["pointers"].values()
    ends = np.asarray(pointers).reshape(8, -1)
    begins = np.concatenate([np.zeros((8, 1), np.int32), (ends[:, :-1] + 7) // 8 * 8], axis=1)
    return int((ends - begins).sum())


CANNOT = {
    "train.optimizer=rowwise_adagrad": "the mean of a row's squares",
    "train.table_dtype=fp16": "table_dtype",
    "train.comms_dtype=bf16": "comms_dtype",
    "train.sharding=table_wise": "sharding",
    "train.batch_size=136": "not a multiple of 8 for each of 16 cores",
    "model.embedding_dim=12": "rows of 12 numbers",
    "train.batch_size=131072": "8,192 ids of table",
}


@pytest.mark.parametrize("setting", CANNOT)
def test_what_they_cannot_do_is_reported_and_the_ordinary_path_taken(tiny, setting):
    spec = tiny("data.num_train_samples=1000000", "train.optimizer=sgd", setting)
    choice = choose_cores(spec, "TPU v6 lite", 8)
    assert choice.cores == 0
    assert choice.reason.startswith("SparseCores are left idle: ")
    assert CANNOT[setting] in choice.reason
    with pytest.raises(SpecError, match="sparsecore"):
        choose_cores(spec.model_copy(update={"train": spec.train.model_copy(update={"sparsecore": "on"})}),
                     "TPU v6 lite", 8)


def test_a_chip_that_has_them_gets_them_unless_reported_otherwise(tiny, monkeypatch):
    assert choose_cores(tiny("train.optimizer=sgd"), "TPU v6 lite", 4).cores == 2
    assert choose_cores(tiny("train.optimizer=adagrad"), "TPU v5", 4).cores == 4
    assert choose_cores(tiny("train.optimizer=sgd"), "TPU v5 lite", 4) == Choice(0, "")
    assert choose_cores(tiny("train.optimizer=sgd"), "TPU v6 lite", 6).cores == 0
    assert choose_cores(tiny("train.optimizer=sgd", "train.sparsecore=off"), "TPU v6 lite", 4).cores == 0
    with pytest.raises(SpecError, match="has none"):
        choose_cores(tiny("train.optimizer=sgd", "train.sparsecore=on"), "TPU v5 lite", 4)
    with pytest.raises(SpecError, match="only TPUs have SparseCores"):
        tiny("train.sparsecore=on", "place.device=cuda")
    monkeypatch.setattr(sparsecore_layout, "find_spec", lambda name: None)
    assert "pip install 'embark-rec[sparsecore]'" in choose_cores(tiny("train.optimizer=sgd"), "TPU v5", 4).reason
    with pytest.raises(MissingPackage, match="needs jax-tpu-embedding"):
        choose_cores(tiny("train.optimizer=sgd", "train.sparsecore=on"), "TPU v5", 4)


WITH_CORES = """
import pytest
from tests.unit.trainers.jax import sparsecores
sparsecores.install(pytest.MonkeyPatch())
import sys
from embark.__main__ import run
sys.exit(run(["train", "pair.toml"]))
"""


@pytest.mark.slow
def test_two_processes_train_as_one_and_what_they_save_continues_without_cores(tiny, train_tiny, tmp_path):
    sets = ("train.optimizer=adagrad", "data.num_eval_samples=0", "store.checkpoint_at_end=true", "name=pair")
    (tmp_path / "pair.toml").write_text(to_toml(tiny(*sets, "train.num_steps=4", "train.sparsecore=on")))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WITH_CORES], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
            text=True, env=os.environ | {
                "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank),
                "JAX_NUM_CPU_DEVICES": "2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "COLUMNS": "120",
            },
        )
        for rank in range(2)
    ]
    for process in started:
        _, output = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, output
    ended = train_tiny(*sets, "train.num_steps=7", "train.sparsecore=off", num_devices=4, fresh=False)
    reference = train_tiny(*sets, "name=whole", "train.num_steps=7", "train.sparsecore=off", num_devices=4)
    assert [e["engine"] for e in ended.of("start")] == ["sparsecore", "jax"]
    assert ended.losses() == pytest.approx(reference.losses(), abs=TOLERANCE)
