"""Rows go between devices and come back changed once, whatever the capacity and however they lie in memory."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from embark.model.jax_layout import make_layout
from embark.spec import TrainSpec, resolve
from embark.trainers.jax.exchange import AXIS, Exchange
from embark.trainers.jax.state import make_state, table_pieces

NUM_SAMPLES = 16
TABLES = '[{name="a", rows=37, multi_hot=2}, {name="b", rows=5}, {name="c", rows=64, multi_hot=3, pooling="mean"}]'


def reference(tables, ids, grads, rate, eps):
    """Row-wise Adagrad by the book, one row at a time, in fp64."""
    vectors, moved, states = [], [], []
    for table, (values, columns, grad) in enumerate(zip(tables, ids, grads, strict=True)):
        is_mean = table == 2
        num_ids = np.maximum((columns >= 0).sum(axis=1), 1) if is_mean else np.ones(len(columns))
        rows = np.where((columns >= 0)[:, :, None], values[columns], 0)
        vectors.append(rows.sum(axis=1) / num_ids[:, None])
        summed, state = np.zeros(values.shape), np.zeros(len(values))
        for sample, bag in enumerate(columns):
            for row in bag[bag >= 0]:
                summed[row] += grad[sample] / num_ids[sample]
        state += (summed**2).mean(axis=1)
        touched = np.unique(columns[columns >= 0])
        new = values.astype(np.float64)
        new[touched] -= rate * summed[touched] / (np.sqrt(state[touched])[:, None] + eps)
        moved.append(new)
        states.append(state)
    return vectors, moved, states


def exchanged(world, capacity: int, line_width: int):
    """Pooled vectors, rows and state after one exchange there and back, over the same numbers each time."""
    sets = [f"model.tables={TABLES}", "model.embedding_dim=4"]
    spec = resolve({}, sets)
    num_devices = world.num_devices
    layout = make_layout(spec, num_devices, line_width)
    (group,) = layout.groups
    draw = np.random.default_rng(5)
    tables = {t.name: draw.standard_normal((t.rows, 4), np.float32) for t in spec.model.table_list()}
    ids = [draw.integers(-1, t.rows, (NUM_SAMPLES, t.multi_hot), dtype=np.int32) for t in spec.model.table_list()]
    grads = [draw.standard_normal((NUM_SAMPLES, 4), np.float32) for _ in ids]
    state = make_state(spec, layout, world, lambda table, block: tables[table.name], None, {}, {})
    exchange = Exchange(group, num_devices, capacity, TrainSpec())

    @partial(jax.shard_map, mesh=world.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    def there_and_back(table, slot, ids, grads):
        wanted = exchange.wanted(ids)
        pooled = exchange.pooled(exchange.fetch((table, None), wanted), wanted)
        summed = exchange.summed([grads[:, i] for i in range(3)], wanted)
        table, slot = exchange.update((table, slot), wanted, summed, jnp.float32(0.1))
        return jnp.stack(pooled, axis=1), table, slot

    pooled, table, slot = jax.jit(there_and_back)(
        state["tables"][group.name], state["slots"][group.name], world.to_devices(np.concatenate(ids, axis=1)),
        world.to_devices(np.stack(grads, axis=1)),
    )
    rows = {place.table.name: values for place, _, values in table_pieces(table, group, world)}
    states = {place.table.name: values for place, _, values in table_pieces(slot, group, world)}
    expected = reference(list(tables.values()), ids, grads, 0.1, TrainSpec().eps)
    return np.asarray(pooled), list(rows.values()), list(states.values()), expected


@pytest.mark.parametrize(("num_devices", "capacity", "line_width"), [(1, 96, 0), (4, 24, 0), (4, 24, 16)])
def test_vectors_rows_and_state_are_those_of_the_book(world_of, num_devices, capacity, line_width):
    world = world_of(num_devices)
    pooled, rows, states, (vectors, moved, retained) = exchanged(world, capacity, line_width)
    for number in range(3):
        np.testing.assert_allclose(pooled[:, number], vectors[number], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(rows[number], moved[number], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(states[number], retained[number], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("capacity", "line_width"), [(1, 0), (3, 0), (24, 16)])
def test_neither_rounds_nor_lines_change_a_value(world_of, capacity, line_width):
    """With room for one row a round at a time there are dozens of rounds. Each is another program, in which the
    compiler may join other products and sums into one operation, which rounds once."""
    plain = exchanged(world_of(4), 24, 0)
    other = exchanged(world_of(4), capacity, line_width)
    np.testing.assert_allclose(other[0], plain[0], rtol=1e-6, atol=1e-6)
    for kind in (1, 2):
        for found, expected in zip(other[kind], plain[kind], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
