"""How the JAX trainer lays tables out: on which device each row lies, and in which row of what that device holds.

Tables of one width are one array, `[devices, rows, width]`, a part on each device. Row `i` of a table is on device
`(i + shift) % devices`: neighbours, of which the first are the most wanted where ids go by falling count, lie on all
devices, and the shift lets each table begin on another.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from embark.errors import Mistake, SpecError, UserError
from embark.spec import RunSpec, Table
from embark.values import JsonDict, frozen
from .engine_selection import regularization_of
from .placement import Placement, Shard, table_value_bytes
from .steps import samples_per_rank

MAX_ROWS = 2**31 - 2**24
"""The most rows of a group on all devices together: rows are numbered in 32 bits, and some numbers mean none."""
KINDS = ("dlrm", "dcnv2")
SHARDINGS = ("auto", "row_wise")
TABLE_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
HEADROOM = 1.25  # Factor over the number of rows that two devices are expected to exchange.
MAX_IN_FLIGHT = 8  # Steps that the host may be ahead of the devices; each has a batch on the device.
NUM_AHEAD = 2  # Batches on the devices that wait for their step.
LINE_WIDTHS = {"tpu": 128}  # Numbers in a line of memory, for kinds of devices that have lines.


@frozen
class TablePlacement:
    """The position of one table in its group."""

    table: Table
    feature: int  # Index among all tables.
    shift: int  # The device of row 0.
    first_row: int  # Index of the table's first row on each device.
    num_rows: int  # Rows that are reserved for the table on a device.

    def rows_on(self, device: int, num_devices: int) -> range:
        """Return the table's rows that lie on `device`, one after another from `first_row` on."""
        return range((device - self.shift) % num_devices, self.table.rows, num_devices)


@frozen
class Group:
    """Tables of one width, stored as one array."""

    places: tuple[TablePlacement, ...]
    dim: int
    rows_per_device: int
    rows_per_line: int  # Narrow rows that lie side by side in one line of memory; 1 where the device knows no lines.
    columns: tuple[int, ...]  # Indexes of the batch's id columns that look up tables of this group.
    place_of_column: tuple[int, ...]  # For each of these columns, the index in `places` of its table.

    @property
    def lines_per_device(self) -> int:
        return self.rows_per_device // self.rows_per_line

    @property
    def width(self) -> int:
        """Numbers of a row of the array, as it is declared."""
        return self.rows_per_line * self.dim

    @property
    def name(self) -> str:
        """The name of its arrays."""
        return f"{self.places[0].table.name}+{len(self.places) - 1}"

    def per_column(self, values: Sequence[int]) -> NDArray[np.int32]:
        """Return one value for each feature as one value for each column."""
        return np.array([values[place] for place in self.place_of_column], np.int32)


@frozen
class Layout:
    """All tables over all devices."""

    groups: tuple[Group, ...]
    num_devices: int
    num_columns: int  # Columns of ids in a batch: `multi_hot` for each table.

    @property
    def sharding(self) -> str:
        return "row_wise" if self.num_devices > 1 else "table_wise"

    def described(self, spec: RunSpec) -> JsonDict:
        """Return plain values for the `plan` event and `plan.txt`."""
        size = table_value_bytes(spec)
        placed = sorted(((p, g) for g in self.groups for p in g.places), key=lambda pair: pair[0].feature)
        tables = [
            {"table": p.table.name, "rows": p.table.rows, "dim": g.dim,
             "sharding": self.sharding, "kernel": "jax", "ranks": list(range(self.num_devices)),
             "bytes": p.table.rows * g.dim * size}
            for p, g in placed
        ]
        held = sum(g.rows_per_device * g.dim * size for g in self.groups)
        return {"tables": tables, "per_rank": [{"rank": r, "bytes": held} for r in range(self.num_devices)]}

    def placement(self, spec: RunSpec) -> Placement:
        """Return the layout as a plan has it."""
        shards = [Shard(p.table.name, device, num_rows, g.dim) for g in self.groups for p in g.places
                  for device in range(self.num_devices) if (num_rows := len(p.rows_on(device, self.num_devices)))]
        return Placement(self.num_devices, tuple(shards), dict.fromkeys(
            (t.name for t in spec.model.table_list()), self.sharding), "JAX's trainer")


