"""`RunSpec`: all sections together, and the constraints between them."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from embark.errors import Mistakes, SpecError, conflict, nearest
from .data import DataSpec, interactions_mistakes, moment
from .features import LEGACY_OPTIONS, FeaturesSpec, features_mistakes, legacy_features
from .model import ONE_WIDTH_KINDS, OWN_FIELDS, SHARED, ModelSpec, dynamic_mistakes
from .place import CLUSTER_TARGETS, ELASTIC_TARGETS, EXISTING_FIELDS, PlaceSpec
from .section import Many, Names, NonNegativeInt, PositiveInt, Section
from .sequence import EMBEDDING_SHARDINGS, sequence_mistakes
from .serve import PublishSpec, ServeSpec
from .stream import StreamSpec, stream_mistakes
from .tasks import task_mistakes
from .train import HeldOutMetric, TrainSpec, batch_mistakes, metric_mistakes
from .two_tower import two_tower_mistakes

OTHER_FIELDS = frozenset({  # Fields of these sections that do not decide what a run learns.
    "model.num_tables", "model.rows_per_table",  # they are in model.tables, as the run has them
    "data.path", "data.prepare", "data.cache_gb", "data.cache_dir",  # the data's content counts, not where it lies
    "train.num_epochs", "train.num_steps", "train.eval_every", "train.early_stopping_patience",
    "train.early_stopping_metric", "train.early_stopping_min_delta", "train.sharding", "train.memory_reserve",
    "train.engine", "features.fitted",  # which follows from the data
    "features.crosses"  # of prepared data alone, which has them in its content
})
LEARNING_FIELDS = frozenset(f"{name}.{field}" for name, section in (
    ("model", ModelSpec), ("data", DataSpec), ("features", FeaturesSpec), ("train", TrainSpec))
    for field in section.model_fields) - OTHER_FIELDS

KIND_OF_FIELD = {
    **dict.fromkeys(("data.label", "data.dense_columns", "data.time_column", "data.eval_fraction", "data.on_bad_id"),
                    "columns"),
    **dict.fromkeys(("data.eval_split", "data.shuffle"), "prepared"),
    **dict.fromkeys(("data.num_train_samples", "data.num_eval_samples", "data.zipf_exponent", "data.signal",
                     "data.task_conflict", "data.ragged"), "synthetic"),
    "data.interactions": "interactions",
    **{f"features.{field}": "columns" for field in FeaturesSpec.model_fields}  # prepared data has them in its content
}
"""Fields that have an effect with one `data.kind` only."""

KEY = "identity"  # In a checkpoint's commit record.
DATA = "data"  # The content of the data, beside the fields.
UNRECORDED = "identity"  # A checkpoint that does not say what it was trained with.
ACCEPTABLE = LEARNING_FIELDS | {DATA, UNRECORDED}
"""What `--accept-change` takes."""


Sinks = Many[Literal["cloudwatch", "otlp", "wandb", "mlflow"]]


class WatchSpec(Section):
    """`[watch]`: which metrics are recorded, and where they are sent."""

    every: PositiveInt = 50
    """Steps between `step` events, the points of the curves."""
    tensorboard: bool = True
    """Write TensorBoard curves into the run directory."""
    system_every_s: NonNegativeFloat = 5.0
    """Seconds between samples of the machines (CPU, memory, network, disk, GPU) and of every rank's times; 0: none."""
    phases_every_s: NonNegativeFloat | Literal["auto"] = "auto"
    """Seconds between profiles of three steps by torch's profiler; 0: none. `auto`: 60 on a CPU, none on a GPU."""
    prometheus_port: int = Field(default=0, ge=0, le=65_535)
    """Rank 0 serves Prometheus metrics on this port, at `/metrics`; 0: off."""
    prometheus_host: str = Field(default="0.0.0.0", min_length=1)
    """Address to listen on; `127.0.0.1` for this machine only."""
    sinks: Sinks = ()
    """Where else metrics are sent: `cloudwatch`; `otlp`, for Azure Monitor, Cloud Monitoring and other collectors;
    `wandb`; `mlflow`. Endpoints and credentials come from the standard environment variables."""
    send_every_s: PositiveFloat = 30.0
    """Seconds between uploads to them."""
    project: str = Field(default="", pattern=r"^[^\\#?%:]*$", max_length=128)
    """W&B project and MLflow experiment; empty: that of `WANDB_PROJECT` or `MLFLOW_EXPERIMENT_NAME`, else `embark`."""
    cloudwatch_namespace: str = Field(default="Embark", pattern=r"^[A-Za-z0-9 ._/#:-]+$", max_length=255)
    """CloudWatch namespace of the metrics."""


