"""A run in JAX begins with the numbers that a run in torch begins with."""

from __future__ import annotations

import numpy as np
import pytest

from embark.data import open_source
from embark.spec import PlaceSpec, resolve
from embark.trainers.jax.network import ROWS_PER_BLOCK, initial_dense, initial_rows


@pytest.mark.parametrize("kind", ["dlrm", "dcnv2"])
def test_every_initial_weight_has_the_bits_that_torch_draws(kind):
    from embark.trainers.torch.trainer import TorchTrainer
    from embark.trainers.torch.world import join

    spec = resolve({
        "model": {"kind": kind, "num_dense": 3, "embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16, 600],
                  "num_tables": 2, "rows_per_table": [ROWS_PER_BLOCK + 100, 33], "cross_rank": 4},
        "data": {"num_train_samples": 256}, "train": {"batch_size": 128, "seed": 7},
    })
    with join(PlaceSpec(device="cpu")) as world:
        drawn = TorchTrainer(spec, world, 10, open_source(spec)).model.state_dict()
    for name, values in initial_dense(spec.model, 7).items():
        assert np.array_equal(drawn[f"dense.{name}"].numpy(), values), name
    assert len(initial_dense(spec.model, 7)) == sum(name.startswith("dense.") for name in drawn)
    for table in spec.model.table_list():
        shard = drawn[f"tables.embedding_bags.{table.name}.weight"].local_shards()[0].tensor.numpy()
        blocks = range(-(-table.rows // ROWS_PER_BLOCK))
        assert np.array_equal(shard, np.concatenate([initial_rows(table, block, 7) for block in blocks]))
