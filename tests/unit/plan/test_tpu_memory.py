"""What a plan counts for a TPU chip is what the TPU's own compiler planned, for every program that was compiled."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from embark.model.jax_layout import LINE_WIDTHS, make_layout
from embark.plan.tpu import TPU, chip_memory, host_parts, lined_bytes, tiled_bytes
from embark.spec import RunSpec, load_spec

BENCH = Path(__file__).parents[3] / "bench"
ROWS = BENCH / "tpu_memory.csv"
LARGE_BYTES = 50e6


def _bench():
    found = importlib.util.spec_from_file_location("bench_tpu_memory", BENCH / "tpu_memory.py")
    module = sys.modules["bench_tpu_memory"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


BENCHED = _bench()


def _of(spec: RunSpec, num_chips: int = 8, precision: str = "bf16"):
    return chip_memory(spec, make_layout(spec, num_chips, LINE_WIDTHS["tpu"]), precision, "TPU-v5e")


@pytest.mark.parametrize("row", BENCHED.recorded(ROWS), ids=lambda row: f"{row.compiled.topology} {row.sets}")
def test_a_compiled_program_takes_what_the_plan_counts(row):
    compiled, planned = row.compiled, row.planned
    assert planned.argument_bytes == pytest.approx(compiled.argument_bytes, rel=0.02)
    assert planned.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.1)
    ratio = planned.temporary_bytes / compiled.temporary_bytes
    assert 0.5 < ratio < 2
    if compiled.temporary_bytes > LARGE_BYTES:
        assert 0.7 < ratio < 1.5


def test_the_rows_are_of_several_chips_widths_and_optimizers():
    rows = BENCHED.recorded(ROWS)
    assert len(rows) >= 10
    assert {row.compiled.topology.partition(":")[0] for row in rows} == {"v5e", "v5p", "v6e"}
    assert {row.spec.model.embedding_dim for row in rows} >= {32, 64, 100, 128}
    assert len({row.spec.train.optimizer for row in rows}) >= 2
    assert {row.spec.model.kind for row in rows} == {"dlrm", "dcnv2"}


def test_a_row_is_written_as_it_is_read(tmp_path):
    for row in BENCHED.recorded(ROWS)[:2]:
        BENCHED.add(tmp_path / "again.csv", row)
    assert BENCHED.recorded(tmp_path / "again.csv") == BENCHED.recorded(ROWS)[:2]


def test_the_counts_are_the_trainer_s_own():
    pytest.importorskip("jax")
    from embark.run import evaluation

    assert TPU["histogram_bytes"] == 2 * evaluation.NUM_BINS * 4


def test_narrow_rows_share_lines_and_odd_ones_are_copied_complete():
    def tables(dim: int, *sets: str):
        return _of(load_spec("quickstart", [f"model.embedding_dim={dim}", "model.rows_per_table=80000", *sets]))

    rows = 26 * 10_000
    assert tables(32).tables == rows * 32 * 4
    assert tables(32).copies == 0
    assert tables(100).copies == rows * 128 * 4
    assert tables(100, "train.optimizer=adagrad").copies == 2 * tables(100).copies
    assert tables(64, "train.table_dtype=fp16").copies == rows * 128 * 2
    assert tables(128, "train.table_dtype=fp16").copies == 0
    assert "tables copied" not in tables(128).parts()


def test_state_is_a_number_a_row_or_one_a_value_or_none():
    spec = load_spec("quickstart", ["model.embedding_dim=128", "model.rows_per_table=80000"])
    by = {name: _of(spec.model_copy(update={"train": spec.train.model_copy(update={"optimizer": name})})).state
          for name in ("sgd", "rowwise_adagrad", "adagrad")}
    assert by["sgd"] == 0
    assert by["rowwise_adagrad"] == pytest.approx(26 * 10_000 * 4, rel=0.01)
    assert by["adagrad"] == 26 * 10_000 * 128 * 4


def test_more_chips_at_the_same_batch_a_chip_take_no_more_during_a_step():
    few, many = (_of(load_spec("quickstart", [f"train.batch_size={2048 * n}"]), n) for n in (4, 64))
    assert many.step < 1.05 * few.step
    assert many.tables < few.tables / 15


def test_a_host_holds_its_chips_rows_once_and_one_process():
    spec = load_spec("quickstart", ["train.batch_size=4096"])
    chip = _of(spec, 16)
    parts = host_parts(spec, chip, 16, 4)
    assert parts["copy of the tables"] == 4 * (chip.tables + chip.state)
    assert parts["process"] == TPU["process_bytes"]


@pytest.mark.parametrize(("shape", "size", "num_bytes"), [
    ((8192, 13), 4, 8192 * 16 * 4), ((8192, 2), 4, 8192 * 2 * 4), ((64, 131), 4, 64 * 256 * 4),
    ((128, 64), 4, 128 * 64 * 4), ((64, 13), 4, 16 * 128 * 4), ((250_000,), 4, 250_880 * 4),
])
def test_arrays_take_what_the_compiler_gave_them(shape, size, num_bytes):
    """Sizes from the buffer assignment of a program compiled for v5e."""
    assert tiled_bytes(shape, size) == num_bytes


def test_a_row_in_a_line_of_its_own_is_filled_up():
    assert lined_bytes((1000, 100), 4) == 1000 * 128 * 4
    assert tiled_bytes((1000, 100), 4) == 104 * 1024 * 4
