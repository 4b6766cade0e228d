"""Batches out of prepared data: the right rows in the epoch's order, whatever they lie in."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
from prepared_rows import FIXED, RAGGED, Made, make_prepared

from embark.data import Batch, Loader, eval_batches
from embark.data.prepared import Feature, Rows
from embark.data.prepared.order import EpochOrder, row_order
from embark.data.prepared.parts import OpenPart, PartVerifier
from embark.errors import DataError

NAMES = [f.name for f in FIXED]


def expected(made: Made, rows: Rows, numbers: Sequence[int], names: Sequence[str]) -> Batch:
    """The batch of these rows, one cell after the other."""
    ids: list[int] = []
    lengths: list[list[int]] = []
    for name in names:
        position = [f.name for f in made.layout.features].index(name)
        values, counts = rows.ids[position], rows.lengths[position]
        if counts is None:
            ids += [int(i) for n in numbers for i in values[n]]
            lengths.append([values.shape[1]] * len(numbers))
        else:
            ends = np.cumsum(counts)
            ids += [int(i) for n in numbers for i in values[ends[n] - counts[n] : ends[n]]]
            lengths.append([int(counts[n]) for n in numbers])
    label = np.array([rows.label[n] for n in numbers], np.float32)
    return Batch(rows.dense[list(numbers)], np.array(ids, np.int32), np.array(lengths, np.int32), label)


def numbers_of(made: Made, shuffle: str, epoch: int, seed: int = 1) -> list[int]:
    """The epoch's rows, by their numbers in the files."""
    parts, block_rows = made.manifest.parts["train"], made.manifest.block_rows
    firsts = np.cumsum([0, *(p.rows for p in parts)])
    order = EpochOrder([p.rows for p in parts], block_rows, shuffle=shuffle, seed=seed, epoch=epoch)  # type: ignore
    numbers: list[int] = []
    for piece in order.pieces(0, order.num_rows):
        rows = row_order(seed, epoch, piece) if shuffle == "rows" else np.arange(piece.block_rows)
        numbers += (firsts[piece.part] + piece.block * block_rows + rows).tolist()
    return numbers


