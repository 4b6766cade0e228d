"""The dense layers of DLRM and DLRM-DCNv2, over torch's own names and shapes of weights."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from embark.features.arrays import Floats
from embark.model.work import layers_of
from embark.spec import ModelSpec, Table, TrainSpec

Weights = Mapping[str, jax.Array]


def logits_of(
    model: ModelSpec, precision: str, weights: Weights, dense: jax.Array, pooled: list[jax.Array]
) -> jax.Array:
    """Return logits [b] in fp32 from dense features [b, num_dense] and one pooled vector [b, dim] for each table."""
    network = _Network(weights, precision)
    first = network.mlp("bottom", dense, len(model.bottom_mlp) + 1, ends_linear=False) if model.num_dense else None
    wide = _crossed(network, model, first, pooled) if model.kind == "dcnv2" else _dotted(network, first, pooled)
    top = network.mlp("top", wide, len(model.top_mlp) + 1, ends_linear=True)
    return top[:, 0].astype(jnp.float32)


def _dotted(network: _Network, first: jax.Array | None, pooled: list[jax.Array]) -> jax.Array:
    """Return the vectors that are passed on, and the dot products of all pairs."""
    vectors = jnp.stack(pooled if first is None else [first, *(p.astype(first.dtype) for p in pooled)], axis=1)
    passed_on = vectors.reshape(vectors.shape[0], -1) if first is None else first
    num_vectors = vectors.shape[1]
    if num_vectors == 1:
        return passed_on
    vectors = vectors.astype(network.dtype)
    cells = jnp.einsum("bid,bjd->bij", vectors, vectors, precision=network.matmul)
    rows, columns = np.triu_indices(num_vectors, 1)
    dots = cells.reshape(cells.shape[0], -1)[:, rows * num_vectors + columns]
    return jnp.concatenate([passed_on.astype(dots.dtype), dots], axis=1)


def _crossed(network: _Network, model: ModelSpec, first: jax.Array | None, pooled: list[jax.Array]) -> jax.Array:
    parts = pooled if first is None else [first.astype(jnp.float32), *pooled]
    start = jnp.concatenate(parts, axis=1)
    crossed = start
    for layer in range(model.num_cross_layers):
        low = network.linear(f"down.{layer}", crossed, has_bias=False)
        crossed = start * network.linear(f"up.{layer}", low) + crossed
    return crossed


class _Network:
    """Linear layers in one precision."""

    def __init__(self, weights: Weights, precision: str) -> None:
        self._weights = weights
        self.dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
        # A TPU's matrix units round fp32 to bf16 unless they are told not to.
        self.matmul = {"fp32": jax.lax.Precision.HIGHEST, "tf32": jax.lax.Precision.HIGH}.get(precision)

    def mlp(self, name: str, x: jax.Array, num_layers: int, *, ends_linear: bool) -> jax.Array:
        for layer in range(num_layers):
            x = self.linear(f"{name}.{2 * layer}", x)
            if not (ends_linear and layer == num_layers - 1):
                x = jax.nn.relu(x)
        return x

    def linear(self, name: str, x: jax.Array, *, has_bias: bool = True) -> jax.Array:
        weight = self._weights[f"{name}.weight"].astype(self.dtype)
        y = jnp.einsum("bi,oi->bo", x.astype(self.dtype), weight, precision=self.matmul)
        return y + self._weights[f"{name}.bias"].astype(self.dtype) if has_bias else y


BETA1, BETA2 = 0.9, 0.999


def row_state(train: TrainSpec) -> str:
    """Name the state that is kept for a row: `rows`, as many numbers as the row has; `numbers`, one; or nothing."""
    return {"adagrad": "rows", "rowwise_adagrad": "numbers"}.get(train.optimizer, "")


def row_steps(
    train: TrainSpec, state: jax.Array | None, grads: jax.Array, rate: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Return what to add to rows [n, dim] and to their state, [n] or [n, dim].

    `grads` are sums over a batch, all in fp32.
    """
    if state is None:
        return -rate * grads, None
    added = jnp.square(grads)
    if train.optimizer == "rowwise_adagrad":
        added = jnp.mean(added, axis=1)
        return grads * (-rate / (jnp.sqrt(state + added) + train.eps))[:, None], added
    return -rate * (grads / (jnp.sqrt(state + added) + train.eps)), added


def update_dense(
    train: TrainSpec, weight: jax.Array, state: tuple[jax.Array, ...], grad: jax.Array, rate: jax.Array,
    step: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return a weight and its state after step number `step`, counted from 0."""
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


ROWS_PER_BLOCK = 65_536  # Each block of a table has a generator of its own, so that any part of it can be drawn alone.


def initial_rows(table: Table, block: int, seed: int) -> Floats:
    """Draw the rows of one block, uniform in ±`init_range`."""
    start, stop = block * ROWS_PER_BLOCK, min((block + 1) * ROWS_PER_BLOCK, table.rows)
    bits = _Bits(zlib.crc32(f"{seed}/{table.name}/{block}".encode()))
    bound = math.sqrt(1 / table.rows) if table.init_range is None else table.init_range
    return bits.uniform((stop - start, table.dim or 0), bound)


def initial_dense(model: ModelSpec, seed: int) -> dict[str, Floats]:
    """Draw the dense layers' weights and biases in torch's order, by torch's names."""
    bits = _Bits(seed)
    values: dict[str, Floats] = {}
    for name, (num_out, num_in), has_bias in dense_shapes(model):
        # torch: kaiming_uniform_(a=sqrt(5)) of the weight; its bound comes to that of the bias, by other roundings.
        std = math.sqrt(2.0 / (1 + math.sqrt(5) ** 2)) / math.sqrt(num_in)
        values[f"{name}.weight"] = bits.uniform((num_out, num_in), math.sqrt(3.0) * std)
        if has_bias:
            values[f"{name}.bias"] = bits.uniform((num_out,), 1 / math.sqrt(num_in))
    return values


def dense_shapes(model: ModelSpec) -> list[tuple[str, tuple[int, int], bool]]:
    """List every linear layer by torch's name: its outputs and inputs, and whether it has a bias."""
    layers = layers_of(model)
    # In an MLP a ReLU follows each linear layer, and is counted.
    return [(f"{name}.{spacing * number}", (layer.num_out, layer.num_in), layer.has_bias)
            for name, spacing, part in (("bottom", 2, layers.bottom), ("down", 1, layers.down), ("up", 1, layers.up),
                                        ("top", 2, layers.top))
            for number, layer in enumerate(part)]


class _Bits:
    """Random numbers of torch's generator on a CPU."""

    def __init__(self, seed: int) -> None:
        twister: Any = np.random.MT19937()
        twister._legacy_seeding(seed & 0xFFFFFFFF)
        self._generator = np.random.Generator(twister)

    def uniform(self, shape: tuple[int, ...], bound: float) -> Floats:
        low, high = np.float32(-bound), np.float32(bound)
        bits = self._generator.integers(0, 0xFFFFFFFF, shape, np.uint32, endpoint=True)
        unit = (bits & 0xFFFFFF) * (1.0 / (1 << 24))
        unit *= np.float64(high - low)
        unit += np.float64(low)
        return unit.astype(np.float32)
