"""Lookups and updates of rows that lie on many devices, inside one jitted step.

Each device sorts its ids, asks for every row once, and gets from each device the rows that lie there; on the way back
the owner of a row gets one summed gradient from each device, adds those up and moves the row. The exchange has a fixed
capacity for each pair of devices, so that memory goes with a device's own batch, however many devices there are. A
batch that asks one device for more goes in rounds, each a range of rows: a row's gradients all come in one round, so
that rounds change no number.

A TPU keeps arrays in lines of 128 numbers; narrower rows would be filled up to that, or laid out by columns and copied
at every step. So several of them lie in a line, and a row is a part of one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from embark.model.jax_layout import Group
from embark.spec import TrainSpec
from embark.values import frozen
from .network import row_steps

AXIS = "devices"
BATCH_AXES = {"dense": 0, "ids": 1, "label": 0, "valid": 0}
"""Which axis of a batch's arrays goes over samples, and so over devices."""
Arrays = tuple[jax.Array, jax.Array | None]
"""A device's rows and their state, a line of one or several rows each; one number a row has no lines."""


@frozen
class WantedRows:
    """Rows of a group that a device's batch asks for."""

    keys: jax.Array
    """[K] ascending, each once: device · rows + row; what is left is filled with a number behind the last."""
    number: jax.Array  # [b, columns]: index in `keys` of each id; K if there is no id.
    order: jax.Array  # [K]: flat indexes of the batch's ids in the order of their keys.
    sorted_number: jax.Array  # [K]: `number` in that order.


