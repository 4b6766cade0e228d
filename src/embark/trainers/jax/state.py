"""The state of a run between the devices and the host: filled from rows of tables, and read back as rows of tables."""

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from embark.features.arrays import Array
from embark.model.jax_layout import Group, Layout, TablePlacement
from embark.model.work import DENSE_STATES
from embark.spec import RunSpec, Table
from embark.values import JsonDict
from .exchange import AXIS
from .network import ROWS_PER_BLOCK, initial_dense, initial_rows
from .step import State, state_shapes
from .world import World

RowsOf = Callable[[Table, int], Array]
"""Maps a table and the number of a block of `ROWS_PER_BLOCK` rows to those rows."""
BLOCK_BYTES = 64 << 20  # Bytes of a table on each device that go to the host at a time.


def initial_state(
    spec: RunSpec, layout: Layout, world: World, rows_of: RowsOf | None = None, dense: JsonDict | None = None
) -> State:
    """Make the state that a run begins with: weights that are given, or that the torch trainer would draw, and
    optimizers that have seen nothing."""
    dense = dense or initial_dense(spec.model, spec.train.seed)
    drawn = partial(initial_rows, seed=spec.train.seed)
    empty = {name: tuple(np.zeros_like(weight) for _ in DENSE_STATES[spec.train.dense_optimizer])
             for name, weight in dense.items()}
    return make_state(spec, layout, world, rows_of or drawn, None, dense, empty)


def make_state(
    spec: RunSpec, layout: Layout, world: World, rows_of: RowsOf, state_of: RowsOf | None,
    dense: JsonDict, dense_state: JsonDict
) -> State:
    """Put rows of tables and of their optimizer's state on the devices; zeros where `state_of` is None."""
    shapes = state_shapes(spec, layout, world.mesh)
    tables, slots = {}, {}
    for group in layout.groups:
        tables[group.name] = _placed(group, shapes["tables"][group.name], world, rows_of)
        if group.name in shapes["slots"]:
            slots[group.name] = _placed(group, shapes["slots"][group.name], world, state_of)
    return {
        "tables": tables, "slots": slots,
        "dense": {name: world.replicated(values) for name, values in dense.items()},
        "dense_state": {name: tuple(map(world.replicated, values)) for name, values in dense_state.items()},
        "counts": empty_counts(shapes["counts"])
    }