def check_supported(spec: RunSpec) -> None:
    """Raise `SpecError` for what the JAX trainer does not have.

    Adam's state would change at every step for rows that no batch has touched.
    """
    mistakes = [
        Mistake("", field, value, "is not supported by the JAX trainer", f"use {', '.join(known)}")
        for field, value, known in (("model.kind", spec.model.kind, KINDS),
                                    ("train.optimizer", spec.train.optimizer, TABLE_OPTIMIZERS),
                                    ("train.table_dtype", spec.train.table_dtype, ("fp32", "fp16")),
                                    ("train.sharding", spec.train.sharding, SHARDINGS)) if value not in known
    ]
    if field := regularization_of(spec):
        section, _, name = field.partition(".")
        mistakes.append(Mistake("", field, str(getattr(getattr(spec, section), name)), "is not supported by the JAX "
                                "trainer", 'leave it out, or set place.device = "cpu" or "cuda"'))
    if spec.model.tasks:
        names = ", ".join(task.name for task in spec.model.tasks)
        mistakes.append(Mistake("", "model.tasks", names, "several tasks are not supported by the JAX trainer",
                                'set place.device = "cpu" or "cuda"'))
    mistakes += [Mistake("", f"model.tables.{index}.{field}", str(value), "is not supported by the JAX trainer",
                         'leave it out, or set place.device = "cpu" or "cuda"')
                 for index, table in enumerate(spec.model.tables)
                 for field in ("shares", "learning_rate", "optimizer", "dtype", "sharding",
                               "weights_column")
                 if (value := getattr(table, field)) not in ("", None)]
    if mistakes:
        raise SpecError(mistakes)


def expected_capacities(spec: RunSpec, layout: Layout) -> tuple[int, ...]:
    """Return for each group the rows that a device may ask of another at a time, where there is no data to look at: no
    two ids are taken to be the same."""
    most = [spec.train.batch_size // layout.num_devices * len(group.columns) for group in layout.groups]
    return tuple(capacity_for(num / layout.num_devices, num, layout.num_devices) for num in most)


def capacity_for(requested: float, most: int, num_devices: int) -> int:
    """Return the rows of one exchange, in whole tiles, with headroom over what is requested; at most a device's ids of
    a batch."""
    return most if num_devices == 1 else min(most, max(8, math.ceil(HEADROOM * requested / 8) * 8))


def make_layout(spec: RunSpec, num_devices: int, line_width: int = 0) -> Layout:
    """Cut tables by rows.

    `line_width`: numbers in a line of the device's memory, where it has lines. Raises `UserError` for what the trainer
    cannot do.
    """
    check_supported(spec)
    samples_per_rank(spec.train.batch_size, num_devices, "devices")
    tables = spec.model.table_list()
    starts = [0, *accumulate(t.multi_hot for t in tables[:-1])]
    groups = []
    for dim in sorted({t.dim or 0 for t in tables}):
        for features in _split([f for f, t in enumerate(tables) if t.dim == dim], tables):
            # What is rounded to 16 bits is written row by row, and two of a line could not be at once.
            per_line = line_width // dim if spec.train.table_dtype == "fp32" and line_width % dim == 0 else 1
            groups.append(_group(features, tables, starts, num_devices, max(1, per_line)))
    return Layout(tuple(groups), num_devices, sum(t.multi_hot for t in tables))


def _split(features: list[int], tables: Sequence[Table]) -> list[list[int]]:
    """Split into as few groups as 32 bits allow."""
    split: list[list[int]] = [[]]
    num_rows = 0
    for feature in features:
        rows = tables[feature].rows
        if rows > MAX_ROWS:
            raise UserError(f"table {tables[feature].name} has {rows:,} rows, too many for the JAX trainer",
                            f"at most {MAX_ROWS:,} rows: it numbers them in 32 bits")
        if split[-1] and num_rows + rows > MAX_ROWS // 2:
            split.append([])
            num_rows = 0
        split[-1].append(feature)
        num_rows += rows
    return split


def _group(
    features: list[int], tables: Sequence[Table], starts: list[int], num_devices: int, per_line: int
) -> Group:
    places, filled = [], 0
    for number, feature in enumerate(features):
        num_rows = -(-tables[feature].rows // num_devices)
        places.append(TablePlacement(tables[feature], feature, number % num_devices, filled, num_rows))
        filled += num_rows
    columns = [starts[f] + hot for f in features for hot in range(tables[f].multi_hot)]
    place_of_column = [i for i, f in enumerate(features) for _ in range(tables[f].multi_hot)]
    return Group(tuple(places), tables[features[0]].dim or 0, -(-filled // per_line) * per_line, per_line,
                 tuple(columns), tuple(place_of_column))
