"""The dense layers of DLRM and DLRM-DCNv2, over torch's own names and shapes of weights."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from embark.spec import ModelSpec

Weights = Mapping[str, jax.Array]


def logits_of(
    model: ModelSpec, precision: str, weights: Weights, dense: jax.Array, pooled: list[jax.Array]
) -> jax.Array:
    """[b] in fp32, from dense features [b, num_dense] and one pooled vector [b, dim] for each table."""
    network = _Network(weights, precision)
    first = network.mlp("bottom", dense, len(model.bottom_mlp) + 1, ends_linear=False) if model.num_dense else None
    wide = _crossed(network, model, first, pooled) if model.kind == "dcnv2" else _dotted(network, first, pooled)
    top = network.mlp("top", wide, len(model.top_mlp) + 1, ends_linear=True)
    return top[:, 0].astype(jnp.float32)


def _dotted(network: _Network, first: jax.Array | None, pooled: list[jax.Array]) -> jax.Array:
    """What is passed on, and the dots of all pairs."""
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
