"""Whether SparseCores serve a run, where rows lie for them, and the same in the words of jax-tpu-embedding.

Tables of one width and pooling are stacked: one array of which every core has a part, dealt out as the ordinary path
deals rows out to devices. As many lie together as keep within what a core can ask of another even if all ids of a batch
go to one: so no batch is ever too much, and hosts need not agree about any.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

from embark.errors import MissingPackage, Mistake, SpecError, UserError
from embark.model.jax_layout import MAX_ROWS, Group, Layout, TablePlacement
from embark.spec import RunSpec, Table

CORES = {"TPU v5": 4, "TPU v5p": 4, "TPU v6e": 2, "TPU v6 lite": 2, "TPU7x": 2}
"""SparseCores of a chip, by JAX's name of the chip. v5e has none, and v4's take other programs."""
MAX_IDS = 4096
"""That one core may ask of another at a time, for all tables that lie together: what a core's own memory holds. The
compiler counts 48 bytes an id, of 256 KiB."""
WIDTHS = range(8, 129, 8)  # Numbers in a row: whole eighths of a line. Wider rows were not tried.
OPTIMIZERS = ("sgd", "adagrad")


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and why."""

    cores: int  # Of each chip; 0 where the ordinary path is taken.
    reason: str
    """Why not, where a chip has cores that are left idle; what serves, where they are not. Empty where it has none."""


def choose_cores(spec: RunSpec, device_kind: str, num_devices: int) -> Choice:
    """By `train.sparsecore`: `on` refuses to run without them."""
    wanted = spec.train.sparsecore
    if wanted == "off":
        return Choice(0, 'SparseCores are left idle: train.sparsecore = "off"' if device_kind in CORES else "")
    cores = CORES.get(device_kind, 0)
    if wanted == "auto" and not cores:
        return Choice(0, "")
    obstacle = f"{device_kind} has none" if not cores else _obstacle(spec, num_devices, cores)
    is_installed = find_spec("jax_tpu_embedding") is not None
    if wanted == "on":
        if obstacle:
            raise SpecError([Mistake("", "train.sparsecore", "on", f"cannot be: {obstacle}",
                                     'use "auto", which takes SparseCores where it can')])
        if not is_installed:
            raise MissingPackage('train.sparsecore = "on" needs jax-tpu-embedding, which is not installed',
                                 fix="pip install 'embark-rec[sparsecore]'")
    if not obstacle and not is_installed:
        obstacle = "jax-tpu-embedding is not installed: pip install 'embark-rec[sparsecore]'"
    if obstacle:
        return Choice(0, f"SparseCores are left idle: {obstacle}")
    return Choice(cores, f"{cores} SparseCores of each chip look up and update the rows of tables")


def _obstacle(spec: RunSpec, num_devices: int, cores: int) -> str:
    """What of the run they cannot do."""
    train, tables = spec.train, spec.model.table_list()
    if train.optimizer == "rowwise_adagrad":
        return ("row-wise Adagrad needs the mean of a row's squares, and a SparseCore's update goes number by number "
                "(train.optimizer = \"adagrad\" or \"sgd\" can be done)")
    if train.optimizer not in OPTIMIZERS:
        return f'train.optimizer = "{train.optimizer}" is not one of theirs'
    for field, value, able in (("table_dtype", train.table_dtype, ("fp32",)),
                               ("comms_dtype", train.comms_dtype, ("fp32",)),
                               ("sharding", train.sharding, ("auto", "row_wise"))):
        if value not in able:
            return f'train.{field} = "{value}" is not theirs'
    num_cores = num_devices * cores
    if num_cores & (num_cores - 1):
        return f"{num_cores} cores are not a power of two"
    if train.batch_size % (8 * num_cores):
        return f"train.batch_size = {train.batch_size} is not a multiple of 8 for each of {num_cores} cores"
    wrong = next((t for t in tables if t.dim not in WIDTHS), None)
    if wrong:
        return f"rows of {wrong.dim} numbers (table {wrong.name}); theirs are multiples of 8 up to {WIDTHS[-1]}"
    most = max(tables, key=lambda t: t.multi_hot)
    num_ids = train.batch_size // num_cores * most.multi_hot
    if num_ids > MAX_IDS:
        return (f"{num_ids:,} ids of table {most.name} for each core in a batch are more than the {MAX_IDS:,} that it "
                "can take (a smaller train.batch_size or more chips)")
    return ""


ROWS_TOGETHER = 8  # Of a table on each core, rounded up to.


@dataclass(frozen=True, slots=True)
class Stacks:
    """A layout as jax-tpu-embedding wants it."""

    features: list[Any]  # One `FeatureSpec` a table, in the order of the model.
    row_pointers_size: int  # Of the numbers that say where a core's ids for each core begin, for one device.
    buffer_sizes: dict[str, int]  # For the ids of one device, by stack.


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
        places.append(TablePlacement(tables[feature], feature, True, number * cores % num_parts, filled, num_rows))
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
