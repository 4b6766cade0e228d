"""The kernels find FBGEMM's rows where they are, whatever the widths of the tables beside them."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from embark.trainers.torch.engines.cuda_graph.lookup import (
    Device,
    FbgemmLookup,
    KernelLookup,
    LocalShard,
    LookupPlan,
    Shard,
)

TABLES = [(7, 8), (5, 12), (9, 8), (3, 12), (40, 20)]  # rows, width: only the first begins at a multiple of its width
NUM_SAMPLES, NUM_IDS, RATE, EPS = 50, 2, 0.1, 1e-6


def tables(optimizer: EmbOptimType):
    batch = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in TABLES], optimizer=optimizer,
        learning_rate=RATE, eps=EPS)
    generator = torch.Generator().manual_seed(3)
    batch.weights_host.data = torch.randn(batch.weights_host.shape, generator=generator)
    # Where a GPU has them.
    batch.weights_dev, batch.momentum1_dev = batch.weights_host.data, batch.momentum1_host
    return batch


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("optimizer", [EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD])
def test_rows_and_updates_are_those_of_fbgemm(kernels, optimizer, is_weighted):
    generator = torch.Generator().manual_seed(4)
    ids = torch.cat([torch.randint(-1, rows, (NUM_SAMPLES * NUM_IDS,), generator=generator, dtype=torch.int32)
                     for rows, _ in TABLES])
    width = sum(dim for _, dim in TABLES)
    grads = torch.randn(NUM_SAMPLES, width, generator=generator)
    factors = torch.rand(len(ids), generator=generator) if is_weighted else None
    step = torch.zeros(1, dtype=torch.int64)
    results = []
    for kind in (FbgemmLookup, KernelLookup):
        batch = tables(optimizer)
        plans = [LookupPlan(LocalShard(Shard(0, at, 0, 0, rows, dim), batch, at), at * NUM_SAMPLES * NUM_IDS, NUM_IDS,
                            rows, sum(dim for _, dim in TABLES[:at]), at, 0, 0)
                 for at, (rows, dim) in enumerate(TABLES)]
        if kind is FbgemmLookup:
            lookup = FbgemmLookup(plans, NUM_SAMPLES, 0, step)
        else:
            on_device = Device(torch.tensor([RATE]), step, torch.full((1,), torch.iinfo(torch.int64).max), step)
            lookup = KernelLookup(plans, NUM_SAMPLES, on_device, EPS, 0.0, has_factors=is_weighted)
        out = torch.full((NUM_SAMPLES, width), torch.nan)
        lookup.forward(ids, out, factors)
        lookup.sort(grads)
        lookup.backward(grads)
        results.append((out, batch.weights_host.data.clone(), batch.momentum1_host.clone()))
    for of_fbgemm, of_kernels in zip(*results, strict=True):
        torch.testing.assert_close(of_kernels, of_fbgemm, rtol=1e-5, atol=1e-6)
    assert not torch.equal(results[1][1], tables(optimizer).weights_host)