def assert_same(found: Batch, wanted: Batch) -> None:
    for name in ("dense", "ids", "lengths", "label"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype, name
        np.testing.assert_array_equal(one, other, err_msg=name)


@pytest.mark.parametrize("shuffle", ["rows", "blocks", "none"])
@pytest.mark.parametrize(("features", "bits"), [(FIXED, 32), (FIXED, 16), (RAGGED, 32)], ids=["32", "16", "ragged"])
def test_any_slice_is_the_rows_of_the_epochs_order(tmp_path: Path, shuffle: str, features, bits: int):
    made = make_prepared(tmp_path, features, dense_bits=bits)
    assert len(made.manifest.parts["train"]) > 3, "slices must cross parts"
    source = made.open(shuffle=shuffle)
    names = [f.name for f in features]
    for epoch in (0, 1):
        numbers = numbers_of(made, shuffle, epoch)
        assert sorted(numbers) == list(range(1_000))
        for start, stop in [(0, 1_000), (0, 1), (60, 70), (63, 64), (64, 128), (130, 500), (999, 1_000), (7, 7)]:
            found = source.train_rows(epoch, start, stop)
            assert_same(found, expected(made, made.rows["train"], numbers[start:stop], names))
            assert found.is_fixed == (features is FIXED)


def test_epochs_have_the_same_rows_in_another_order_unless_there_is_none(tmp_path: Path):
    made = make_prepared(tmp_path)

    def first_column(epoch: int, **data: object) -> list[float]:
        return made.open(**data).train_rows(epoch, 0, 1_000).dense[:, 0].tolist()

    assert first_column(0) != first_column(1)
    assert sorted(first_column(0)) == sorted(first_column(1)) == list(range(1_000))
    assert first_column(0, seed=2) != first_column(0)
    assert first_column(0, shuffle="none") == first_column(1, shuffle="none") == list(range(1_000))


@pytest.mark.parametrize("features", [FIXED, RAGGED], ids=["fixed", "ragged"])
def test_ranks_take_the_same_samples_at_any_world_size(tmp_path: Path, features):
    made = make_prepared(tmp_path, features)
    source = made.open()

    def epochs(world_size: int) -> list[list[float]]:
        ranks = []
        for rank in range(world_size):
            with Loader(source, batch_size=96, rank=rank, world_size=world_size, start_step=0, stop_step=25,
                        num_threads=3) as loader:
                ranks.append([batch.dense[:, 0].tolist() for batch in loader])
        return [list(chain(*batches)) for batches in zip(*ranks, strict=True)]

    alone = epochs(1)
    assert alone == epochs(2) == epochs(4)
    assert len(set(chain(*alone[:10]))) == 960


def test_a_loader_that_begins_at_a_step_gives_the_same_batches(tmp_path: Path):
    made = make_prepared(tmp_path, RAGGED)

    def batches(start: int, stop: int) -> list[bytes]:
        with Loader(made.open(), batch_size=96, rank=1, world_size=2, start_step=start, stop_step=stop,
                    num_threads=2) as loader:
            return [b.dense.tobytes() + b.ids.tobytes() + b.lengths.tobytes() for b in loader]

    assert batches(0, 17) + batches(17, 30) == batches(0, 30)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_held_out_rows_are_those_of_the_split_each_once(tmp_path: Path, split: str):
    made = make_prepared(tmp_path, RAGGED)
    source = made.open(eval_split=split)
    rows = made.rows[split]
    assert source.num_eval_samples == len(rows)
    names = [f.name for f in RAGGED]
    assert_same(source.eval_rows(0, len(rows)), expected(made, rows, range(len(rows)), names))
    counted = [
        number
        for rank in range(2)
        for batch in eval_batches(source, batch_size=32, rank=rank, world_size=2)
        for number in batch.dense[: batch.num_samples, 0].tolist()
    ]
    assert sorted(counted) == list(range(len(rows)))


def test_a_model_gets_its_features_in_its_own_order(tmp_path: Path):
    made = make_prepared(tmp_path)
    names = ["pair", "edge", "wide", "middle", "many"]
    rows_of = {f.name: f for f in FIXED}
    tables = [{"name": n, "rows": rows_of[n].rows, "multi_hot": rows_of[n].multi_hot} for n in names]
    source = made.open(shuffle="none", model={"tables": tables})
    assert_same(source.train_rows(0, 50, 200), expected(made, made.rows["train"], range(50, 200), names))


def test_lengths_that_are_fixed_are_made_once(tmp_path: Path):
    source = make_prepared(tmp_path).open()
    assert source.train_rows(0, 0, 100).lengths is source.train_rows(1, 300, 400).lengths


def test_batches_are_made_in_the_memory_that_is_handed_in(tmp_path: Path):
    from embark.data import open_source, resolve_from_data

    given: list[np.ndarray] = []

    def allocate(size_bytes: int) -> np.ndarray:
        given.append(np.zeros(size_bytes, np.uint8))
        return given[-1]

    spec = resolve_from_data(make_prepared(tmp_path).spec())
    batch = open_source(spec, allocate=allocate).train_rows(0, 10, 90)
    for array in (batch.dense, batch.ids, batch.label):
        assert sum(np.shares_memory(array, memory) for memory in given) == 1


def test_no_dense_columns_and_one_feature_will_do(tmp_path: Path):
    made = make_prepared(tmp_path, (Feature("only", 10),), num_dense=0)
    batch = made.open(shuffle="none").train_rows(0, 100, 130)
    assert batch.dense.shape == (30, 0)
    assert batch.ids.tolist() == made.rows["train"].ids[0][100:130, 0].tolist()


def test_without_rows_to_evaluate_on_a_note_says_so(tmp_path: Path):
    source = make_prepared(tmp_path, test=0).open(eval_split="test")
    assert source.num_eval_samples == 0
    assert "no test rows" in source.notes[0]


def test_threads_that_read_at_once_get_what_one_alone_gets(tmp_path: Path):
    from concurrent.futures import ThreadPoolExecutor

    made = make_prepared(tmp_path, RAGGED)
    spans = [(epoch, start, start + 90) for epoch in range(4) for start in range(0, 900, 30)]
    alone = [made.open().train_rows(*span).ids.tobytes() for span in spans]
    source = made.open()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda span: source.train_rows(*span).ids.tobytes(), spans)) == alone


