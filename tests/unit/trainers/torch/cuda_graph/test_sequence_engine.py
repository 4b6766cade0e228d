"""Batches of any number of rows in shapes that graphs have, and their rows by kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from captured_kinds import sets_of

from embark.data import Batch, open_source
from embark.errors import DataError
from embark.spec import resolve
from embark.trainers.torch.engines.cuda_graph.batch_layout import SequenceLayout, capacity_of
from embark.trainers.torch.engines.cuda_graph.engine import CudaGraphEngine
from embark.trainers.torch.engines.cuda_graph.lookup import Device, KernelLookup
from embark.trainers.torch.model import local_shards
from embark.trainers.torch.sharding import sharded_collections

RANKER = ("model.num_dense=0", "model.tables=[{name='user', rows=5}, {name='item', rows=9, pooling='none', "
          "max_length=200}, {name='shown', shares='item'}, {name='at', lookup=false, pooling='none', max_length=200}]",
          "model.sequence.history=item", "model.sequence.candidate=shown", "model.sequence.times=at", "model.kind=hstu")


def test_few_shapes_hold_any_batch_with_little_room_to_spare():
    sizes = np.arange(1, 300_000)
    rooms = np.array([capacity_of(int(size)) for size in sizes])
    assert (rooms >= sizes).all()
    assert (rooms[1000:] <= 1.125 * sizes[1000:]).all()
    assert np.mean(rooms / sizes) < 1.1
    assert len(set(rooms)) < 100


def batch_of(lengths: list[int]) -> Batch:
    history = np.arange(sum(lengths), dtype=np.int32) % 9
    ids = [np.array([4, 3, 2], np.int32), history, np.array([7, 8], np.int32), 100 + history]
    counts = [[1, 1, 1], lengths, [1, 0, 1], lengths]  # the second sample has no candidate
    return Batch(np.zeros((3, 0), np.float32), np.concatenate(ids), np.array(counts, np.int32),
                 np.array([1, 0, 1], np.float32), is_fixed=False)


def test_a_batch_is_read_as_it_was_packed_with_nothing_behind_its_rows():
    layout = SequenceLayout(resolve({}, RANKER).model, 3)
    buffer = np.full(layout.size_bytes, 77, np.uint8)
    shape = layout.pack(batch_of([90, 0, 60]), buffer)
    assert shape.capacities == (192, 3, 192)
    assert shape.size_bytes < layout.size_bytes
    layout.capacities = shape.capacities
    on_device = torch.from_numpy(buffer)
    _, ids, label = layout.decode(on_device)
    assert label.tolist() == [1, 0, 1]
    assert ids[: layout.first_id].tolist() == [4, 3, 2]
    history, shown, times = (ids[span].tolist() for span in layout.spans())
    assert history == [row % 9 for row in range(150)] + [-1] * 42
    assert shown == [7, -1, 8]
    assert times == [100 + row % 9 for row in range(150)] + [-1] * 42
    assert {name: ends.tolist() for name, ends in layout.offsets(on_device).items()} == {
        "item": [0, 90, 90, 150], "at": [0, 90, 90, 150]}
    (span,) = layout.table_spans()
    assert ids[span].tolist() == history + shown
    larger = layout.larger(shape.capacities)
    assert larger[0] > shape.capacities[0]
    assert larger[1] == 3


def test_samples_with_different_numbers_of_negatives_are_refused(tmp_path):
    spec = resolve({}, sets_of("sasrec", tmp_path))
    layout = SequenceLayout(spec.model, 2)
    batch = Batch(np.zeros((2, 0), np.float32), np.zeros(9, np.int32), np.array([[2, 2], [2, 3]], np.int32),
                  np.ones(2, np.float32), is_fixed=False)
    with pytest.raises(DataError, match="different numbers of negatives"):
        layout.pack(batch, np.empty(layout.size_bytes, np.uint8))


def tables_after(trainer, num_steps):
    with trainer.feed(open_source(trainer.spec), 0, num_steps) as batches:
        for step in range(num_steps):
            trainer.step(batches, step)
    return [values.clone() for tables in sharded_collections(trainer.model) for _, values, _, _ in local_shards(tables)]


@pytest.mark.parametrize("kind", ["din", "sasrec", "hstu_next_item"])
def test_kernels_update_the_rows_of_all_features_as_fbgemm_does(built, kernels, tmp_path, monkeypatch, kind):
    """One update of each row in a step, by the sum over history, candidate and negatives."""
    sets = (*sets_of(kind, tmp_path), "train.engine=cuda_graph", "train.batch_size=16", "train.eps=1e-4")
    sets = tuple(one.replace("multi_hot=3, pooling='mean'", "multi_hot=3") for one in sets)

    def by_kernels(engine, plans, num_samples):
        for plan in plans:
            batch = plan.local.batch
            batch.weights_dev, batch.momentum1_dev = batch.weights_host.data, batch.momentum1_host
        on_device = Device(engine._rates.now, engine._step, engine._bad_id, torch.zeros(1, dtype=torch.int64))
        return KernelLookup(plans, num_samples, on_device, 1e-4, 0.0)

    trainer = built(*sets)
    by_fbgemm = tables_after(trainer, 3)
    monkeypatch.setattr(CudaGraphEngine, "_lookup_of", by_kernels)
    for mine, wanted in zip(tables_after(built(*sets), 3), by_fbgemm, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-6)
