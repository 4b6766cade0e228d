"""SparseCores in plain JAX: what jax-tpu-embedding says its two operations do, read from the buffers it makes for them.

Its operations only exist on a TPU. Here a core goes through its ids as a core does: for each core the ids it asks of
it, each with a sample and a gain, whose rows it fetches, weighs and adds up; and on the way back the owner of a row
adds up what all cores send for it, and the rows that were touched go through the program that a core would run.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax_tpu_embedding.sparsecore.lib.core.primitives import (
    sparse_dense_matmul_csr,
    sparse_dense_matmul_grad_with_sgd,
    sparse_dense_matmul_optimizer_grad,
)

from embark.spec import TrainSpec
from embark.trainers.jax.exchange import AXIS
from embark.trainers.jax.sparsecore.layout import CORES, _adagrad

NUM_CORES = 2


def install(monkeypatch: Any) -> None:
    """Give every device of a CPU two of them."""
    monkeypatch.setitem(CORES, "cpu", NUM_CORES)
    for module, name, call in (
        (sparse_dense_matmul_csr, "tpu_sparse_dense_matmul_csr_primitive", looked_up),
        (sparse_dense_matmul_grad_with_sgd, "tpu_sparse_dense_matmul_grad_with_sgd_primitive", moved_by_sgd),
        (sparse_dense_matmul_optimizer_grad, "tpu_sparse_dense_matmul_optimizer_grad_primitive", moved_by_program),
    ):
        monkeypatch.setattr(module, name, type("Emulated", (), {"bind": staticmethod(call)}))


def looked_up(pointers, ids, samples, gains, _, table, *, device_batch_size, **limits):
    rows, bags, weights, _ = entries(pointers, ids, samples, gains, table, device_batch_size, limits)
    everywhere = jax.lax.all_gather(table, AXIS, tiled=True)
    fetched = everywhere.at[rows].get(mode="fill", fill_value=0) * weights[:, None]
    return jax.ops.segment_sum(fetched, bags, device_batch_size)


def moved_by_sgd(pointers, ids, samples, gains, _, table, grads, rate, **limits):
    summed, touched = gradients(pointers, ids, samples, gains, table, grads, limits)
    return (jnp.where(touched, table - rate * summed, table),)


def moved_by_program(pointers, ids, samples, gains, _, grads, rate, table, state, **limits):
    summed, touched = gradients(pointers, ids, samples, gains, table, grads, limits)
    rows, states = _adagrad(TrainSpec().eps)(summed, table, state, rate)
    return jnp.where(touched, rows, table), jnp.where(touched, states, state)


def gradients(pointers, ids, samples, gains, table, grads, limits):
    """For each row of this device its summed gradient, and whether there was any."""
    rows, bags, weights, is_there = entries(pointers, ids, samples, gains, table, grads.shape[0], limits)
    sent = grads.at[bags].get(mode="fill", fill_value=0) * weights[:, None]
    num_rows = table.shape[0] * jax.lax.axis_size(AXIS)
    summed = jax.lax.psum_scatter(jax.ops.segment_sum(sent, rows, num_rows), AXIS, tiled=True)
    count = jax.lax.psum_scatter(jax.ops.segment_sum(is_there.astype(jnp.float32), rows, num_rows), AXIS, tiled=True)
    return summed, (count > 0)[:, None]


def entries(pointers, ids, samples, gains, table, num_bags, limits):
    """Every id in a device's buffers: its row among those of all devices, its bag, its gain; beyond the last where a
    place is empty. More ids than the limits that the program was compiled for would be lost on a chip: here they are
    none's, and the test fails."""
    num_cores = NUM_CORES * jax.lax.axis_size(AXIS)
    per_core = len(ids) // NUM_CORES
    place = jnp.arange(len(ids), dtype=jnp.int32)
    core, within = place // per_core, place % per_core
    ends = pointers.reshape(NUM_CORES, -1)[:, :num_cores]
    begins = jnp.concatenate([jnp.zeros((NUM_CORES, 1), jnp.int32), (ends[:, :-1] + 7) // 8 * 8], axis=1)
    is_of = (within[:, None] >= begins[core]) & (within[:, None] < ends[core])
    owner = jnp.argmax(is_of, axis=1)
    is_there = is_of.any(axis=1) & (within - begins[core, owner] < limits["max_ids_per_partition"])
    rows_per_core = table.shape[0] // NUM_CORES
    rows = jnp.where(is_there, owner * rows_per_core + ids, num_cores * rows_per_core)
    bags = jnp.where(is_there, core * (num_bags // NUM_CORES) + samples, num_bags)
    return rows, bags, jnp.where(is_there, gains, 0), is_there
