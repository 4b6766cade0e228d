"""`[model]`: the network and its tables, and the tables whose rows are given to ids as they come."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from embark.errors import Mistakes, conflict
from embark.values import JsonDict, frozen
from .section import NonNegativeInt, PositiveInt, Section, remembered
from .sequence import SequenceSpec
from .tasks import HEAD_FIELDS, TaskHead, Tasks
from .two_tower import TwoTowerSpec
from .user_code import CUSTOM_KIND, is_custom

if TYPE_CHECKING:
    from .run import RunSpec

BUCKET_SLOTS = 32
"""Rows of a bucket. An id's hash decides its bucket, and it competes for a row with the ids of that bucket only."""
BUCKET_COUNTERS = 128
"""Counters of a bucket with `admit = "count"`, which the ids without a row share by their hash."""
DYNAMIC_FIELDS = ("ids", "capacity", "admit", "admit_count", "admit_probability", "evict", "half_life", "max_new")
FIELD_KINDS = ("deepfm", "wide_deep", "xdeepfm", "autoint", "finalmlp", "masknet", "tabm")
"""Models whose features, numbers and tables alike, are fields with a vector each."""
FIRST_ORDER_KINDS = ("deepfm", "wide_deep", "xdeepfm")
"""Models in which a row's first number is the weight of its id in a linear part, and the others are its vector."""
ONE_WIDTH_KINDS = ("dlrm", "deepfm", "xdeepfm", "autoint", "masknet")
"""Models that multiply or compare the vectors of all tables, which have one width."""
POOLED_KINDS = ("dlrm", "dcnv2", *FIELD_KINDS)
"""Models of one pooled vector for each table, which may be dynamic."""
Rows = Annotated[int, Field(gt=0, le=2**31 - 1)]  # ids are 32 bits wide
Width = Annotated[int, Field(gt=0, le=2**20)]
Capacity = Annotated[int, Field(gt=0, le=2**31 - 64)]
LayerSizes = Annotated[tuple[Width, ...], Field(strict=False, max_length=1000)]
MAX_TABLES = 10_000
TableOptimizer = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam"]
TableDtype = Literal["fp32", "fp16", "bf16"]
TableSharding = Literal["table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise",
                        "grid_shard"]
SHARED = ("rows", "dim", "pooling", "learning_rate", "init_range", "optimizer", "dtype", "sharding", *DYNAMIC_FIELDS)
"""Fields of a table that all features share."""


