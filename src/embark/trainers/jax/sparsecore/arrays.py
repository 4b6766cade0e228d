"""Arrays as SparseCores want them: rows one after another, nothing between them."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as Tiles
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from embark.trainers.jax.exchange import AXIS
from embark.trainers.jax.world import World


def table_format(mesh: Mesh) -> Any:
    """How SparseCores want their rows: one after another, nothing between them."""
    sharding = NamedSharding(mesh, P(AXIS))
    if mesh.devices.flat[0].platform != "tpu":
        return sharding
    return Format(Tiles(major_to_minor=(0, 1), tiling=((8,),)), sharding)


@lru_cache
def cut_rows(mesh: Mesh, cores: int, num_rows: int) -> Callable[..., jax.Array]:
    """`num_rows` of every core from a row on, zeros behind its last. They are cut out of the numbers one after another,
    which is how they lie: for rows the compiler would first lay the whole table out anew."""

    def cut(array: jax.Array, begin: jax.Array) -> jax.Array:
        per_core, width = array.shape[0] // cores, array.shape[1]
        num_cut = min(num_rows, per_core)
        start = jnp.minimum(begin, per_core - num_cut)
        places = jnp.arange(num_rows, dtype=jnp.int32) + begin - start
        parts = []
        for core in range(cores):
            first = (core * per_core + start) * width
            rows = jax.lax.dynamic_slice_in_dim(array.reshape(-1), first, num_cut * width).reshape(num_cut, width)
            parts.append(rows.at[places].get(mode="fill", fill_value=0))
        return jnp.concatenate(parts)

    return jax.jit(jax.shard_map(cut, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS), check_vma=False))


def lay_out(held: dict[int, NDArray[Any]], shape: jax.ShapeDtypeStruct, world: World, block_bytes: int) -> jax.Array:
    """Into an array that lies as SparseCores want it, a block of every device at a time: turned over as a whole, it
    would need the memory of several."""
    rows = next(iter(held.values()))
    num_rows = min(len(rows), max(1, block_bytes // rows[0].nbytes))
    array = _empty_rows(shape.shape, shape.format)()
    write = _writing(world.mesh, shape.format)
    for start in range(0, len(rows), num_rows):
        begin = min(start, len(rows) - num_rows)
        parts = [jax.device_put(held[at][begin : begin + num_rows].reshape(-1), device)
                 for at, device in world.local_devices]
        block_shape = (world.num_devices * num_rows * shape.shape[1],)
        array = write(array, jax.make_array_from_single_device_arrays(block_shape, world.rows, parts), begin)
    return array


@lru_cache
def _empty_rows(shape: tuple[int, ...], form: Any) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=form)


@lru_cache
def _writing(mesh: Mesh, form: Any) -> Callable[..., jax.Array]:
    """Rows of every device from one on, in place: as numbers one after another, like `cut_rows`."""

    def written(array: jax.Array, block: jax.Array, begin: jax.Array) -> jax.Array:
        flat = jax.lax.dynamic_update_slice_in_dim(array.reshape(-1), block, begin * array.shape[1], axis=0)
        return flat.reshape(array.shape)

    mapped = jax.shard_map(written, mesh=mesh, in_specs=(P(AXIS), P(AXIS), P()), out_specs=P(AXIS), check_vma=False)
    return jax.jit(mapped, donate_argnums=0, out_shardings=form)
