"""From numpy batches to what SparseCores read: for each core the ids it asks of every core, sorted, in buffers of one
size. jax-tpu-embedding does it on the host, in C++, in the thread that makes batches ahead."""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from embark.data import Batch
from embark.model.jax_layout import Layout
from embark.spec import RunSpec
from embark.trainers.jax.exchange import AXIS
from embark.trainers.jax.prefetch import id_columns
from embark.trainers.jax.sparsecore.layout import Stacks, stacks_of
from embark.trainers.jax.world import World

KINDS = ("pointers", "ids", "samples", "gains")
"""By the library's order."""
QUIET = 1
"""The library writes how full its buffers are to stderr at batches of round numbers."""


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