class Exchange:
    """Lookups and updates of one group's rows, seen from one device; every method runs inside `shard_map`."""

    def __init__(self, group: Group, num_devices: int, capacity: int, train: TrainSpec) -> None:
        self._group, self._num_devices, self._capacity, self._train = group, num_devices, capacity, train
        self._rows = group.rows_per_device
        self._per_line = group.rows_per_line
        self._none = num_devices * group.rows_per_device
        self._shift = group.per_column([place.shift for place in group.places])
        self._first_row = group.per_column([place.first_row for place in group.places])
        self._wire = {"fp16": jnp.float16, "bf16": jnp.bfloat16}.get(train.comms_dtype, jnp.float32)

    def wanted(self, ids: jax.Array) -> WantedRows:
        """Collect every row that `ids` [b, columns] name, once; −1 is none."""
        device = (ids + self._shift) % self._num_devices
        keys = device * self._rows + self._first_row + ids // self._num_devices
        flat = jnp.where(ids < 0, self._none, keys).reshape(-1)
        places = jnp.arange(flat.size, dtype=jnp.int32)
        ordered, order = jax.lax.sort((flat, places), num_keys=1, is_stable=True)
        distinct, number = _numbered(ordered, self._none)
        # Back into the order of the batch by one more sort: a TPU sorts faster than it scatters.
        _, by_place = jax.lax.sort((order, number), num_keys=1)
        empty = flat == self._none
        return WantedRows(distinct, jnp.where(empty, flat.size, by_place).reshape(ids.shape), order, number)

    def fetch(self, arrays: Arrays, wanted: WantedRows) -> jax.Array:
        """Fetch the rows of `wanted.keys` as [K, dim] in fp32."""
        table = arrays[0]
        if self._num_devices == 1:
            return self._rows_at(table, wanted.keys)

        def one_round(low: jax.Array, fetched: jax.Array) -> tuple[jax.Array, jax.Array]:
            part = self._round(wanted.keys, low)
            requested = _swap(part.rows)
            answers = _swap(self._rows_at(table, requested).astype(self._wire)).astype(jnp.float32)
            mine = answers.reshape(-1, answers.shape[-1]).at[part.slot].get(mode="fill", fill_value=0)
            return part.high, jnp.where(part.is_in[:, None], mine, fetched)

        start = jnp.zeros((wanted.keys.size, self._group.dim), jnp.float32)
        return self._in_rounds(one_round, start)

    def pooled(self, rows: jax.Array, wanted: WantedRows) -> list[jax.Array]:
        """Return a vector [b, dim] for each table: sums of the batch's rows, or means."""
        result = []
        for place, columns in self._columns():
            taken = rows.at[wanted.number[:, columns]].get(mode="fill", fill_value=0)
            vector = taken.sum(axis=1)
            if self._group.places[place].table.pooling == "mean":
                vector = vector / self._num_ids(wanted, columns)
            result.append(vector)
        return result

    def summed(self, grads: list[jax.Array], wanted: WantedRows) -> jax.Array:
        """Sum the gradients of each of `wanted.keys`, [K, dim], from those of the pooled vectors."""
        num_places = len(self._group.places)
        divided = [
            grad / self._num_ids(wanted, columns) if self._group.places[place].table.pooling == "mean" else grad
            for (place, columns), grad in zip(self._columns(), grads, strict=True)
        ]
        bags = jnp.stack(divided, axis=1).reshape(-1, self._group.dim)
        num_columns = len(self._group.columns)
        bag_of_column = jnp.asarray(self._group.place_of_column, jnp.int32)
        bag = wanted.order // num_columns * num_places + bag_of_column[wanted.order % num_columns]
        # Empty places come last and count for the number behind the last row.
        return _segment_sums(bags[bag], wanted.sorted_number, wanted.keys.size)

    def update(self, arrays: Arrays, wanted: WantedRows, grads: jax.Array, rate: jax.Array) -> Arrays:
        """Return rows and state after the step; only rows that the batch has touched are read or written."""
        if self._num_devices == 1:
            return self._moved(arrays, wanted.keys, grads, rate)

        def one_round(low: jax.Array, held: Arrays) -> tuple[jax.Array, Arrays]:
            part = self._round(wanted.keys, low)
            sent = grads.at[part.index].get(mode="fill", fill_value=0)
            requested, came = _swap(part.rows).reshape(-1), _swap(sent.astype(self._wire)).astype(jnp.float32)
            places = jnp.arange(requested.size, dtype=jnp.int32)
            ordered, order = jax.lax.sort((requested, places), num_keys=1, is_stable=True)
            distinct, number = _numbered(ordered, self._rows)
            sums = _segment_sums(came.reshape(requested.size, -1)[order], number, requested.size)
            return part.high, self._moved(held, distinct, sums, rate)

        return self._in_rounds(one_round, arrays)

    def _moved(self, arrays: Arrays, rows: jax.Array, grads: jax.Array, rate: jax.Array) -> Arrays:
        table, state = arrays
        held = None if state is None else self._rows_at(state, rows)
        steps, added = row_steps(self._train, held, grads, rate)
        if table.dtype == jnp.float32:
            table = self._added(table, rows, steps)
        else:  # rounded once, after the sum
            moved = (self._rows_at(table, rows) + steps).astype(table.dtype)
            table = table.at[self._own_rows(rows)].set(moved, mode="drop", unique_indices=True, indices_are_sorted=True)
        if state is not None and added is not None:
            state = self._added(state, rows, added)
        return table, state

    def _rows_at(self, table: jax.Array, rows: jax.Array) -> jax.Array:
        """Read rows in fp32, with zeros where there is no such row."""
        per_line = self._per_line if table.ndim > 1 else 1
        found = _unrounded(table.at[rows // per_line].get(mode="fill", fill_value=0)).astype(jnp.float32)
        return found if per_line == 1 else _part_of_lines(found, rows % per_line, per_line)

    def _added(self, table: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
        """Add `values` to ascending, distinct `rows`; those behind the last row are dropped."""
        if table.ndim == 1 or self._per_line == 1:
            return table.at[self._own_rows(rows)].add(values, mode="drop", unique_indices=True, indices_are_sorted=True)
        lines = _in_lines(values, rows % self._per_line, self._per_line)
        return table.at[rows // self._per_line].add(lines, mode="drop", indices_are_sorted=True)

    def _own_rows(self, rows: jax.Array) -> jax.Array:
        """Make rows behind the last one distinct, so that no two writes go to one index."""
        return jnp.where(rows < self._rows, rows, self._rows + jnp.arange(rows.size, dtype=jnp.int32))

    def _in_rounds(self, one_round: Callable[[Any, Any], tuple[Any, Any]], start: Any) -> Any:
        """Repeat until every row of every device has had its turn, which nearly always takes one round."""
        _, result = jax.lax.while_loop(
            lambda carry: carry[0] < self._rows, lambda carry: one_round(*carry), (jnp.int32(0), start)
        )
        return result

    def _round(self, keys: jax.Array, low: jax.Array) -> _Round:
        """Take as many rows from `low` on as every pair of devices has room for; the range is the same on all devices.
        """
        first_keys = jnp.arange(self._num_devices, dtype=jnp.int32) * self._rows
        begin = jnp.searchsorted(keys, first_keys + low).astype(jnp.int32)
        too_far = keys.at[begin + self._capacity].get(mode="fill", fill_value=self._none)
        limit = jnp.minimum(too_far - first_keys, self._rows)
        high = jax.lax.pmin(jnp.min(limit), AXIS)
        end = jnp.searchsorted(keys, first_keys + high).astype(jnp.int32)
        index = begin[:, None] + jnp.arange(self._capacity, dtype=jnp.int32)
        index = jnp.where(index < end[:, None], index, keys.size)
        rows = keys.at[index].get(mode="fill", fill_value=self._none) - first_keys[:, None]
        owner = jnp.minimum(keys // self._rows, self._num_devices - 1)
        place = jnp.arange(keys.size, dtype=jnp.int32)
        is_in = (place >= begin[owner]) & (place < end[owner])
        slot = jnp.where(is_in, owner * self._capacity + place - begin[owner], self._num_devices * self._capacity)
        return _Round(high, index, jnp.where(index < keys.size, rows, self._rows), is_in, slot)

    def _columns(self) -> list[tuple[int, slice]]:
        """Return, for each table of the group, its columns among the group's."""
        ends = np.cumsum([place.table.multi_hot for place in self._group.places]).tolist()
        return [(place, slice(begin, end)) for place, (begin, end) in enumerate(pairwise([0, *ends]))]

    def _num_ids(self, wanted: WantedRows, columns: slice) -> jax.Array:
        """Count the ids of each sample, [b, 1]; 1 where it has none."""
        has_id = wanted.number[:, columns] < wanted.keys.size
        return jnp.maximum(has_id.sum(axis=1, keepdims=True), 1).astype(jnp.float32)


@frozen
class _Round:
    """The rows that devices exchange in one round."""

    high: jax.Array  # The first row that is left for the next round.
    index: jax.Array  # [devices, capacity]: indexes of the keys sent to each device; unused ones are past the last key.
    rows: jax.Array  # [devices, capacity]: rows of these keys on the device that has them.
    is_in: jax.Array  # [K]: whether a key is sent in this round.
    slot: jax.Array  # [K]: index of a key among all that are sent.


def samples_on(axis: int) -> PartitionSpec:
    """Sharding of an array whose `axis` goes over samples."""
    return PartitionSpec(*[None] * axis, AXIS)


def _numbered(ordered: jax.Array, none: int) -> tuple[jax.Array, jax.Array]:
    """Return each value of an ascending array once, filled up with `none`, and for each value which of those it is."""
    is_first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    number = jnp.cumsum(is_first.astype(jnp.int32)) - 1
    distinct = jax.lax.sort(jnp.where(is_first, ordered, none))
    return distinct, number


def _unrounded(values: jax.Array) -> jax.Array:
    """Return rows unchanged, for a moment as bits.

    Else a TPU's compiler, seeing that the dense layers round them, rounds the whole table before it takes rows of it,
    and needs room for that copy.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.int32 if values.dtype == jnp.float32 else jnp.int16)
    return jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(bits), values.dtype)


def _part_of_lines(lines: jax.Array, part: jax.Array, per_line: int) -> jax.Array:
    """Select […, dim] of […, per_line · dim]: in each line the row that `part` says."""
    rows = lines.reshape(*lines.shape[:-1], per_line, -1)
    is_it = part[..., None] == jnp.arange(per_line, dtype=part.dtype)
    return jnp.where(is_it[..., None], rows, 0).sum(axis=-2)


def _in_lines(rows: jax.Array, part: jax.Array, per_line: int) -> jax.Array:
    """Invert `_part_of_lines`: zeros except for the row that `part` says."""
    is_it = part[:, None] == jnp.arange(per_line, dtype=part.dtype)
    return jnp.where(is_it[:, :, None], rows[:, None, :], 0).reshape(len(rows), -1)


def _segment_sums(values: jax.Array, number: jax.Array, num_segments: int) -> jax.Array:
    return jax.ops.segment_sum(values, number, num_segments, indices_are_sorted=True)


def _swap(values: jax.Array) -> jax.Array:
    """Send part i of each device's `values` to device i."""
    return jax.lax.all_to_all(values, AXIS, split_axis=0, concat_axis=0)
