"""Where rows lie for SparseCores, and the same in the words of jax-tpu-embedding.

Tables of one width and pooling are stacked: one array of which every core has a part, dealt out as the ordinary path
deals rows out to devices. As many lie together as keep within what a core can ask of another even if all ids of a batch
go to one: so no batch is ever too much, and hosts need not agree about any.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from embark.errors import UserError
from embark.model.jax_layout import MAX_ROWS, Group, Layout, Place
from embark.spec import RunSpec, Table
from embark.trainers.jax.sparsecore.selection import MAX_IDS

ROWS_TOGETHER = 8
"""Of a table on each core, rounded up to."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """A layout as jax-tpu-embedding wants it."""

    features: list[Any]
    """One `FeatureSpec` a table, in the order of the model."""
    row_pointers_size: int
    """Of the numbers that say where a core's ids for each core begin, for one device."""
    buffer_sizes: dict[str, int]
    """For the ids of one device, by stack."""


def make_stacks(spec: RunSpec, num_devices: int, cores: int) -> Layout:
    """All tables over all cores."""
    tables = spec.model.table_list()
    starts = [sum(t.multi_hot for t in tables[:f]) for f in range(len(tables))]
    per_core = spec.train.batch_size // (num_devices * cores)
    groups = []
    for form in sorted({(t.dim or 0, t.pooling) for t in tables}):
        stack: list[int] = []
        for feature in (f for f, t in enumerate(tables) if (t.dim, t.pooling) == form):
            if stack and per_core * sum(tables[f].multi_hot for f in (*stack, feature)) > MAX_IDS:
                groups.append(_group(stack, tables, starts, num_devices, cores))
                stack = []
            stack.append(feature)
        groups.append(_group(stack, tables, starts, num_devices, cores))
    return Layout(tuple(groups), num_devices, sum(t.multi_hot for t in tables))


def _group(features: list[int], tables: tuple[Table, ...], starts: list[int], num_devices: int, cores: int) -> Group:
    num_parts, filled = num_devices * cores, 0
    places = []
    for number, feature in enumerate(features):
        num_rows = -(-tables[feature].rows // (num_parts * ROWS_TOGETHER)) * ROWS_TOGETHER
        places.append(Place(tables[feature], feature, True, number * cores % num_parts, filled, num_rows))
        filled += num_rows
    if filled * num_parts > MAX_ROWS:
        raise UserError(f"{filled * num_parts:,} rows that lie together are more than 32 bits can number",
                        fix='train.sparsecore = "off"')
    columns = [starts[f] + hot for f in features for hot in range(tables[f].multi_hot)]
    place_of_column = [i for i, f in enumerate(features) for _ in range(tables[f].multi_hot)]
    return Group(tuple(places), tables[features[0]].dim or 0, filled * cores, 1, tuple(columns),
                 tuple(place_of_column), cores)


@lru_cache(maxsize=8)
def stacks_of(layout: Layout, batch_size: int, optimizer: str, eps: float) -> Stacks:
    """The same layout in the library's words: it would stack tables by itself, but then a batch might be too much."""
    from jax_tpu_embedding.sparsecore.lib.nn import embedding

    num_devices, cores = layout.num_devices, layout.cores
    features: dict[int, Any] = {}
    for group in layout.groups:
        features |= _features(group, num_devices, batch_size, _optimizer(optimizer, eps))
    ordered = [features[number] for number in sorted(features)]
    return Stacks(
        ordered,
        embedding.compute_row_pointers_size_per_device(global_device_count=num_devices, num_sc_per_device=cores),
        embedding.compute_coo_buffer_size_per_device(ordered, num_devices, num_sc_per_device=cores),
    )


def _features(group: Group, num_devices: int, batch_size: int, optimizer: Any) -> dict[int, Any]:
    from jax_tpu_embedding.sparsecore.lib.nn import embedding_spec as lib

    num_parts = num_devices * group.cores
    max_ids = _up(batch_size // num_parts * len(group.columns))
    # A core's ids for each core begin at a multiple of 8.
    buffer_size = min(max_ids + ROWS_TOGETHER * num_parts, max_ids * num_parts) * group.cores
    limits = {"max_ids_per_partition": max_ids, "max_unique_ids_per_partition": min(max_ids, group.rows_per_part),
              "suggested_coo_buffer_size_per_device": buffer_size}
    stack = lib.StackedTableSpec(
        stack_name=group.name, stack_vocab_size=group.rows_per_part * num_parts, stack_embedding_dim=group.dim,
        optimizer=optimizer, combiner=group.places[0].table.pooling,
        total_sample_count=batch_size * len(group.places), **limits,
    )
    found = {}
    for number, place in enumerate(group.places):
        table = lib.TableSpec(
            name=place.table.name, vocabulary_size=place.table.rows, embedding_dim=group.dim,
            initializer=jax.nn.initializers.zeros, optimizer=optimizer, combiner=place.table.pooling, **limits,
        )
        table.setting_in_stack = lib.TableSettingInStack(
            stack_name=group.name, padded_vocab_size=place.num_rows * num_parts, padded_embedding_dim=group.dim,
            row_offset_in_shard=place.first_row, shard_rotation=place.shift,
        )
        table.stacked_table_spec = stack
        feature = lib.FeatureSpec(name=place.table.name, table_spec=table, output_shape=(batch_size, group.dim),
                                  input_shape=(batch_size, place.table.multi_hot))
        feature.id_transformation = lib.FeatureIdTransformation(
            row_offset=number * batch_size, col_offset=place.first_row * num_parts, col_shift=place.shift,
        )
        found[place.feature] = feature
    return found


def _optimizer(name: str, eps: float) -> Any:
    """The library hands what it is given as a step to whatever tells the rate: it is given the rate."""
    from jax_tpu_embedding.sparsecore.lib.nn import embedding_spec as lib

    if name == "sgd":
        return lib.SGDOptimizerSpec(learning_rate=_itself)
    return lib.CustomOptimizerSpec(
        learning_rate=_itself, custom_computation_fn=_adagrad(eps), short_name_str="adagrad",
        slot_variable_initializers_tuple=(jax.nn.initializers.zeros,),
    )


def _itself(rate: jax.Array) -> jax.Array:
    return rate


def _adagrad(eps: float) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The library's own has no term that keeps the denominator from zero, so that a first gradient of 0 would make a
    row NaN."""

    def moved(grad: jax.Array, row: jax.Array, state: jax.Array, rate: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = state + grad * grad
        return row - rate * (grad / (jnp.sqrt(total) + eps)), total

    return moved


def _up(number: int) -> int:
    return -(-number // 8) * 8