class StoreSpec(Section):
    """`[store]`: where the run's files go."""

    root: str = Field(default="runs", min_length=1)
    """The run directory is `<root>/<name>`: a local path, or `s3://`, `gs://`, `az://` with a bucket and a prefix.
    A relative path goes by the current directory, where `embark watch` and `embark report` look for runs."""
    checkpoint_every: NonNegativeInt | Literal["auto"] = "auto"
    """Steps between checkpoints; 0: none before the end. `auto` weighs the cost of a save against that of a failure."""
    hours_between_failures: PositiveFloat = 12.0
    """Mean time between failures that `auto` assumes: some hours on spot, days otherwise."""
    checkpoint_at_end: bool = True
    """Save the trained model."""
    in_background: bool = True
    """Keep training while a checkpoint is written."""
    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints to keep."""
    keep_every: NonNegativeInt = 0
    """Also keep every checkpoint whose step is a multiple of this, permanently."""
    keep_best: NonNegativeInt = 0
    """Also keep this many checkpoints with the best held-out `best_by`."""
    best_by: HeldOutMetric = "auc"
    """The metric that ranks checkpoints for `keep_best`. If left out, as for `train.early_stopping_metric`."""
    verify: Literal["checksums", "sizes"] = "checksums"
    """What is verified before a checkpoint is loaded."""
    accept_changes: Names = ()
    """Fields in which a resumed run may differ from its checkpoints, as `--accept-change`; `data`: its samples."""

    default_of_model = ("best_by",)


class RunSpec(Section):
    """A run: all sections of its spec."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Names the run directory: letters, digits, dots, dashes, underscores."""
    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    features: FeaturesSpec = FeaturesSpec()
    train: TrainSpec = TrainSpec()
    place: PlaceSpec = PlaceSpec()
    store: StoreSpec = StoreSpec()
    watch: WatchSpec = WatchSpec()
    publish: PublishSpec = PublishSpec()
    serve: ServeSpec = ServeSpec()
    stream: StreamSpec = StreamSpec()

    omitted = ("features",)

    @model_validator(mode="before")
    @classmethod
    def _with_legacy_features(cls, values: Any) -> Any:
        """Read the specs of earlier runs, which have `data.prepare.dense` and `time_columns`."""
        data = values.get("data") if isinstance(values, dict) else None
        prepare = data.get("prepare") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(prepare, dict) or not {*LEGACY_OPTIONS} & {*prepare}:
            return values
        given = values.get("features", {})
        prepare = {key: value for key, value in prepare.items() if key not in LEGACY_OPTIONS}
        features = legacy_features(data["prepare"], given) if isinstance(given, dict) else given
        return {**values, "data": {**data, "prepare": prepare}, **({"features": features} if features else {})}

    @property
    def has_bf16_tables(self) -> bool:
        """Whether some table is in bf16, which only the CUDA-graph engine trains."""
        return any((table.dtype or self.train.table_dtype) == "bf16" for table in self.model.stored_tables())

    def mistakes(self) -> Mistakes:
        """Find conflicts between fields that are each valid alone."""
        for find in (_model_mistakes, two_tower_mistakes, sequence_mistakes, dynamic_mistakes, _data_mistakes,
                     task_mistakes, metric_mistakes, interactions_mistakes, features_mistakes, stream_mistakes,
                     _train_mistakes, _cluster_mistakes, _elastic_mistakes, _acceptance_mistakes):
            yield from find(self)


def accepting(spec: RunSpec, fields: Sequence[str]) -> RunSpec:
    """Add fields to `store.accept_changes`."""
    if not fields:
        return spec
    accepted = tuple(dict.fromkeys((*spec.store.accept_changes, *fields)))
    changed = spec.changed(store=spec.store.changed(accept_changes=accepted))
    if mistakes := list(_acceptance_mistakes(changed)):
        raise SpecError(mistakes)
    return changed


def _acceptance_mistakes(spec: RunSpec) -> Mistakes:
    for name in spec.store.accept_changes:
        if name not in ACCEPTABLE:
            yield conflict("store.accept_changes", name, "is not a field that decides what a run learns",
                           nearest(name, ACCEPTABLE))


