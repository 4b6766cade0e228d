"""The plan lays tables over the chips of a TPU as JAX's trainer does, and refuses what that refuses."""

from __future__ import annotations

import pytest

from embark.errors import EmbarkError
from embark.model.placement import TooLarge
from embark.model.tpu_layout import lay_out, lined_bytes, placement_on, tiled_bytes
from embark.spec import load_spec, resolve
from embark.trainers.jax.layout import LINE_WIDTHS, make_layout

MIXED = {"model": {"embedding_dim": 32, "tables": [
    {"name": "a", "rows": 1003, "dim": 32}, {"name": "b", "rows": 7, "dim": 32, "multi_hot": 3},
    {"name": "c", "rows": 50_001, "dim": 128}, {"name": "d", "rows": 12, "dim": 100}], "kind": "dcnv2"}}


@pytest.mark.parametrize("num_chips", [1, 4, 8, 32])
@pytest.mark.parametrize("sets", [(), ("train.sharding=table_wise",), ("train.table_dtype=fp16",)])
@pytest.mark.parametrize("name", ["mixed", "quickstart", "criteo-1tb", "mlperf-dcnv2"])
def test_rows_lines_and_columns_are_the_trainer_s(name, sets, num_chips):
    sets = [*sets, "train.batch_size=4096"]
    spec = resolve(MIXED, sets) if name == "mixed" else load_spec(name, sets)
    ours, theirs = lay_out(spec, num_chips), make_layout(spec, num_chips, LINE_WIDTHS["tpu"]).groups
    assert [(r.dim, r.rows_per_chip, r.rows_per_line, r.lines_per_chip, r.num_columns) for r in ours] == \
           [(g.dim, g.rows_per_device, g.rows_per_line, g.lines_per_device, len(g.columns)) for g in theirs]


@pytest.mark.parametrize("num_chips", [1, 4, 64])
def test_rows_that_chips_exchange_are_those_that_the_compiler_is_told(num_chips):
    feed = pytest.importorskip("embark.trainers.jax.prefetch")
    spec = load_spec("mlperf-dcnv2", ["train.batch_size=4096"])
    layout = make_layout(spec, num_chips, LINE_WIDTHS["tpu"])
    assert [r.capacity for r in lay_out(spec, num_chips)] == list(feed.guessed_capacities(spec, layout))


@pytest.mark.parametrize("sets", [(), ("train.sharding=table_wise",)])
def test_the_placement_has_every_row_once(sets):
    spec = resolve(MIXED, [*sets, "train.batch_size=4096"])
    placement = placement_on(spec, 8, lay_out(spec, 8))
    held: dict[str, int] = {}
    for shard in placement.shards:
        held[shard.table] = held.get(shard.table, 0) + shard.num_rows
    assert held == {t.name: t.rows for t in spec.model.table_list()}
    layout = make_layout(spec, 8, LINE_WIDTHS["tpu"])
    theirs = {(p.table.name, chip): len(p.rows_on(chip, 8))
              for g in layout.groups for p in g.places for chip in range(8)}
    assert {(s.table, s.rank): s.num_rows for s in placement.shards} == {k: n for k, n in theirs.items() if n}


@pytest.mark.parametrize(("sets", "said"), [
    (["train.optimizer=adam"], "train.optimizer = adam"),
    (["train.sharding=column_wise"], "train.sharding = column_wise"),
    (["train.batch_size=1001"], "does not divide over 8 chips: use 1,000 or 1,008"),
    (["model.rows_per_table=2140000000"], "32 bits"),
])
def test_what_the_trainer_refuses_does_not_fit(sets, said):
    spec = load_spec("quickstart", sets)
    with pytest.raises(TooLarge, match=said):
        lay_out(spec, 8)
    if "batch" not in sets[0] and "adam" not in sets[0]:
        with pytest.raises(EmbarkError):
            make_layout(spec, 8)


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


def test_tables_whole_on_chips_are_too_many_rows_for_32_bits_where_the_trainer_says_so():
    spec = load_spec("criteo-1tb", ["train.sharding=table_wise"])
    with pytest.raises(TooLarge, match="40,000,000 rows on each of 64 chips"):
        lay_out(spec, 64)
    with pytest.raises(EmbarkError, match="more than 32 bits can number"):
        make_layout(spec, 64, LINE_WIDTHS["tpu"])
