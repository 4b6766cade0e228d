"""Batches become columns of ids, and the exchange gets room for what the first of them needs."""

from __future__ import annotations

import numpy as np

from embark.data import Batch, open_source
from embark.model.jax_layout import expected_capacities, make_layout
from embark.spec import resolve
from embark.trainers.jax.prefetch import capacities, id_columns

TABLES = '[{name="a", rows=9, multi_hot=2}, {name="b", rows=5}]'


def test_a_sample_with_fewer_ids_than_places_has_none_in_the_rest():
    spec = resolve({}, [f"model.tables={TABLES}"])
    batch = Batch(
        dense=np.zeros((3, 0), np.float32), ids=np.array([1, 2, 3, 4, 0, 2], np.int32),
        lengths=np.array([[2, 0, 1], [1, 1, 1]], np.int32), label=np.zeros(3, np.float32), is_fixed=False,
    )
    assert id_columns(batch, spec, make_layout(spec, 1)).T.tolist() == [[1, 2, 4], [-1, -1, 0], [3, -1, 2]]


def test_every_row_has_one_place_and_the_devices_hold_as_many_each():
    spec = resolve({}, ["model.num_tables=5", "model.rows_per_table=[7,100,3,50,8]"])
    layout = make_layout(spec, 4)
    (group,) = layout.groups
    taken = [set() for _ in range(4)]
    for place in group.places:
        rows = [row for device in range(4) for row in place.rows_on(device, 4)]
        assert sorted(rows) == list(range(place.table.rows))
        for device in range(4):
            at = range(place.first_row, place.first_row + len(place.rows_on(device, 4)))
            assert not taken[device] & set(at)
            assert at.stop <= group.rows_per_device
            taken[device] |= set(at)


def test_exchange_capacity_does_not_grow_with_the_number_of_devices():
    spec = resolve({}, ["model.num_tables=4", "model.rows_per_table=100000", "train.batch_size=8192"])
    source = open_source(spec)
    requests = {}
    for num_devices in (4, 16):
        per_device = spec.model_copy(update={"train": spec.train.model_copy(update={"batch_size": 256 * num_devices})})
        layout = make_layout(per_device, num_devices)
        (requests[num_devices],) = capacities(source, per_device, layout)
        (guessed,) = expected_capacities(per_device, layout)
        assert requests[num_devices] <= guessed
        assert num_devices * guessed <= 1.5 * 256 * 4
    assert 16 * requests[16] < 1.6 * 4 * requests[4]
