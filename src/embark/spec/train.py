"""`[train]`: how the model is trained."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from embark.spec.held_out_metrics import HeldOutMetric
from embark.spec.model import TableDtype, TableOptimizer, TableSharding
from embark.spec.section import Section


class TrainSpec(Section):
    """Batch size, schedule, optimizers, precision, sharding."""

    batch_size: PositiveInt = 2048
    """Global batch size: samples per step over all ranks. If left out, less on little data: 400 steps an epoch."""
    num_epochs: PositiveInt = 1
    """Passes over the training data."""
    num_steps: NonNegativeInt = 0
    """Stop after this many steps; 0: after `num_epochs`."""
    learning_rate: float = Field(default=0.01, ge=0)
    """Learning rate of the tables, and of the dense layers unless `dense_learning_rate` is given."""
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
    sharding: Literal["auto"] | TableSharding = "auto"
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
    """The held-out metric that must improve."""
    early_stopping_min_delta: float = Field(default=0.0, ge=0)
    """A change of the metric by no more than this is no improvement."""
    seed: NonNegativeInt = 1
    """Seed of the initial weights, which are the same at any number of ranks."""
    warm_start: str = ""
    """A run (its directory, its name under `store.root` or its URI; `@STEP` or `@best` for a checkpoint of it) whose
    newest complete checkpoint gives a new run its tables and dense weights; optimizer state and steps begin anew. A run
    that resumes does not read it."""
