"""The whole step as one program over all devices: lookup, dense layers there and back, both updates, metrics."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from embark.features.arrays import Array, Doubles
from embark.model.jax_layout import Layout
from embark.model.work import DENSE_STATES
from embark.run.evaluation import LARGEST_LOGIT, NUM_BINS, metrics_of
from embark.spec import RunSpec
from embark.values import JsonDict, frozen
from .exchange import AXIS, BATCH_AXES, Exchange, WantedRows, samples_on
from .network import dense_shapes, logits_of, row_state, update_dense

State = JsonDict
"""`tables` and `slots` by group, `dense` and `dense_state` by weight, and the histograms `counts`."""


@frozen
class Programs:
    """The compiled programs of a run."""

    train: Callable[..., tuple[State, dict[str, jax.Array]]]
    """(state, batch, rates, step) to the state after it, and what the host should know. It consumes the state."""
    evaluate: Callable[..., tuple[jax.Array, jax.Array]]
    """(state, batch) to the batch's logits, and its sums."""


def make_programs(spec: RunSpec, layout: Layout, capacities: tuple[int, ...], mesh: Mesh, precision: str) -> Programs:
    """Make the programs of a run; nothing is compiled before the first call."""
    body = _Step(spec, layout, capacities, precision)
    specs = jax.tree.map(lambda shape: shape.sharding.spec, state_shapes(spec, layout, mesh))
    rows, replicated = P(AXIS), P()
    mapped = partial(jax.shard_map, mesh=mesh, check_vma=False)
    batch = {name: samples_on(BATCH_AXES[name]) for name in ("dense", "ids", "label")}
    seen = batch | {"valid": samples_on(BATCH_AXES["valid"])}
    train = mapped(body.train, in_specs=(specs, batch, replicated, replicated), out_specs=(specs, replicated))
    evaluate = mapped(body.evaluate, in_specs=(specs, seen), out_specs=(rows, replicated))
    return Programs(jax.jit(train, donate_argnums=0), jax.jit(evaluate))


def state_shapes(spec: RunSpec, layout: Layout, mesh: Mesh) -> State:
    """Return shapes, types and shardings of the state, without memory."""
    def shape(size: tuple[int, ...], dtype: Any, axes: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, axes))

    num_devices = layout.num_devices
    dtype = jnp.float16 if spec.train.table_dtype == "fp16" else jnp.float32
    tables, slots = {}, {}
    for group in layout.groups:
        lines = (num_devices * group.lines_per_device, group.width)
        tables[group.name] = shape(lines, dtype, P(AXIS))
        kept = row_state(spec.train)
        if kept:
            form = lines if kept == "rows" else (num_devices * group.rows_per_device,)
            slots[group.name] = shape(form, jnp.float32, P(AXIS))
    dense = {name: shape(size, jnp.float32, P()) for name, size in weight_shapes(spec).items()}
    num_states = len(DENSE_STATES[spec.train.dense_optimizer])
    return {
        "tables": tables, "slots": slots, "dense": dense,
        "dense_state": {name: (weight,) * num_states for name, weight in dense.items()},
        "counts": shape((num_devices * 2 * NUM_BINS,), jnp.int32, P(AXIS))
    }