class Table(Section):
    """One embedding table and the sparse feature (data column) that looks it up."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)
    """Name of the table and of its column in the data: letters, digits, underscores."""
    rows: Rows
    """Number of rows; ids run from 0 to rows − 1. With `shares`: that table's, and may be left out. With
    `ids = "dynamic"`: the number of different ids that synthetic data draws, and may be left out."""
    dim: Width | None = None
    """Width of a row; defaults to `model.embedding_dim`."""
    pooling: Literal["sum", "mean", "none"] = "sum"
    """How the rows of a sample's ids are pooled into one vector. `none`: they are not; the model gets them one by one,
    in order, as a sequence (docs/guides/sequences.md)."""
    multi_hot: Width = 1
    """Maximum number of ids per sample."""
    max_length: Width | None = None
    """`pooling = "none"`: the longest sequence; it takes the place of `multi_hot`."""
    mean_length: float | None = Field(default=None, gt=0)
    """`pooling = "none"`: mean length, by which `embark plan` counts work; defaults to `max_length`."""
    lookup: bool = True
    """false: the model gets the numbers themselves, such as the times of a sequence; there are no rows."""
    weights_column: str = Field(default="", max_length=128)
    """Column with a weight for each id of this feature, 0 or more. `sum`: Σ weight × row; `mean`: that over Σ weight.
    Empty: every id weighs 1."""
    shares: str = Field(default="", max_length=128)
    """Name of another table, whose rows this feature looks up: TorchRec's `feature_names`. All but `name`,
    `multi_hot` and `weights_column` is that table's."""

    learning_rate: float | None = Field(default=None, ge=0)
    """Learning rate of this table, instead of `train.learning_rate`; warm-up and decay apply to it too."""
    init_range: float | None = Field(default=None, ge=0)
    """Initial values are uniform in ±`init_range`; defaults to √(1 / rows), as in TorchRec, and on data of your own to
    0.05 at most."""
    optimizer: TableOptimizer | None = None
    """Optimizer of this table, instead of `train.optimizer`."""
    dtype: TableDtype | None = None
    """Type of this table's rows, instead of `train.table_dtype`."""
    sharding: TableSharding | Literal["data_parallel"] | None = None
    """Sharding of this table, instead of `train.sharding`. `data_parallel`: every rank holds a copy, and gradients are
    summed over the ranks at each step; for small tables."""

    ids: Literal["rows", "dynamic"] = "rows"
    """`rows`: an id is the number of its row. `dynamic`: ids are any 64-bit integers or words, and get rows as they
    come (docs/guides/dynamic-tables.md)."""
    capacity: Capacity | None = None
    """`dynamic` only: how many ids have a row of their own, rounded up to a multiple of 32; all others share row 0."""
    admit: Literal["all", "count", "probability"] = "all"
    """`dynamic` only: which ids without a row get one. `all`: each. `count`: those seen `admit_count` times.
    `probability`: in each step where one occurs, with probability `admit_probability`."""
    admit_count: PositiveInt = Field(default=2, le=2**30)
    """`admit = "count"` only: how often an id is seen before it gets a row, this time included."""
    admit_probability: float = Field(default=0.1, gt=0, le=1)
    """`admit = "probability"` only: the probability with which an id gets a row in a step."""
    evict: Literal["lru", "lfu", "age"] = "lru"
    """`dynamic` only: which id loses its row where a new one finds none free. `lru`: the one that was not seen for
    longest. `lfu`: the one seen least often. `age`: the one that has its row for longest."""
    half_life: PositiveInt = Field(default=10_000, le=2**30)
    """Steps after which the counts of `evict = "lfu"` and of `admit = "count"` are halved."""
    max_new: PositiveInt = Field(default=4096, le=2**24)
    """`dynamic` only: how many ids without a row a step considers, repetitions counted, in the batch's order."""

    @property
    def is_dynamic(self) -> bool:
        """Whether rows are given to ids as they come."""
        return self.ids == "dynamic"

    @property
    def stored_rows(self) -> int:
        """Rows that are stored; a dynamic table has one more, which the ids without a row share."""
        return 1 + num_buckets(self.capacity or 1) * BUCKET_SLOTS if self.is_dynamic else self.rows

    @property
    def weights(self) -> str:
        """The name of the table whose rows are looked up."""
        return self.shares or self.name

    @property
    def weights_feature(self) -> str:
        """Name of the weights in prepared data and in rows to score; empty if the ids have none."""
        return f"{self.name}.{self.weights_column}" if self.weights_column else ""

    @property
    def is_sequence(self) -> bool:
        """Whether the model gets the rows one by one, not pooled."""
        return self.pooling == "none"

    @property
    def mean_ids(self) -> float:
        """Mean number of ids per sample."""
        return self.mean_length or float(self.multi_hot)

    @property
    def mean_width(self) -> float:
        """Mean width of all vectors that a sample gets."""
        return (self.dim or 0) * (self.mean_ids if self.is_sequence else 1) if self.lookup else 0

    @property
    def max_width(self) -> int:
        """Largest width of all vectors that a sample gets."""
        return (self.dim or 0) * (self.multi_hot if self.is_sequence else 1) if self.lookup else 0

    @model_validator(mode="before")
    @classmethod
    def _with_length(cls, values: Any) -> Any:
        """Copy the length of a sequence to `multi_hot`, which everything that counts ids reads."""
        if not isinstance(values, Mapping):
            return values
        length = values.get("max_length")
        is_any_number = values.get("lookup") is False or values.get("ids") == "dynamic"
        return {**({"rows": 2**31 - 1} if is_any_number else {}),
                **({"multi_hot": length} if length is not None else {}), **values}

    omitted = (*SHARED[3:], "shares", "max_length", "mean_length", "lookup", "weights_column")


CANDIDATE = "candidate"
"""The column with the item to score, in rows for a model of the next item."""


