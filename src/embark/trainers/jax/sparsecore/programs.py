"""The step with lookups and updates on SparseCores: small cores beside a TPU's matrix units that fetch rows from all
chips and sum them, and in the backward pass sum gradients and update rows. The rest is the ordinary program's.

Batches come as the ids that each core asks of every core, sorted, in buffers of one size: jax-tpu-embedding makes them
on the host, in C++, in the thread that makes batches ahead. Tables lie row after row, with nothing in between.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as Tiles
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from embark.data import Batch
from embark.model.jax_layout import Layout
from embark.spec import RunSpec
from embark.trainers.jax.exchange import AXIS
from embark.trainers.jax.prefetch import id_columns
from embark.trainers.jax.sparsecore.layout import Stacks, stacks_of
from embark.trainers.jax.step import Body, Programs, State, state_shapes, state_specs
from embark.trainers.jax.world import World

KINDS = ("pointers", "ids", "samples", "gains")  # By the library's order.
QUIET = 1  # The library writes how full its buffers are to stderr at batches of round numbers.


def make_programs(spec: RunSpec, layout: Layout, mesh: Mesh, precision: str) -> Programs:
    """Nothing is compiled before the first call."""
    body = _OnSparseCores(spec, layout, precision)
    specs, rows, replicated = state_specs(spec, layout), P(AXIS), P()
    mapped = partial(jax.shard_map, mesh=mesh, check_vma=False)
    train = mapped(body.train, in_specs=(specs, rows, replicated, replicated), out_specs=(specs, replicated))
    evaluate = mapped(body.evaluate, in_specs=(specs, rows), out_specs=(rows, replicated))
    # The compiler would lay tables out for the matrix units, and turn them over at every step.
    forms = jax.tree.map(lambda shape: shape.format, state_shapes(spec, layout, mesh))
    after = (forms, NamedSharding(mesh, P()))
    return Programs(jax.jit(train, donate_argnums=0, out_shardings=after), jax.jit(evaluate))


class _OnSparseCores(Body):
    """jax-tpu-embedding's two operations: one looks up, one updates rows."""

    def __init__(self, spec: RunSpec, layout: Layout, precision: str) -> None:
        from jax_tpu_embedding.sparsecore.lib.nn import embedding

        super().__init__(spec, layout, precision)
        self._library: Any = embedding
        self._features = stacks_of(layout, spec.train.batch_size, spec.train.optimizer, spec.train.eps).features
        self._counts = {"global_device_count": layout.num_devices, "num_sc_per_device": layout.cores}

    def _looked_up(self, state: State, batch: dict[str, Any]) -> tuple[list[jax.Array], Any, jax.Array]:
        requests = self._library.PreprocessedInput(
            self._library.SparseDenseMatmulInput(*(batch["requests"][kind] for kind in KINDS)),
            jnp.ones((1,), jnp.int32),
        )
        pooled = self._library.tpu_sparse_dense_matmul(requests, self._variables(state), self._features, **self._counts)
        return list(pooled), requests, batch["bad_table"].min()

    def _updated_tables(
        self, state: State, wanted: Any, grads: list[jax.Array], rate: jax.Array
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        updated = self._library.tpu_sparse_dense_matmul_grad(
            grads, wanted, self._variables(state), self._features, step=rate, **self._counts
        )
        return ({name: held.table for name, held in updated.items()},
                {name: held.slot[0] for name, held in updated.items() if held.slot})

    def _variables(self, state: State) -> dict[str, Any]:
        return {name: self._library.EmbeddingVariables(table, (state["slots"][name],) if state["slots"] else ())
                for name, table in state["tables"].items()}


def to_devices(batch: Batch, spec: RunSpec, layout: Layout, world: World, *, is_eval: bool = False) -> dict[str, Any]:
    """A process's part of a batch, shared by the cores of its devices."""
    num_local = len(world.local_devices)
    columns, bad_table = _checked(id_columns(batch, spec, layout), spec)
    arrays: dict[str, Any] = {
        "dense": batch.dense, "label": batch.label, "bad_table": np.full(num_local, bad_table, np.int32),
        "requests": _requests(columns, spec, layout, num_local),
    }
    if is_eval:
        arrays["valid"] = np.arange(len(batch.label)) < batch.num_samples
    return jax.tree.map(world.to_devices, arrays)


def batch_shapes(spec: RunSpec, layout: Layout, mesh: Mesh) -> dict[str, Any]:
    """What a batch of training is, on all devices."""
    shape = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P(AXIS)))
    size, num_devices = spec.train.batch_size, layout.num_devices
    stacks = _stacks(spec, layout)
    buffers = {name: num_devices * size for name, size in stacks.buffer_sizes.items()}
    sizes = {"pointers": dict.fromkeys(buffers, num_devices * stacks.row_pointers_size), "ids": buffers,
             "samples": buffers, "gains": buffers}
    requests = {kind: {name: shape((num,), np.float32 if kind == "gains" else np.int32)
                    for name, num in sizes[kind].items()} for kind in KINDS}
    return {
        "dense": shape((size, spec.model.num_dense), np.float32),
        "label": shape((size,), np.float32),
        "bad_table": shape((num_devices,), np.int32), "requests": requests,
    }


def _stacks(spec: RunSpec, layout: Layout) -> Stacks:
    return stacks_of(layout, spec.train.batch_size, spec.train.optimizer, spec.train.eps)


def _checked(columns: NDArray[np.int32], spec: RunSpec) -> tuple[list[NDArray[np.int32]], int]:
    """For each table its ids [b, multi_hot], those that are no row's made −1; and the first table that has one."""
    checked, at, bad_table = [], 0, len(spec.model.table_list())
    for number, table in enumerate(spec.model.table_list()):
        ids = columns[at : at + table.multi_hot].T
        is_bad = (ids < -1) | (ids >= table.rows)
        if is_bad.any():
            ids = np.where(is_bad, -1, ids)
            bad_table = min(bad_table, number)
        checked.append(np.ascontiguousarray(ids))
        at += table.multi_hot
    return checked, bad_table


def _requests(
    columns: list[NDArray[np.int32]], spec: RunSpec, layout: Layout, num_local: int
) -> dict[str, dict[str, NDArray[Any]]]:
    from jax_tpu_embedding.sparsecore.lib.nn import embedding

    features = _stacks(spec, layout).features
    if all((ids >= 0).all() for ids in columns):
        made, _ = embedding.preprocess_sparse_dense_matmul_input(
            columns, None, features, num_local, layout.num_devices, num_sc_per_device=layout.cores, batch_number=QUIET
        )
    else:
        places = [np.argwhere(ids >= 0) for ids in columns]
        made, _ = embedding.preprocess_sparse_dense_matmul_input_from_sparse_tensor(
            places, [ids[ids >= 0] for ids in columns], [np.array(ids.shape) for ids in columns], features, num_local,
            layout.num_devices, num_sc_per_device=layout.cores, batch_number=QUIET,
        )
    return {kind: dict(by_stack) for kind, by_stack in zip(KINDS, made.sparse_dense_matmul_input, strict=True)}


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