def weight_shapes(spec: RunSpec) -> dict[str, tuple[int, ...]]:
    """List the shapes of all weights and biases of the dense layers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape, has_bias in dense_shapes(spec.model):
        shapes[f"{name}.weight"] = shape
        if has_bias:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


class _Step:
    """The computations of one device in a step; every method runs inside `shard_map`. Rows go between devices by an
    exchange."""

    def __init__(self, spec: RunSpec, layout: Layout, capacities: tuple[int, ...], precision: str) -> None:
        self._spec, self._layout, self._precision = spec, layout, precision
        self._exchanges = [
            Exchange(group, layout.num_devices, capacity, spec.train)
            for group, capacity in zip(layout.groups, capacities, strict=True)
        ]
        tables = spec.model.table_list()
        self._rows_of_column = np.array([t.rows for t in tables for _ in range(t.multi_hot)], np.int32)
        self._table_of_column = np.array([f for f, t in enumerate(tables) for _ in range(t.multi_hot)], np.int32)
        self._num_tables = len(tables)

    def train(
        self, state: State, batch: JsonDict, rates: jax.Array, step: jax.Array
    ) -> tuple[State, dict[str, jax.Array]]:
        spec = self._spec
        pooled, wanted, bad_table = self._looked_up(state, batch)

        def loss_of(dense: Any, pooled: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            logits = logits_of(spec.model, self._precision, dense, batch["dense"], pooled)
            return losses(logits, batch["label"]).sum() / spec.train.batch_size, logits

        grads, logits = jax.grad(loss_of, argnums=(0, 1), has_aux=True)(state["dense"], pooled)
        tables, slots = self._updated_tables(state, wanted, grads[1], rates[0])
        dense, dense_state = self._updated_dense(state, jax.lax.psum(grads[0], AXIS), rates[1], step)
        counts = counted(state["counts"], logits, batch["label"])
        outputs = {
            "sums": jax.lax.psum(sums_of(logits, batch["label"], None), AXIS),
            "bad_table": jax.lax.pmin(bad_table, AXIS),
            "has_bad_loss": jax.lax.pmax(jnp.any(~jnp.isfinite(logits)).astype(jnp.int32), AXIS)
        }
        return {"tables": tables, "slots": slots, "dense": dense, "dense_state": dense_state, "counts": counts}, outputs

    def evaluate(self, state: State, batch: JsonDict) -> tuple[jax.Array, jax.Array]:
        pooled, _, _ = self._looked_up(state, batch)
        logits = logits_of(self._spec.model, self._precision, state["dense"], batch["dense"], pooled)
        return logits, jax.lax.psum(sums_of(logits, batch["label"], batch["valid"]), AXIS)

    def _looked_up(self, state: State, batch: JsonDict) -> tuple[list[jax.Array], list[WantedRows], jax.Array]:
        """Return one vector [b, dim] for each table, what their update will need, and the first table with a bad id."""
        ids, bad_table = self._checked(batch["ids"].T)
        wanted = self._wanted(ids)
        return self._pooled(state, wanted), wanted, bad_table

    def _checked(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Replace ids outside their table by −1, which looks nothing up; also return the first table that has one."""
        is_bad = (ids < -1) | (ids >= self._rows_of_column)
        first = jnp.where(is_bad, self._table_of_column, self._num_tables).min()
        return jnp.where(is_bad, -1, ids), first.astype(jnp.int32)

    def _wanted(self, ids: jax.Array) -> list[WantedRows]:
        groups = self._layout.groups
        return [
            exchange.wanted(ids if len(groups) == 1 else ids[:, np.array(group.columns)])
            for group, exchange in zip(groups, self._exchanges, strict=True)
        ]

    def _pooled(self, state: State, wanted: list[WantedRows]) -> list[jax.Array]:
        """Return one vector [b, dim] for each table, in the order of the model."""
        found: dict[int, jax.Array] = {}
        for group, exchange, one in zip(self._layout.groups, self._exchanges, wanted, strict=True):
            rows = exchange.fetch((state["tables"][group.name], None), one)
            vectors = exchange.pooled(rows, one)
            found |= {place.feature: vector for place, vector in zip(group.places, vectors, strict=True)}
        return [found[feature] for feature in sorted(found)]

    def _updated_tables(
        self, state: State, wanted: list[WantedRows], grads: list[jax.Array], rate: jax.Array
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        tables, slots = {}, {}
        for group, exchange, one in zip(self._layout.groups, self._exchanges, wanted, strict=True):
            held = (state["tables"][group.name], state["slots"].get(group.name))
            summed = exchange.summed([grads[place.feature] for place in group.places], one)
            table, slot = exchange.update(held, one, summed, rate)
            tables[group.name] = table
            if slot is not None:
                slots[group.name] = slot
        return tables, slots

    def _updated_dense(
        self, state: State, grads: dict[str, jax.Array], rate: jax.Array, step: jax.Array
    ) -> tuple[dict[str, jax.Array], dict[str, tuple[jax.Array, ...]]]:
        weights, states = {}, {}
        for name, weight in state["dense"].items():
            weights[name], states[name] = update_dense(
                self._spec.train, weight, state["dense_state"][name], grads[name], rate, step
            )
        return weights, states


MAX_WAITING = 256  # Steps whose sums may wait on the devices before they are added up.


def losses(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Return the log loss of each sample, [b]."""
    return jnp.maximum(logits, 0) - logits * label + jnp.log1p(jnp.exp(-jnp.abs(logits)))


def counted(counts: jax.Array, logits: jax.Array, label: jax.Array) -> jax.Array:
    """Add a device's samples to its histogram: those without a click, then those with one."""
    within = jnp.clip(jnp.nan_to_num(logits, nan=0.0), -LARGEST_LOGIT, LARGEST_LOGIT)
    bins = ((within + LARGEST_LOGIT) * (NUM_BINS / (2 * LARGEST_LOGIT))).astype(jnp.int32)
    bins = jnp.minimum(bins, NUM_BINS - 1) + label.astype(jnp.int32) * NUM_BINS
    return counts.at[bins].add(1)


def sums_of(logits: jax.Array, label: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Sum log loss, predicted clicks and clicks over a device's samples."""
    values = jnp.stack([losses(logits, label), jax.nn.sigmoid(logits), label])
    return (values if valid is None else jnp.where(valid, values, 0.0)).sum(axis=1)


class Window:
    """Predictions and labels counted since the last `take`. The histograms themselves are part of the step's state."""

    def __init__(self, fetch: Callable[[jax.Array], Array]) -> None:
        self._fetch = fetch
        self._base: Doubles = np.zeros(2 * NUM_BINS)  # Counts from a checkpoint, which no device has.
        self._sums: Doubles = np.zeros(3)
        self._num_samples = 0
        self._waiting: list[jax.Array] = []

    def add(self, sums: jax.Array, num_samples: int) -> None:
        """Count a step without waiting for the device."""
        self._waiting.append(sums)
        self._num_samples += num_samples
        if len(self._waiting) >= MAX_WAITING:
            self._settle()

    def sums(self) -> list[float]:
        """Return log loss, predicted clicks and clicks, summed over all devices."""
        self._settle()
        return [float(one) for one in self._sums]

    def state(self, counts: jax.Array) -> Doubles:
        """Return the window of all devices, for a checkpoint."""
        self._settle()
        return np.concatenate([self._base + self._on_devices(counts), self._sums, [self._num_samples]])

    def set_state(self, state: Doubles) -> None:
        """Resume from a checkpoint; the devices' histograms begin empty."""
        self._base, self._sums = state[: 2 * NUM_BINS].copy(), state[2 * NUM_BINS : -1].copy()
        self._num_samples = int(state[-1])

    def take(self, counts: jax.Array) -> dict[str, float]:
        """Return the metrics of all devices and start the window anew; the caller empties the histograms."""
        state = self.state(counts)
        self.set_state(np.zeros_like(state))
        return metrics_of(state)

    def _settle(self) -> None:
        for sums in self._waiting:
            self._sums += np.asarray(self._fetch(sums), np.float64)
        self._waiting.clear()

    def _on_devices(self, counts: jax.Array) -> Doubles:
        return np.asarray(self._fetch(counts), np.float64).reshape(-1, 2 * NUM_BINS).sum(axis=0)
