"""`[train]`: how the model learns."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from embark.spec.section import Section


class TrainSpec(Section):
    """Batch, schedule, optimizers, numbers, sharding."""

    batch_size: PositiveInt = 2048
    """Samples in a step over all ranks together."""
    num_epochs: PositiveInt = 1
    """Times the data is gone through."""
    num_steps: NonNegativeInt = 0
    """Stop after so many steps; 0 goes through all epochs."""
    learning_rate: float = Field(default=0.01, ge=0)
    """Of the tables, and of the dense layers where `dense_learning_rate` is not given."""
    dense_learning_rate: float | None = Field(default=None, ge=0)
    """Of the dense layers."""
    optimizer: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = "rowwise_adagrad"
    """Of the tables; fused into the backward pass. Adam needs a GPU."""
    dense_optimizer: Literal["sgd", "adagrad", "adam"] = "adagrad"
    """Of the dense layers."""
    eps: float = Field(default=1e-8, gt=0)
    """Term that keeps Adagrad's and Adam's denominators from zero."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises linearly from zero; reaches the tables too."""
    decay: Literal["none", "linear", "polynomial", "cosine"] = "none"
    """How the rate falls after the warm-up; reaches the tables too. `polynomial` is of power 2."""
    decay_start_step: NonNegativeInt = 0
    """The first step of the decay; never before the warm-up's end."""
    decay_steps: NonNegativeInt = 0
    """Steps from the full rate to `final_rate`; 0 takes all that are left."""
    final_rate: float = Field(default=0.0, ge=0, le=1)
    """Share of the full rate at which the decay ends."""
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    """Of the dense layers. `auto`: bf16 where the device has matrix units for it, else fp32."""
    table_dtype: Literal["fp32", "fp16"] = "fp32"
    """Of the tables' rows."""
    comms_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Of pooled vectors and their gradients on the wire between ranks."""
    sharding: Literal[
        "auto", "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise"
    ] = "auto"
    """How tables are laid over the ranks; `auto` lets TorchRec's planner choose for each."""
    memory_reserve: float = Field(default=0.15, ge=0, lt=1)
    """Share of each device's memory the planner leaves to activations and buffers."""
    engine: Literal["auto", "cuda_graph", "pipeline"] = "auto"
    """`captured`: the whole step as one CUDA graph. `pipeline`: TorchRec's `TrainPipelineSparseDist`, which takes
    anything. `auto`: `captured` on a GPU where the run allows it."""
    sparsecore: Literal["auto", "on", "off"] = "auto"
    """Look up and move rows of tables on a TPU's SparseCores. `auto`: where the chip has them, jax-tpu-embedding is
    installed and the run allows it. `on`: or not at all."""
    eval_every: NonNegativeInt = 0
    """Evaluate on the held-out samples every so many steps, besides at the end."""
    seed: NonNegativeInt = 1
    """Of the initial weights; the same at any number of ranks."""
