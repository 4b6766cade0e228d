"""The plan's list of the captured engine's buffers is the engine's own."""

from __future__ import annotations

import gc

import pytest
import torch

from embark.plan.fit import one_rank_placement
from embark.plan.memory import cuda_graph_bytes

SHAPES = [(), ("model.kind=dcnv2", "model.cross_rank=8"), ("model.num_dense=0",), ("model.top_mlp=[32, 24]",),
          ("train.dense_optimizer=adam", "model.embedding_dim=16", "train.weight_decay=0.1")]


@pytest.mark.parametrize("sets", SHAPES, ids=str)
def test_layers_and_activations_are_counted_to_the_byte(built, tiny, sets):
    sets = (*sets, "train.engine=cuda_graph", "train.batch_size=512")
    engine = built(*sets).engine
    engine._build(0)
    gc.collect()
    spec = tiny(*sets)
    counted = cuda_graph_bytes(spec, one_rank_placement(spec), 0, "fp32")
    flat, network = engine._flat, engine._network
    of_dense = [flat.master, flat.indices, flat.grads, flat.shadow, flat.sums, flat.state, flat.second_state]
    of_dense += [] if flat.decays is None else [flat.decays]
    assert counted.dense == pytest.approx(_bytes(of_dense), rel=0.02)
    assert counted.inputs == pytest.approx(_bytes(engine._slots), rel=0.02)
    assert counted.layers == pytest.approx(_bytes(_tensors(network)), rel=0.02)


def _tensors(thing, seen=None):
    """Every tensor that an object's buffers are made of, once; what the dense parameters own is left out."""
    seen = {} if seen is None else seen
    for value in vars(thing).values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, torch.Tensor):
                seen[one.untyped_storage().data_ptr()] = one
            elif type(one).__name__ in ("_Dots", "_Crosses"):
                _tensors(one, seen)
    return list(seen.values())


def _bytes(tensors):
    return sum(t.untyped_storage().nbytes() for t in tensors)
