"""The step with lookups and updates on SparseCores: small cores beside a TPU's matrix units that fetch rows from all
chips and sum them, and in the backward pass sum gradients and update rows. The rest is the ordinary program's.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from embark.model.jax_layout import Layout
from embark.spec import RunSpec
from embark.trainers.jax.exchange import AXIS
from embark.trainers.jax.sparsecore.feed import KINDS
from embark.trainers.jax.sparsecore.layout import stacks_of
from embark.trainers.jax.step import Body, Programs, State, state_shapes, state_specs


def make_programs(spec: RunSpec, layout: Layout, mesh: Mesh, precision: str) -> Programs:
    """Nothing is compiled before the first call."""
    body = _OnSparseCores(spec, layout, precision)
    specs, rows, replicated = state_specs(spec, layout), P(AXIS), P()
    mapped = partial(jax.shard_map, mesh=mesh, check_vma=False)
    train = mapped(body.train, in_specs=(specs, rows, replicated, replicated), out_specs=(specs, replicated))
    evaluate = mapped(body.evaluate, in_specs=(specs, rows, rows), out_specs=(rows, replicated))
    # The compiler would lay tables out for the matrix units, and turn them over at every step.
    forms = jax.tree.map(lambda shape: shape.format, state_shapes(spec, layout, mesh))
    after = (forms, NamedSharding(mesh, P()))
    return Programs(jax.jit(train, donate_argnums=0, out_shardings=after), jax.jit(evaluate, donate_argnums=1))


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
