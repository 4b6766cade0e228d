"""What a gradient does to rows of tables and to dense layers: FBGEMM's and torch's own arithmetic."""

import math

import jax
import jax.numpy as jnp

from embark.spec import TrainSpec

BETA1, BETA2 = 0.9, 0.999
DENSE_STATES = {"sgd": (), "adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}
"""What each keeps for a weight, by torch's names."""


def row_state(train: TrainSpec) -> str:
    """What is kept for a row: `rows`, a number for each of its own; `numbers`, one; or nothing."""
    return {"adagrad": "rows", "rowwise_adagrad": "numbers"}.get(train.optimizer, "")


def row_steps(
    train: TrainSpec, state: jax.Array | None, grads: jax.Array, rate: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """What to add to rows [n, dim] and to their state, [n] or [n, dim]; `grads` are sums over a batch, all in fp32."""
    if state is None:
        return -rate * grads, None
    added = jnp.square(grads)
    if train.optimizer == "rowwise_adagrad":
        added = jnp.mean(added, axis=1)
        return grads * (-rate / (jnp.sqrt(state + added) + train.eps))[:, None], added
    return -rate * (grads / (jnp.sqrt(state + added) + train.eps)), added


def update_dense(
    train: TrainSpec, weight: jax.Array, state: tuple[jax.Array, ...], grad: jax.Array, rate: jax.Array,
    step: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """A weight and its state after step number `step`, counted from 0."""
    if train.dense_optimizer == "sgd":
        return weight - rate * grad, ()
    if train.dense_optimizer == "adagrad":
        total = state[0] + jnp.square(grad)
        return weight - rate * (grad / (jnp.sqrt(total) + train.eps)), (total,)
    mean, square = state
    mean = mean + (1 - BETA1) * (grad - mean)
    square = BETA2 * square + (1 - BETA2) * jnp.square(grad)
    count = (step + 1).astype(jnp.float32)
    # 1 − β^n, by way of expm1: at the first steps of β2 the plain form would lose three digits of fp32.
    bias1, bias2 = (-jnp.expm1(count * math.log(beta)) for beta in (BETA1, BETA2))
    return weight - rate / bias1 * (mean / (jnp.sqrt(square) / jnp.sqrt(bias2) + train.eps)), (mean, square)