@frozen
class StoredTable:
    """Rows that are stored once, and the features that look them up."""

    name: str
    rows: int
    dim: int
    pooling: Literal["sum", "mean", "none"]
    learning_rate: float | None
    init_range: float | None
    features: tuple[Table, ...]
    optimizer: TableOptimizer | None = None
    dtype: TableDtype | None = None
    sharding: TableSharding | Literal["data_parallel"] | None = None
    # Computed once: a plan asks for them a million times.
    is_sequence: bool = field(init=False)
    """Whether some feature is a sequence: all rows of the table are then looked up one by one."""
    mean_ids: float = field(init=False)
    """Ids per sample in the mean, of all features together."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_sequence", any(feature.is_sequence for feature in self.features))
        object.__setattr__(self, "mean_ids", sum(feature.mean_ids for feature in self.features))

    @property
    def is_dynamic(self) -> bool:
        """Whether rows are given to ids as they come."""
        return self.features[0].is_dynamic

    @property
    def is_data_parallel(self) -> bool:
        """Whether every rank holds all rows."""
        return self.sharding == "data_parallel"

    @property
    def multi_hot(self) -> int:
        """The most ids per sample, of all features together."""
        return sum(feature.multi_hot for feature in self.features)

    @property
    def vectors_per_sample(self) -> float:
        """Vectors that leave the table: one for each feature, or one for each id that is not pooled."""
        return self.mean_ids if self.is_sequence else float(len(self.features))


OWN_FIELDS = {"num_heads": ("autoint", "finalmlp"), "num_feature_maps": ("xdeepfm",), "num_members": ("tabm",)}
"""Fields that only some kinds read."""


class ModelSpec(Section):
    """The model: one of those below or a custom one, over any list of tables."""

    kind: Literal["dlrm", "dcnv2", "deepfm", "wide_deep", "xdeepfm", "autoint", "finalmlp", "masknet", "tabm",
                  "two_tower", "din", "sasrec", "hstu"] | \
        Annotated[str, Field(pattern=CUSTOM_KIND, max_length=200)] = "dlrm"
    """`dlrm`: all pairwise dot products. `dcnv2`: low-rank cross layers. `deepfm`, `wide_deep`, `xdeepfm`, `autoint`,
    `finalmlp`, `masknet`, `tabm`: as in their papers (docs/guides/models.md). `two_tower`: retrieval
    (docs/guides/retrieval.md). `din`, `sasrec`, `hstu`: attention over a sequence (docs/guides/sequences.md).
    `my_model:MyModel`: the class `MyModel` of `my_model.py` beside the spec, whose code is run
    (docs/guides/custom-models.md). If left out, `tabm` for few rows of numbers and words (docs/guides/tune.md)."""
    code: str = Field(default="", max_length=1_000_000)
    """The text of that file, which travels with the spec; read from the file if empty."""
    num_dense: NonNegativeInt = Field(default=13, le=2**20)
    """Number of dense (floating-point) features; may be 0."""
    embedding_dim: Width = 64
    """Width of the embedding rows, and of the bottom MLP's output. If left out, less on little data of your own, as are
    both MLPs (docs/guides/tune.md)."""
    bottom_mlp: LayerSizes = (512, 256)
    """Hidden layers over the dense features; an output layer of `embedding_dim` is appended. The kinds of
    docs/guides/models.md have none: there a number is a field, as an id is."""
    top_mlp: LayerSizes = (512, 256)
    """Hidden layers over the interaction; an output layer of size 1 is appended."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the hidden units of both MLPs that a training step drops, chosen anew for each sample and step by
    `train.seed`, the same at any number of ranks. Evaluation drops none."""
    num_cross_layers: PositiveInt = Field(default=3, le=1000)
    """Number of cross layers of `dcnv2`, of layers of feature maps of `xdeepfm`, of attention layers of `autoint`, of
    mask blocks of `masknet`."""
    cross_rank: Width = 512
    """`dcnv2`: rank of each cross layer's matrix. `masknet`: width of each block and of its mask's hidden layer."""
    num_heads: PositiveInt = Field(default=2, le=1024)
    """`autoint`: attention heads, which share `embedding_dim`. `finalmlp`: heads of the product that joins its two
    streams, which share the last width of `top_mlp`."""
    num_feature_maps: Width = 16
    """`xdeepfm` only: feature maps of each layer."""
    num_members: PositiveInt = Field(default=16, le=1024)
    """`tabm` only: MLPs that share their weights; 8 where `kind` is left out."""
    num_tables: PositiveInt = Field(default=26, le=MAX_TABLES)
    """Number of tables, named `cat_0`, `cat_1`, …; ignored if `tables` is given."""
    rows_per_table: Rows | Annotated[tuple[Rows, ...], Field(strict=False, max_length=MAX_TABLES)] = 100_000
    """Rows per table: one number for all, or a list of `num_tables` numbers."""
    tables: Annotated[tuple[Table, ...], Field(strict=False, max_length=MAX_TABLES)] = ()
    """The tables, one `[[model.tables]]` each; replaces `num_tables` and `rows_per_table`."""
    two_tower: TwoTowerSpec = TwoTowerSpec()
    sequence: SequenceSpec = SequenceSpec()
    tasks: Tasks = ()
    """Several labels to predict, one `[[model.tasks]]` each, in place of `data.label` (docs/guides/tasks.md)."""
    task_head: TaskHead = "shared_bottom"
    """What lies between the interaction and the tasks. `shared_bottom`: one `top_mlp` for all. `mmoe`: `num_experts` of
    them, weighted for each task by a gate. `ple`: besides, experts of each task's own, in several layers."""
    num_experts: PositiveInt = Field(default=4, le=1000)
    """`mmoe` and `ple`: experts that all tasks share, each with the layers of `top_mlp`."""
    num_task_experts: PositiveInt = Field(default=2, le=1000)
    """`ple` only: experts of each task's own."""
    num_extraction_layers: PositiveInt = Field(default=2, le=100)
    """`ple` only: layers of experts, one over the other."""
    tower_mlp: LayerSizes = (64,)
    """Hidden layers of each task's own, over the head; an output layer is appended."""

    def left_out(self) -> Collection[str]:
        own = [name for name in OWN_FIELDS if self.has_default(name)]
        return own if self.tasks else ("tasks", *HEAD_FIELDS, *own)

    @field_validator("tables", mode="before")
    @classmethod
    def _with_shared(cls, tables: Any) -> Any:
        """Fill in the fields of features that share a table from that table."""
        given = [table for table in tables if isinstance(table, Mapping)] if isinstance(tables, list | tuple) else []
        by_name = {str(table.get("name")): table for table in given}
        if not any(table.get("shares") for table in given):
            return tables

        def of_shared(name: object) -> JsonDict:
            shared = by_name.get(str(name))
            if shared is None or shared.get("shares"):
                return {"rows": 1}  # refused later on, for the name, not for lack of rows
            return {key: shared[key] for key in SHARED if key in shared and (key, shared[key]) != ("pooling", "none")}

        return [{**of_shared(table["shares"]), **table} if isinstance(table, Mapping) and table.get("shares") else table
                for table in tables]

    @remembered
    def table_list(self) -> tuple[Table, ...]:
        """Every table as each of its features sees it, with `dim` filled in: one for each sparse feature."""
        tables = self.tables or tuple(Table(name=f"cat_{i}", rows=rows) for i, rows in enumerate(self._rows_list()))
        return tuple(t if t.dim else t.model_copy(update={"dim": self.embedding_dim}) for t in tables)

    @remembered
    def stored_tables(self) -> tuple[StoredTable, ...]:
        """Every table once, however many features share it."""
        features: dict[str, list[Table]] = {}
        for feature in self.table_list():
            if feature.lookup:
                features.setdefault(feature.weights, []).append(feature)
        return tuple(StoredTable(name, of[0].stored_rows, of[0].dim or 0, of[0].pooling, of[0].learning_rate,
                                 of[0].init_range, tuple(of), optimizer=of[0].optimizer, dtype=of[0].dtype,
                                 sharding=of[0].sharding) for name, of in features.items())

    def scored_features(self) -> tuple[Table, ...]:
        """Return the features of a row to score. A model of the next item gets a history without it, and one candidate
        in place of the negatives."""
        if not self.is_next_item:
            return self.table_list()
        return tuple(
            table.model_copy(update={"name": CANDIDATE, "pooling": "sum", "multi_hot": 1, "max_length": None,
                                     "mean_length": None}) if table.name == self.sequence.negatives else
            table.model_copy(update={"multi_hot": table.multi_hot - 1, "max_length": table.multi_hot - 1})
            for table in self.table_list())

    @property
    def features_of_any_number(self) -> frozenset[str]:
        """Features whose ids are not rows of a table: those of dynamic tables, and numbers that are not looked up."""
        return frozenset(table.name for table in self.tables if table.is_dynamic or not table.lookup)

    @property
    def has_weighted_ids(self) -> bool:
        """Whether some feature's ids have weights."""
        return any(table.weights_column for table in self.tables)

    @property
    def has_sequences(self) -> bool:
        """Whether some feature is a sequence."""
        return any(table.is_sequence for table in self.tables)

    @property
    def has_dynamic_tables(self) -> bool:
        """Whether some table gives its rows to ids as they come."""
        return any(table.is_dynamic for table in self.tables)

    @property
    def retrieved(self) -> str:
        """The table whose ids are the items that the model retrieves; empty if it retrieves none."""
        if self.kind == "two_tower":
            return self.two_tower.item
        return self.sequence.history if self.is_next_item else ""

    @property
    def is_next_item(self) -> bool:
        """Whether the built-in model predicts the next item of a sequence, not a label."""
        return self.kind in ("sasrec", "hstu") and not self.sequence.candidate

    def feature(self, name: str) -> Table:
        return next(table for table in self.table_list() if table.name == name)

    @property
    def is_custom(self) -> bool:
        """Whether the network is the user's own code."""
        return is_custom(self.kind)

    @property
    def goes_back_by_autograd(self) -> bool:
        """Whether the captured step leaves the network's gradients to autograd, not to kernels of its own."""
        return self.is_custom or self.kind in (*FIELD_KINDS, "two_tower") or bool(self.tasks) or self.has_sequences

    @property
    def gives_tables(self) -> bool:
        """Whether the spec names the tables; if not, prepared data may."""
        return bool(self.tables) or not self.model_fields_set.isdisjoint({"num_tables", "rows_per_table"})

    def _rows_list(self) -> tuple[int, ...]:
        if isinstance(self.rows_per_table, int):
            return (self.rows_per_table,) * self.num_tables
        return self.rows_per_table


