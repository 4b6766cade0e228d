"""`[train]`: how the model is trained, by which held-out metrics, and with which defaults that the data decides."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from embark.errors import Mistake, Mistakes
from embark.values import JsonDict
from .model import POOLED_KINDS, TableDtype, TableOptimizer, TableSharding
from .section import NonNegativeInt, PositiveInt, Section
from .tasks import main_task

if TYPE_CHECKING:
    from .model import ModelSpec
    from .run import RunSpec

HeldOutMetric = Literal["auc", "log_loss", "normalized_entropy", "recall_at_k", "ndcg_at_k", "hit_at_k"]
RANKING_METRICS: tuple[HeldOutMetric, ...] = ("recall_at_k", "ndcg_at_k", "hit_at_k")


def measured_metrics(model: ModelSpec) -> tuple[HeldOutMetric, ...]:
    """Return the metrics of an evaluation of this model, the default one first."""
    if model.kind == "two_tower":
        return RANKING_METRICS
    if model.is_next_item:
        return ("ndcg_at_k", "recall_at_k", "hit_at_k", "auc", "log_loss")
    if model.tasks and main_task(model.tasks) < 0:  # no task is binary
        return ("log_loss",)
    return ("auc", "log_loss", "normalized_entropy")


def metric_mistake(model: ModelSpec, field: str, metric: HeldOutMetric) -> Mistake | None:
    """Find out whether a field names a metric that the model does not have."""
    measured = measured_metrics(model)
    if metric in measured:
        return None
    of_what = "tasks of which none is binary" if measured == ("log_loss",) else f'model.kind = "{model.kind}"'
    return Mistake("", field, metric, f"is not measured of {of_what}", f"use {', '.join(measured)}")


def metric_mistakes(spec: RunSpec) -> Mistakes:
    """Find fields that name such a metric; one that is not used may have its default."""
    for section, (name, is_used) in _metric_fields(spec).items():
        chosen = getattr(spec, section)
        metric = getattr(chosen, name)
        mistake = metric_mistake(spec.model, f"{section}.{name}", metric)
        if mistake is not None and (metric in RANKING_METRICS or (is_used and name in chosen.model_fields_set)):
            yield mistake


def _metric_fields(spec: RunSpec) -> dict[str, tuple[str, bool]]:
    """Return by section the field that names a metric, and whether it is used."""
    return {"train": ("early_stopping_metric", spec.train.early_stopping_patience > 0),
            "store": ("best_by", spec.store.keep_best > 0)}


def _with_metrics(spec: RunSpec) -> RunSpec:
    """Let early stopping and the best checkpoints go by the model's default metric where the spec names none."""
    default = measured_metrics(spec.model)[0]
    for section, (name, is_used) in _metric_fields(spec).items():
        chosen = getattr(spec, section)
        if is_used and name not in chosen.model_fields_set and getattr(chosen, name) != default:
            spec = spec.model_copy(update={section: chosen.model_copy(update={name: default})})
    return spec