def _model_mistakes(spec: RunSpec) -> Mistakes:
    model, rows = spec.model, spec.model.rows_per_table
    if not model.tables and isinstance(rows, tuple) and len(rows) != model.num_tables:
        yield conflict("model.rows_per_table", rows,
                       f"lists {len(rows)} tables, but model.num_tables is {model.num_tables}",
                       f"set model.num_tables = {len(rows)}, or give one number for all tables")
    if model.is_custom and model.dropout:
        yield conflict("model.dropout", model.dropout, f"has no effect on {model.kind}", "leave it out")
    names = [t.name for t in model.tables]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield conflict("model.tables", name, "two tables have this name", "give each table a unique name")
    yield from _sharing_mistakes(model)
    for index, table in enumerate(model.tables if model.kind in ONE_WIDTH_KINDS else ()):
        if table.dim not in (None, model.embedding_dim):
            yield conflict(f"model.tables.{index}.dim", table.dim, f'"{model.kind}" multiplies rows of all tables with '
                           f"each other, so every table is model.embedding_dim = {model.embedding_dim} wide",
                           f"leave dim out, set it to {model.embedding_dim}, or set model.kind = \"dcnv2\"")
    for name, kinds in OWN_FIELDS.items():
        if model.kind not in kinds and not model.is_custom:
            yield from model.unused("model", [name], f'on "{model.kind}"',
                                    f"leave it out, or set model.kind = \"{kinds[0]}\"")
    shared = {"autoint": model.embedding_dim, "finalmlp": model.top_mlp[-1] if model.top_mlp else 0}.get(model.kind)
    if shared == 0:
        yield conflict("model.top_mlp", [], "is empty, and finalmlp joins the outputs of two such MLPs",
                       "give it a hidden layer")
    elif shared and shared % model.num_heads:
        yield conflict("model.num_heads", model.num_heads, f"does not divide the width {shared}", "use a divisor")
    for index, table in enumerate(model.table_list()):
        if table.dim and table.dim % 4:
            is_custom = index < len(model.tables) and model.tables[index].dim
            yield conflict(f"model.tables.{index}.dim" if is_custom else "model.embedding_dim", table.dim,
                           "FBGEMM's kernels require a multiple of 4", f"use {(table.dim + 3) // 4 * 4}")
            break


def _sharing_mistakes(model: ModelSpec) -> Mistakes:
    tables = {table.name: table for table in model.tables}
    for index, table in enumerate(model.tables):
        shared = tables.get(table.shares)
        if not table.shares:
            continue
        if shared is None or shared.shares:
            owners = [one.name for one in model.tables if not one.shares]
            what = "is no table" if shared is None else f"has no rows of its own: it shares those of {shared.shares}"
            yield conflict(f"model.tables.{index}.shares", table.shares, what,
                           nearest(table.shares, owners) if shared is None else f'use "{shared.shares}"')
            continue
        for field in SHARED:
            value, there = getattr(table, field), getattr(shared, field)
            if value != there and not (field == "pooling" and "none" in (value, there)):
                yield conflict(f"model.tables.{index}.{field}", value, f"is not that of table {shared.name}, which is "
                               f"{'not given' if there is None else there}", "leave it out, or set it there")


def _data_mistakes(spec: RunSpec) -> Mistakes:
    data, model = spec.data, spec.model
    if data.kind in ("columns", "interactions", "prepared") and not data.path:
        what = "folder" if data.kind == "prepared" else "file"
        yield conflict("data.path", "", f'data.kind is "{data.kind}" and no {what} is named', "set data.path")
    if data.kind == "columns" and len(data.dense_columns) != model.num_dense:
        yield conflict("data.dense_columns", list(data.dense_columns),
                       f"names {len(data.dense_columns)} columns, but model.num_dense is {model.num_dense}",
                       f"set model.num_dense = {len(data.dense_columns)}")
    if data.kind == "prepared":
        yield from _prepare_mistakes(data, spec.features)
    if data.kind == "synthetic" and data.path:
        yield conflict("data.path", data.path, 'is not read while data.kind is "synthetic"',
                       'set data.kind = "prepared" or "columns"')
    elif data.kind == "synthetic" and "batch_size" in spec.train.model_fields_set \
            and data.num_train_samples < spec.train.batch_size:
        yield conflict("train.batch_size", spec.train.batch_size,
                       f"is more than the {data.num_train_samples} samples of data.num_train_samples",
                       "make it smaller")