def num_buckets(capacity: int) -> int:
    """Return the number of buckets of a dynamic table."""
    return -(-capacity // BUCKET_SLOTS)


def own_buckets(num: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the first bucket of a rank and the one behind its last: a range of hashes, alike on all ranks."""
    return num * rank // num_ranks, num * (rank + 1) // num_ranks


def id_map_bytes(table: Table, num_ranks: int) -> int:
    """Return the bytes of a dynamic table's id map on the rank with its largest part: for each row its id, a tag, when
    and how often it was seen; and the counters."""
    buckets = -(-num_buckets(table.capacity or 1) // num_ranks)
    return buckets * (BUCKET_SLOTS * (8 + 2 + 4 + 4) + (4 * BUCKET_COUNTERS if table.admit == "count" else 0))


def dynamic_mistakes(spec: RunSpec) -> Mistakes:
    """Find conflicts of dynamic tables, and fields of theirs in other tables."""
    for index, table in enumerate(spec.model.tables):
        where = f"model.tables.{index}"
        if table.shares:  # it has the fields of that table
            continue
        if not table.is_dynamic:
            yield from table.unused(where, DYNAMIC_FIELDS, "on a table whose ids are its rows",
                                    'set ids = "dynamic", or leave it out')
            continue
        if table.capacity is None:
            yield conflict(f"{where}.capacity", "", "is needed where ids are dynamic", "say how many ids have a row")
        if table.is_sequence or not table.lookup:
            yield conflict(f"{where}.ids", table.ids, "the rows of a dynamic table are pooled",
                           'set pooling = "sum" or "mean", or ids = "rows"')
        if table.sharding == "data_parallel":
            yield conflict(f"{where}.sharding", table.sharding,
                           "the rows of a dynamic table are not copied to every rank", "leave it out")
        for admit in ("count", "probability"):
            if table.admit != admit:
                yield from table.unused(where, [f"admit_{admit}"], f'while admit is "{table.admit}"',
                                        f'set admit = "{admit}", or leave it out')
        if table.evict != "lfu" and table.admit != "count":
            yield from table.unused(where, ["half_life"], "without counts to halve",
                                    'set evict = "lfu" or admit = "count", or leave it out')
    if not spec.model.has_dynamic_tables:
        return
    if spec.model.kind not in POOLED_KINDS and not spec.model.is_custom:
        yield conflict("model.kind", spec.model.kind, "takes no dynamic tables",
                       f'use one of {", ".join(POOLED_KINDS)}, a custom model, or ids = "rows"')
    if spec.place.device in ("jax", "tpu"):
        yield conflict("place.device", spec.place.device, "the JAX trainer has no dynamic tables",
                       'use "cpu" or "cuda", or ids = "rows"')
    if spec.train.warm_start:
        yield conflict("train.warm_start", spec.train.warm_start, "the rows of a dynamic table are its own ids'",
                       "resume the run itself, or leave train.warm_start out")
