"""Puts numpy batches on the devices ahead of time, in a thread, and computes how much the exchange must hold."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from embark.data import Batch, SampleSource
from embark.data.loader import Prefetcher, Share
from embark.features.arrays import Array, Int32s
from embark.model.jax_layout import NUM_AHEAD, Group, Layout, capacity_for
from embark.spec import RunSpec
from embark.values import JsonDict
from .exchange import BATCH_AXES
from .world import World

DeviceBatch = JsonDict
MOST_LOOKED_AT = 8  # Devices whose part of the first batch is counted.


@contextmanager
def train_batches(
    source: SampleSource, spec: RunSpec, layout: Layout, world: World, start_step: int, stop_step: int
) -> Iterator[Iterator[DeviceBatch]]:
    """Yield the batches of a part of the run, put on the devices ahead of time."""
    share = Share(source.num_train_samples, spec.train.batch_size, world.rank, world.world_size, start_step, stop_step)
    ahead = Prefetcher(lambda number: to_devices(source.train_rows(*share.of(number)), spec, layout, world), len(share),
                  depth=NUM_AHEAD)
    ahead.start()
    try:
        yield ahead.take()
    finally:
        ahead.close()


def to_devices(batch: Batch, spec: RunSpec, layout: Layout, world: World, *, is_eval: bool = False) -> DeviceBatch:
    """Share a process's part of a batch among its devices."""
    ids = id_columns(batch, spec, layout)
    arrays: dict[str, Array] = {"dense": batch.dense, "ids": ids, "label": batch.label}
    if is_eval:
        arrays["valid"] = np.arange(len(batch.label)) < batch.num_samples
    return {name: world.to_devices(values, axis=BATCH_AXES[name]) for name, values in arrays.items()}


def id_columns(batch: Batch, spec: RunSpec, layout: Layout) -> Int32s:
    """Return ids as [columns, b]: `multi_hot` columns for each table, −1 where a sample has fewer ids.

    With one id a table that is how a batch lies already; the devices turn it over faster than a host would.
    """
    num_samples = len(batch.label)
    num_tables = sum(len(group.places) for group in layout.groups)
    if batch.is_fixed and layout.num_columns == num_tables and batch.ids.size == num_tables * num_samples:
        return batch.ids.reshape(num_tables, num_samples)
    columns = np.empty((layout.num_columns, num_samples), np.int32)
    at = start = 0
    for table, lengths in zip(spec.model.table_list(), batch.lengths, strict=True):
        num_ids = int(lengths.sum())
        ids = batch.ids[start : start + num_ids]
        target = columns[at : at + table.multi_hot].T
        if num_ids == num_samples * table.multi_hot and (batch.is_fixed or (lengths == table.multi_hot).all()):
            target[:] = ids.reshape(num_samples, table.multi_hot)
        else:
            target[:] = -1
            target[np.arange(table.multi_hot) < lengths[:, None]] = ids
        at, start = at + table.multi_hot, start + num_ids
    return columns


def capacities(source: SampleSource, spec: RunSpec, layout: Layout) -> tuple[int, ...]:
    """Return, for each group, the rows that a device may ask of another at a time; the same on every process."""
    num_devices = layout.num_devices
    per_device = spec.train.batch_size // num_devices
    most = [per_device * len(group.columns) for group in layout.groups]
    if num_devices == 1:
        return tuple(most)
    num_samples = min(num_devices, MOST_LOOKED_AT) * per_device
    ids = id_columns(source.train_rows(0, 0, num_samples), spec, layout).T
    parts = np.split(ids, min(num_devices, MOST_LOOKED_AT))
    return tuple(
        capacity_for(max(_most_requested(part, group, num_devices) for part in parts), limit, num_devices)
        for group, limit in zip(layout.groups, most, strict=True)
    )


def _most_requested(ids: Int32s, group: Group, num_devices: int) -> int:
    """Return the most distinct rows that one device asks of one other."""
    requested = np.zeros(num_devices, np.int64)
    columns = ids[:, list(group.columns)]
    for number, place in enumerate(group.places):
        mine = columns[:, [at for at, of in enumerate(group.place_of_column) if of == number]]
        rows = np.unique(mine[mine >= 0])
        requested += np.bincount((rows + place.shift) % num_devices, minlength=num_devices)
    return int(requested.max())