@pytest.mark.parametrize(("few_rows", "as_with"), [(10_000, "rows"), (100, "blocks")])
def test_auto_shuffles_rows_of_little_data_and_blocks_of_much(tmp_path, monkeypatch, few_rows, as_with):
    monkeypatch.setattr("embark.data.prepared.source._FEW_ROWS", few_rows)
    made = make_prepared(tmp_path)
    ours = made.open(shuffle="auto").train_rows(0, 0, 500)
    np.testing.assert_array_equal(ours.dense, made.open(shuffle=as_with).train_rows(0, 0, 500).dense)


@pytest.mark.parametrize("features", [(Feature("a", 70_000), Feature("b", 1_000)), RAGGED], ids=["fixed", "ragged"])
def test_ids_with_a_flipped_bit_are_refused_or_clipped(tmp_path: Path, monkeypatch, features):
    monkeypatch.setattr(PartVerifier, "add", lambda *_: None)  # the bytes may be in memory alone, or forged
    made = make_prepared(tmp_path, features, part_bytes=1 << 20)
    part, number = made.manifest.parts["train"][0], next(i for i, f in enumerate(features) if f.rows == 70_000)
    data = bytearray((tmp_path / part.file).read_bytes())
    counts = np.frombuffer(data, "<i8", len(made.layout.ragged)).tolist()
    group, position = made.layout.positions[number]
    place = made.layout.map(64, counts).groups[group].start + 4 * (64 * position + 5) + 3
    data[place] ^= 0x80  # the sign of sample 5's id
    (tmp_path / part.file).write_bytes(data)
    with pytest.raises(DataError, match=rf"table {features[number].name}: id -\d+ of sample 5 of the batch is not in 0 "
                                        r"to 69999, in samples 0"):
        made.open(shuffle="none").train_rows(0, 0, 64)
    clipped = made.open(shuffle="none", on_bad_id="clip").train_rows(0, 0, 64)
    assert clipped.ids.min() == 0


def test_a_part_whose_bytes_changed_since_it_was_prepared_stops_the_run(tmp_path: Path):
    made = make_prepared(tmp_path, part_bytes=2_000)
    part = made.manifest.parts["train"][0]
    data = bytearray((tmp_path / part.file).read_bytes())
    data[made.layout.map(64).label.start] ^= 1  # a label: no value that could be known to be wrong
    (tmp_path / part.file).write_bytes(data)
    source = made.open(shuffle="none")
    with pytest.raises(DataError, match=f"{part.file}: its checksum is .*may have trained on it"):
        list(map(source.train_rows, repeat(0), repeat(0), repeat(64)))


def test_the_ranks_of_a_machine_verify_each_part_once(tmp_path: Path, monkeypatch):
    made = make_prepared(tmp_path, part_bytes=2_000)
    verified: list[str] = []
    monkeypatch.setattr(OpenPart, "sha256", lambda self: verified.append(self.path.name) or "x")
    parts = made.manifest.parts["train"]
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
        verifier = PartVerifier()
        for part in [*parts, *parts]:
            verifier.add(part, OpenPart(tmp_path / part.file, part, made.layout, 64))
        for thread in threading.enumerate():
            if thread.name == "embark-verify":
                thread.join()
    assert sorted(verified) == sorted(Path(part.file).name for part in parts)