def _prepare_mistakes(data: DataSpec, features: FeaturesSpec) -> Mistakes:
    prepare = data.prepare
    files, is_by_file = prepare.validation_files, prepare.split == "file"
    if is_by_file and not files:
        yield conflict("data.prepare.validation_files", files, 'is needed where data.prepare.split is "file"',
                       "name them")
    elif files and not is_by_file:
        yield conflict("data.prepare.validation_files", files,
                       f'has no effect while data.prepare.split is "{prepare.split}"',
                       'set data.prepare.split = "file"')
    if data.eval_fraction + prepare.test_fraction >= 1:
        yield conflict("data.prepare.test_fraction", prepare.test_fraction,
                       f"leaves no training rows next to data.eval_fraction = {data.eval_fraction}",
                       "make one of them smaller")
    yield from _time_mistakes(data, features)
    roles = [data.label, *data.dense_columns, *prepare.sparse_columns, *prepare.list_columns, *prepare.ignored_columns,
             *features.times]
    for name in sorted({n for n in roles if roles.count(n) > 1}):
        yield conflict("data.prepare", name, "the column has two roles", "name it once")


def _time_mistakes(data: DataSpec, features: FeaturesSpec) -> Mistakes:
    prepare, column = data.prepare, data.time_column
    first, last = prepare.validation_from, prepare.test_from
    with_age = [name for name, parts in features.times.items() if "age" in parts]
    if prepare.split == "time" and not column:
        yield conflict("data.time_column", column, 'is needed where data.prepare.split is "time"', "name it")
    elif with_age and column in ("", *with_age):
        yield conflict(f"features.columns.{with_age[0]}.parts", "age", "the age of a column is the time from it to "
                       "another, data.time_column", "name the column that holds the row's own time in data.time_column")
    if prepare.split != "time" and (first or last):
        yield conflict(f"data.prepare.{'validation_from' if first else 'test_from'}", first or last,
                       f'has no effect while data.prepare.split is "{prepare.split}"',
                       'set data.prepare.split = "time"')
    elif last and (not first or moment(last) <= moment(first)):
        yield conflict("data.prepare.test_from", last, f"does not follow data.prepare.validation_from = {first!r}",
                       "test rows are newer than validation rows")
    elif first and prepare.test_fraction:
        yield conflict("data.prepare.test_fraction", prepare.test_fraction,
                       "has no effect next to data.prepare.validation_from", "set data.prepare.test_from instead")


def _train_mistakes(spec: RunSpec) -> Mistakes:
    train, device = spec.train, spec.place.device
    chosen = [("train.optimizer", train.optimizer), *((f"model.tables.{index}.optimizer", table.optimizer or "")
                                                      for index, table in enumerate(spec.model.tables))]
    for field, optimizer in chosen:
        if "adam" in optimizer and device == "cpu":
            yield conflict(field, optimizer, "FBGEMM has no fused Adam on the CPU",
                           'use "rowwise_adagrad", "adagrad" or "sgd", or a GPU')
    yield from _table_mistakes(spec)
    yield from _weight_mistakes(spec)
    if train.engine == "pipeline" and spec.has_bf16_tables:
        yield conflict("train.engine", train.engine, "has no tables in bf16: FBGEMM's training kernels do not",
                       'leave it out, or use "fp16" or "fp32" for the tables')
    yield from penalty_mistakes(spec)
    if train.early_stopping_patience and not train.eval_every:
        yield conflict("train.early_stopping_patience", train.early_stopping_patience,
                       "counts evaluations, and there is none before the end", "set train.eval_every")
    if not train.early_stopping_patience:
        yield from train.unused("train", ("early_stopping_metric", "early_stopping_min_delta"),
                                "while train.early_stopping_patience is 0", "set train.early_stopping_patience")
    if train.decay == "none":
        yield from train.unused("train", ("decay_steps", "decay_start_step"), 'while train.decay is "none"',
                                'set train.decay = "linear", "polynomial" or "cosine"')