def empty_counts(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Return histograms with nothing in them."""
    return _zeros(shape.shape, shape.sharding)()


@lru_cache
def _zeros(shape: tuple[int, ...], sharding: NamedSharding) -> Callable[[], jax.Array]:
    """Return a program that makes zeros; it is cached, since a new one would be compiled again."""
    return jax.jit(lambda: jnp.zeros(shape, jnp.int32), out_shardings=sharding)


def table_pieces(array: jax.Array, group: Group, world: World) -> Iterator[tuple[TablePlacement, int, Array]]:
    """Yield a group's rows as this process saves them: the table, the first row of a piece, and its rows on the host.

    Every process must go through it to the end: several of them put rows into order by an exchange of their devices.
    """
    if world.world_size == 1:
        yield from _pieces_here(array, group, world)
        return
    for place in group.places:
        yield from ((place, first, rows) for first, rows in _pieces_of_many(array, place, group, world))


def _pieces_here(array: jax.Array, group: Group, world: World) -> Iterator[tuple[TablePlacement, int, Array]]:
    """Let the host put rows into order where all devices are this process's own."""
    num_devices = world.num_devices
    parts = [_part_on(array, device, group) for _, device in world.local_devices]
    for place in group.places:
        rows = np.empty((place.table.rows, *parts[0].shape[1:]), array.dtype)
        for at, part in enumerate(parts):
            mine = place.rows_on(at, num_devices)
            rows[mine.start : mine.stop : mine.step] = part[place.first_row : place.first_row + len(mine)]
        yield place, 0, rows


def _pieces_of_many(array: jax.Array, place: TablePlacement, group: Group, world: World) -> Iterator[tuple[int, Array]]:
    """Yield a block of rows of every device at a time, put into the table's order by an exchange between devices."""
    num_devices = world.num_devices
    per_line = group.rows_per_line if array.ndim > 1 else 1
    unit = math.lcm(per_line, num_devices)
    row_bytes = math.prod(array.shape[1:]) * array.dtype.itemsize // per_line
    done, end = place.first_row, place.first_row + place.num_rows
    while done < end:
        begin = done // per_line * per_line
        needed = -(-(end - begin) // unit)
        # At most the next power of two, so that tables of any size share a few programs.
        num_rows = unit * min(max(1, BLOCK_BYTES // row_bytes // unit), 1 << (needed - 1).bit_length())
        block = _ordering(world.mesh, num_rows, per_line)(array, begin // per_line, place.shift)
        stop = min(begin + num_rows, end)
        low = (done - place.first_row) * num_devices
        high = min((stop - place.first_row) * num_devices, place.table.rows)
        for at, device in world.local_devices:
            piece = next(np.asarray(s.data) for s in block.addressable_shards if s.device == device)
            first = (begin - place.first_row) * num_devices + at * num_rows
            used = piece[max(0, low - first) : max(0, high - first)]
            if len(used):
                yield max(low, first), used.copy()
        done = stop


@lru_cache
def _ordering(mesh: Mesh, num_rows: int, per_line: int) -> Callable[..., jax.Array]:
    """Return a function that takes `num_rows` rows of every device, from a memory line on, and puts them in the order
    of a table whose row 0 is on device `shift`."""
    num_devices = mesh.size

    def ordered(array: jax.Array, line: jax.Array, shift: jax.Array) -> jax.Array:
        lines = jnp.arange(num_rows // per_line, dtype=jnp.int32) + line
        by_device = array.reshape(num_devices, -1, *array.shape[1:])
        part = by_device.at[:, lines].get(mode="fill", fill_value=0)
        width = () if array.ndim == 1 else (-1,)
        by_row = part.reshape(num_devices, num_rows, *width).swapaxes(0, 1)
        return jnp.roll(by_row, -shift, axis=1).reshape(num_rows * num_devices, *width)

    return jax.jit(ordered, out_shardings=NamedSharding(mesh, P(AXIS)))


def _placed(group: Group, shape: jax.ShapeDtypeStruct, world: World, rows_of: RowsOf | None) -> jax.Array:
    """Make an array over all devices; this process fills the parts of its own."""
    width = () if len(shape.shape) == 1 else (group.dim,)
    held = {at: np.zeros((group.rows_per_device, *width), shape.dtype) for at, _ in world.local_devices}
    if rows_of is not None:
        blocks = [(place, block) for place in group.places for block in range(-(-place.table.rows // ROWS_PER_BLOCK))]
        with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="embark-fill") as pool:
            for _ in pool.map(partial(_fill, held, rows_of, world.num_devices), blocks):
                pass
    part_shape = (shape.shape[0] // world.num_devices, *shape.shape[1:])
    parts = [jax.device_put(held.pop(at).reshape(part_shape), device) for at, device in world.local_devices]
    return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, parts)


def _fill(held: dict[int, Array], rows_of: RowsOf, num_devices: int, part: tuple[TablePlacement, int]) -> None:
    place, block = part
    first = block * ROWS_PER_BLOCK
    wanted = {at: _overlap(place.rows_on(at, num_devices), first) for at in held}
    if not any(len(rows) for rows in wanted.values()):
        return
    values = rows_of(place.table, block)
    for at, rows in wanted.items():
        if len(rows):
            start = place.first_row + rows[0] // num_devices
            held[at][start : start + len(rows)] = values[rows.start - first : rows.stop - first : rows.step]


def _overlap(rows: range, first: int) -> range:
    """Return the part of `rows` that lies in the block that begins with `first`."""
    if not rows:
        return rows
    begin = max(0, -(-(first - rows.start) // rows.step))
    end = max(0, -(-(first + ROWS_PER_BLOCK - rows.start) // rows.step))
    return rows[begin:end]


def _part_on(array: jax.Array, device: jax.Device, group: Group) -> Array:
    """Return the rows that one of this process's devices holds."""
    part = np.asarray(next(s.data for s in array.addressable_shards if s.device == device))
    return part if part.ndim == 1 else part.reshape(-1, group.dim)
