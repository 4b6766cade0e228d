"""Which fields of a spec decide what a run learns: a run is its model, its data and its order.

Every field of `[model]`, `[data]` and `[train]` stands in exactly one of the two sets; the other sections say where and
how a run is trained, not what.
"""

LEARNING_FIELDS = frozenset({
    "model.kind", "model.code", "model.num_dense", "model.embedding_dim", "model.bottom_mlp", "model.top_mlp",
    "model.dropout", "model.num_cross_layers", "model.cross_rank", "model.tables", "model.two_tower",
    "model.tasks", "model.task_head", "model.num_experts", "model.num_task_experts", "model.num_extraction_layers",
    "model.tower_mlp", "model.sequence",
    "data.kind", "data.code", "data.label", "data.dense_columns", "data.time_column", "data.eval_fraction",
    "data.eval_split", "data.shuffle", "data.on_bad_id", "data.num_train_samples", "data.num_eval_samples",
    "data.zipf_exponent", "data.signal", "data.task_conflict", "data.ragged", "data.seed", "data.interactions",
    "data.drift",
    "train.batch_size", "train.learning_rate", "train.dense_learning_rate", "train.optimizer", "train.dense_optimizer",
    "train.eps", "train.weight_decay", "train.embedding_l2", "train.max_gradient_norm", "train.warmup_steps",
    "train.decay", "train.decay_start_step", "train.decay_steps", "train.final_rate",
    "train.precision", "train.table_dtype", "train.comms_dtype", "train.seed", "train.warm_start",
})
OTHER_FIELDS = frozenset({
    "model.num_tables", "model.rows_per_table",  # they are in model.tables, as the run has them
    "data.path", "data.prepare", "data.cache_gb", "data.cache_dir",  # the data's content counts, not where it lies
    "train.num_epochs", "train.num_steps", "train.eval_every", "train.early_stopping_patience",
    "train.early_stopping_metric", "train.early_stopping_min_delta", "train.sharding", "train.memory_reserve",
    "train.engine",
})
OTHER_SECTIONS = frozenset({"name", "place", "store", "watch", "publish", "serve", "stream"})

KIND_OF_FIELD = {
    **dict.fromkeys(("data.label", "data.dense_columns", "data.time_column", "data.eval_fraction", "data.on_bad_id"),
                    "columns"),
    **dict.fromkeys(("data.eval_split", "data.shuffle"), "prepared"),
    **dict.fromkeys(("data.num_train_samples", "data.num_eval_samples", "data.zipf_exponent", "data.signal",
                     "data.task_conflict", "data.ragged", "data.drift"), "synthetic"),
    "data.interactions": "interactions",
}
"""Fields that have an effect with one `data.kind` only."""

KEY = "identity"  # In a checkpoint's commit record.
DATA = "data"  # The content of the data, beside the fields.
UNRECORDED = "identity"  # A checkpoint that does not say what it was trained with.
ACCEPTABLE = LEARNING_FIELDS | {DATA, UNRECORDED}
"""What `--accept-change` takes."""