class TrainSpec(Section):
    """`[train]`: batch size, schedule, optimizers, precision, sharding."""

    batch_size: PositiveInt = 2048
    """Global batch size: samples per step over all ranks. If left out, less on little data: 400 steps an epoch."""
    num_epochs: PositiveInt = 1
    """Passes over the training data. If this, `num_steps`, `decay` and `early_stopping_patience` are left out, data of
    your own is trained on until early stopping ends it, at most 50 times and 20 million samples."""
    num_steps: NonNegativeInt = 0
    """Stop after this many steps; 0: after `num_epochs`."""
    learning_rate: float = Field(default=0.01, ge=0)
    """Learning rate of the tables, and of the dense layers unless `dense_learning_rate` is given. If no rate and no
    optimizer is named, data of your own is trained with Adam at a rate that the batch decides, and tables at 0.03."""
    dense_learning_rate: float | None = Field(default=None, ge=0)
    """Learning rate of the dense layers. If both rates are left out, 0.001 for Adam."""
    optimizer: TableOptimizer = "rowwise_adagrad"
    """Optimizer of the tables, fused into the backward pass. Adam needs a GPU. `rowwise_adam`: with one second moment
    for a row, the mean over its values."""
    dense_optimizer: Literal["sgd", "adagrad", "adam"] = "adagrad"
    """Optimizer of the dense layers."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of Adagrad and Adam."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay of the dense layers' matrices, not their biases, decoupled as in AdamW: each step first shrinks them by the
    factor 1 − rate × `weight_decay`. The same with SGD and Adagrad, where it is not added to the gradient either."""
    embedding_l2: float = Field(default=0.0, ge=0)
    """L2 penalty on looked-up rows: `embedding_l2` / 2 × the squared norm of the rows of a sample, a mean over the
    batch, added to the loss that is minimized, not to the one that is shown. Rows that no sample has do not shrink. For
    tables with one id per sample."""
    max_gradient_norm: float = Field(default=0.0, ge=0)
    """The gradient of the dense layers, all together, is scaled down to this L2 norm where it is larger; 0: never.
    Gradients of tables are not clipped."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from zero; applies to the tables too. If this and both rates are left out, a quarter of
    an epoch, at most 100, where Adagrad trains a network with dense columns."""
    decay: Literal["none", "linear", "polynomial", "cosine"] = "none"
    """Learning-rate decay after the warm-up; applies to the tables too. `polynomial` has power 2."""
    decay_start_step: NonNegativeInt = 0
    """First step of the decay; never before the end of the warm-up."""
    decay_steps: NonNegativeInt = 0
    """Length of the decay in steps; 0: all remaining steps."""
    final_rate: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the full rate at the end of the decay."""
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    """Precision of the dense layers. `auto`: bf16 if the device has matrix units for it, else fp32."""
    table_dtype: TableDtype = "fp32"
    """Type of the tables' rows. `bf16`: for the CUDA-graph engine only, which `auto` then chooses on a CPU too."""
    comms_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Type of pooled embeddings and their gradients in transfers between ranks."""
    sharding: Literal["auto", TableSharding] = "auto"
    """How tables are sharded over ranks; `auto`: TorchRec's planner decides for each."""
    memory_reserve: float = Field(default=0.15, ge=0, lt=1)
    """Share of device memory the planner reserves for activations and buffers."""
    engine: Literal["auto", "cuda_graph", "pipeline"] = "auto"
    """`cuda_graph`: the complete step as one CUDA graph. `pipeline`: TorchRec's `TrainPipelineSparseDist`, which
    supports any model. `auto`: `cuda_graph` on a GPU if the run allows it."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations on held-out samples; 0: only at the end."""
    early_stopping_patience: NonNegativeInt = 0
    """Stop after this many evaluations in a row without an improvement; 0: never. Needs `eval_every`. The checkpoint of
    the best evaluation is saved and kept; `RUN@best` names it."""
    early_stopping_metric: HeldOutMetric = "auc"
    """The held-out metric that must improve. If left out, `recall_at_k` for two towers, `ndcg_at_k` for the next item,
    `log_loss` for tasks of which none is binary."""
    early_stopping_min_delta: float = Field(default=0.0, ge=0)
    """A change of the metric by no more than this is no improvement."""
    dense_init: Literal["uniform", "centered"] = "uniform"
    """Initial weights of the bottom MLP. `centered`: as if each dense column had been standardized, and each unit
    shifted to a mean of zero before its ReLU, by the first training rows, so that no unit is zero for all rows. The
    choice for data of your own where no rate and no optimizer is named, and small tables begin small with it
    (`init_range`); with JAX it has no effect on the bottom MLP."""
    seed: NonNegativeInt = 1
    """Seed of the initial weights, which are the same at any number of ranks."""
    warm_start: str = ""
    """A run (its directory, its name under `store.root` or its URI; `@STEP` or `@best` for a checkpoint of it) whose
    newest complete checkpoint gives a new run its tables and dense weights; optimizer state and steps begin anew. A run
    that resumes does not read it."""

    omitted = ("dense_init",)
    default_of_model = ("early_stopping_metric",)


def divides(batch_size: int, num_ranks: int) -> bool:
    """Tell whether every rank gets the same number of samples."""
    return batch_size % num_ranks == 0


def batch_mistakes(batch_size: int, num_ranks: int | Sequence[int], ranks: str = "ranks") -> list[Mistake]:
    """Find out whether `train.batch_size` divides over so many ranks, or over each of several numbers of them, as an
    elastic run may have. `ranks`: what they are called there."""
    counts = [num_ranks] if isinstance(num_ranks, int) else list(num_ranks)
    wrong = [count for count in counts if not divides(batch_size, count)]
    if not wrong:
        return []
    each = math.lcm(*counts)
    lower = batch_size // each * each
    sizes = " or ".join(str(size) for size in (lower, lower + each) if size)
    also = f", and the run may have {counts[0]} to {counts[-1]}" if len(counts) > 1 else ""
    return [Mistake("", "train.batch_size", str(batch_size), f"does not divide over {wrong[0]} {ranks}{also}",
                    f"use {sizes}")]