def _table_mistakes(spec: RunSpec) -> Mistakes:
    """Find conflicts of the fields by which a table differs from `[train]`."""
    for index, table in enumerate(spec.model.tables):
        where = f"model.tables.{index}"
        of_sequence = [other.name for other in spec.model.tables
                       if other.is_sequence and other.weights == table.weights]
        if table.sharding and of_sequence and table.sharding not in EMBEDDING_SHARDINGS:
            yield conflict(f"{where}.sharding", table.sharding, "TorchRec does not shard tables of sequences by it",
                           f"one of: {', '.join(EMBEDDING_SHARDINGS[1:])}")
        if table.sharding != "data_parallel" or table.shares:
            continue
        optimizer, dtype = table.optimizer or spec.train.optimizer, table.dtype or spec.train.table_dtype
        if "adam" in optimizer:
            yield conflict(f"{where}.sharding", table.sharding, f"{optimizer} of a data-parallel table would move the "
                           "rows that no sample has, too", 'another optimizer for it, such as "rowwise_adagrad"')
        if spec.model.has_dynamic_tables:
            yield conflict(f"{where}.sharding", table.sharding, "a model with dynamic tables has no data-parallel ones",
                           "leave it out")
        if dtype != "fp32":
            yield conflict(f"{where}.sharding", table.sharding, "the sum of gradients over the ranks needs fp32",
                           'dtype = "fp32" for it')


def _weight_mistakes(spec: RunSpec) -> Mistakes:
    """Find conflicts of weighted ids."""
    for index, table in enumerate(spec.model.tables):
        why = fix = ""
        if not table.weights_column:
            continue
        if spec.data.kind == "interactions":
            why, fix = 'data.kind = "interactions" holds no weights', "leave it out, or change data.kind"
        elif spec.model.kind == "two_tower" or spec.model.has_sequences or spec.model.has_dynamic_tables:
            why, fix = "weights are not for two towers, sequences or dynamic tables", "leave it out"
        if why:
            yield conflict(f"model.tables.{index}.weights_column", table.weights_column, why, fix)


def penalty_mistakes(spec: RunSpec) -> Mistakes:
    """Find tables that `train.embedding_l2` cannot penalize; a run asks again, once its data has named the tables."""
    several = [table for table in spec.model.tables if table.multi_hot > 1]
    if spec.train.embedding_l2 and several:
        why = "is a sequence, whose rows are not penalized" if several[0].is_sequence else (
            "pools several rows of a sample: FBGEMM returns their sum or mean alone, so a penalty on each one "
            "has no gradient")
        yield conflict("train.embedding_l2", spec.train.embedding_l2, f"table {several[0].name} {why}",
                       "leave it out, or set multi_hot = 1; train.weight_decay and model.dropout regularize too")


def _cluster_mistakes(spec: RunSpec) -> Mistakes:
    place = spec.place
    if not place.is_existing:
        yield from place.unused("place", EXISTING_FIELDS, 'with place.cluster = "create"',
                                'set place.cluster = "existing", or leave it out')
        return
    yield from place.unused("place", ("capacity", "reservation"), "in a cluster that exists", "leave it out")
    if place.target not in CLUSTER_TARGETS:
        yield conflict("place.cluster", place.cluster, f'place.target = "{place.target}" does not run in a cluster',
                       f"leave it out, or set place.target to one of {', '.join(CLUSTER_TARGETS)}")
    elif place.volume and not place.claim:
        yield conflict("place.volume", place.volume, "no volume is created in a cluster that exists",
                       "set place.claim to a PersistentVolumeClaim of place.namespace")


def _elastic_mistakes(spec: RunSpec) -> Mistakes:
    place, serve = spec.place, spec.serve
    if serve.min_replicas > serve.max_replicas:
        yield conflict("serve.min_replicas", serve.min_replicas,
                       f"is more than serve.max_replicas = {serve.max_replicas}", "swap them")
    said = f"min {place.min_nodes}, max {place.max_nodes}"
    if place.min_nodes > place.max_nodes:
        yield conflict("place.nodes", said, "min is more than max", "swap them")
    if not place.is_elastic:
        return
    if place.target not in ELASTIC_TARGETS:
        yield conflict("place.nodes", said,
                       f'place.target = "{place.target}" needs a fixed number of machines',
                       f"set it to {place.max_nodes}, or place.target to one of {', '.join(ELASTIC_TARGETS)}")
    if others := [target for target in place.render_targets if target not in ELASTIC_TARGETS]:
        yield conflict("place.render_targets", ", ".join(others), "need a fixed number of machines, and place.nodes is "
                       "a range", f"leave them out, or set place.nodes = {place.max_nodes}")
    if place.device in ("jax", "tpu"):
        yield conflict("place.nodes", said,
                       "the JAX trainer needs a fixed number of machines", f"set it to {place.max_nodes}")
    # Whatever the number of ranks on each machine, the machines share the batch first.
    yield from batch_mistakes(spec.train.batch_size, place.node_counts, "machines")