# Trials behind these numbers: bench/LOG.md, by bench/defaults.py.
LARGEST_BATCH, LARGEST_SHARED_BATCH, SMALLEST_BATCH = 2048, 128, 64
STEPS_PER_EPOCH = 400  # At least so many, where that leaves a batch of SMALLEST_BATCH.
ADAM_RATE, FULL_RATE_BATCH = 0.001, 256  # Adam's rate up to this batch.
TABLE_RATE = 0.03  # Row-wise Adagrad's beside it.
SMALLEST_WIDTH, LARGEST_WIDTH, WIDTH_PER_DIM = 128, 512, 8
SMALLEST_DIM = 16
SIZES = ("embedding_dim", "bottom_mlp", "top_mlp")
SUITED = {*SIZES, "kind", "num_members"}  # Fields of [model] that the data decides.
MOST_WORDS, MEMBERS = 256, 8  # Rows of a table whose values are words, not ids; and members of TabM there.
TABM_STEPS_PER_EPOCH, TABM_FULL_RATE_BATCH = 40, 64  # On little data, up to a batch of FULL_RATE_BATCH.
TPU_MACHINE = re.compile(r"(tpu-)?v\d\w*-\d+$|ct\d")
INIT_RANGE = 0.05  # At most, in tables: √(1 / rows) of few rows gives products that say more than the data.
MAX_EPOCHS, MAX_SAMPLES = 50, 20_000_000
EVALS_PER_EPOCH, PATIENCE, LONG_PATIENCE = 2, 4, 8  # Long where an epoch is soon over.
RATES = frozenset({"learning_rate", "dense_learning_rate"})
DURATION = frozenset({"num_epochs", "num_steps", "decay", "early_stopping_patience"})
"""Fields that say for how long to train."""
MAX_WARMUP_STEPS, WARMUP_SHARE = 100, 4
"""Adagrad's first steps move every weight by the full rate. In a bottom MLP that reads few columns they kill the ReLUs:
the model then ignores its dense columns for good. A quarter of an epoch, at most 100 steps, of warm-up prevents it."""


def suited_batch(
    num_train_samples: int, steps_per_epoch: int = STEPS_PER_EPOCH, largest: int = LARGEST_BATCH
) -> int:
    """Return a batch size for so many samples: a power of two, unless there are fewer samples than that."""
    wanted = max(1, num_train_samples // steps_per_epoch)
    suited = min(largest, max(SMALLEST_BATCH, 1 << (wanted.bit_length() - 1)))
    return max(1, min(suited, num_train_samples))


def suited_sizes(num_train_samples: int) -> JsonDict:
    """Return the widths of a model for so many samples: of its first layers the power of two below their square root,
    which is the class's default from 262,144 samples on."""
    width = 1 << max(1, math.isqrt(num_train_samples)).bit_length() - 1
    width = min(LARGEST_WIDTH, max(SMALLEST_WIDTH, width))
    layers = (width, width // 2)
    return dict(zip(SIZES, (max(SMALLEST_DIM, width // WIDTH_PER_DIM), layers, layers), strict=True))


def with_train_defaults(spec: RunSpec, num_train_samples: int, num_eval_samples: int = 0) -> RunSpec:
    """Fill in the fields of `[train]` and the sizes of `[model]` that the spec leaves out and the data decides; a
    second call changes nothing. The batch stays as it is for retrieval, where the samples of a batch are each other's
    negatives, for the next item of a log that nobody has counted, and for a stream."""
    train, named, changes = spec.train, spec.train.model_fields_set, JsonDict()
    if spec.stream.is_on or spec.model.kind == "two_tower" or (
            spec.model.is_next_item and spec.data.kind != "prepared"):
        if train.dense_optimizer == "adam" and named.isdisjoint(RATES):
            changes["dense_learning_rate"] = ADAM_RATE
        return _changed(spec, changes)
    is_own_data = spec.data.kind != "synthetic"
    is_free = is_own_data and named.isdisjoint({*RATES, "optimizer", "dense_optimizer"})
    # Scores against negatives that a batch shares grow with its square.
    largest = LARGEST_SHARED_BATCH if spec.model.sequence.share_negatives else LARGEST_BATCH
    suited, full_rate_batch = suited_batch(num_train_samples, largest=largest), FULL_RATE_BATCH
    if is_free or (is_own_data and train.dense_init == "centered"):
        spec = _with_suited_model(spec, num_train_samples, is_free)
    if is_free and spec.model.kind == "tabm" and num_train_samples < LARGEST_WIDTH**2:
        suited = suited_batch(num_train_samples, TABM_STEPS_PER_EPOCH, FULL_RATE_BATCH)
        full_rate_batch = TABM_FULL_RATE_BATCH
    if "batch_size" not in named:
        changes["batch_size"] = suited
    batch_size = changes.get("batch_size", train.batch_size)
    if is_free:
        # Fewer, less noisy steps are longer, by the square root of the batch.
        rate = ADAM_RATE * math.sqrt(max(1.0, batch_size / full_rate_batch))
        changes |= {"dense_optimizer": "adam", "learning_rate": TABLE_RATE, "dense_learning_rate": rate,
                    **({} if "dense_init" in named else {"dense_init": "centered"})}
    elif named.isdisjoint(RATES) and train.dense_optimizer == "adam":
        changes["dense_learning_rate"] = ADAM_RATE
    elif train.dense_optimizer == "adagrad" and spec.model.num_dense > 0 and named.isdisjoint({*RATES, "warmup_steps"}):
        # Not by the number of steps to train: a run that is continued for longer must have the same.
        changes["warmup_steps"] = min(MAX_WARMUP_STEPS, num_train_samples // batch_size // WARMUP_SHARE)
    if is_own_data and num_eval_samples and named.isdisjoint(DURATION):
        changes |= _until_it_no_longer_improves(spec, num_train_samples, batch_size)
    return _changed(spec, changes)


def _with_suited_model(spec: RunSpec, num_train_samples: int, is_free: bool) -> RunSpec:
    """Give a model of pooled vectors small initial values in small tables and, if it `is_free`, the kind and the sizes
    that suit the samples."""
    model, changes = spec.model, JsonDict()
    if model.kind not in POOLED_KINDS:
        return spec
    if is_free and suits_members(spec) and num_train_samples < LARGEST_WIDTH**2:
        changes |= {"kind": "tabm", "num_members": MEMBERS}
    left_out = {name: size for name, size in suited_sizes(num_train_samples).items()
                if is_free and name not in model.model_fields_set}
    if any(table.dim for table in model.tables):
        left_out.pop("embedding_dim", None)
    tables = tuple(table.model_copy(update={"init_range": INIT_RANGE})
                   if table.init_range is None and table.rows * INIT_RANGE**2 < 1 else table for table in model.tables)
    if tables != model.tables:
        changes["tables"] = tables
    changes |= left_out
    return spec.model_copy(update={"model": model.model_copy(update=changes)}) if changes else spec


def suits_members(spec: RunSpec) -> bool:
    """Tell whether a spec that names no kind has prepared rows of numbers and words: members that share their weights
    learn more from those than products of vectors, which ids need."""
    model, place = spec.model, spec.place
    is_tpu = place.target == "tpu-vm" or TPU_MACHINE.match(place.machine)
    is_of_jax = place.device in ("jax", "tpu") or (place.device == "auto" and is_tpu)
    return (spec.data.kind == "prepared" and model.num_dense > 0 and not is_of_jax
            and model.model_fields_set.isdisjoint({"kind", "bottom_mlp", "tasks"})
            and all(table.rows <= MOST_WORDS for table in model.table_list()))


def _until_it_no_longer_improves(spec: RunSpec, num_train_samples: int, batch_size: int) -> JsonDict:
    """Return the fields of early stopping, or none where the data is so large that one epoch is the limit."""
    num_epochs = min(MAX_EPOCHS, MAX_SAMPLES // max(1, num_train_samples))
    per_epoch = num_train_samples // batch_size
    if num_epochs < 2 or not per_epoch:
        return {}
    return {"num_epochs": num_epochs, "eval_every": spec.train.eval_every or -(-per_epoch // EVALS_PER_EPOCH),
            "early_stopping_patience": PATIENCE if num_train_samples >= LARGEST_WIDTH**2 else LONG_PATIENCE}


def _changed(spec: RunSpec, changes: JsonDict) -> RunSpec:
    return _with_metrics(spec.model_copy(update={"train": spec.train.model_copy(update=changes)}) if changes else spec)
