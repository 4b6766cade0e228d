"""Bytes that the two passes hold at their peak are those of torch's own."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from embark.model.work import layers_of
from embark.plan.autograd import _sum_bytes, both_passes
from embark.spec import ModelSpec, Table
from embark.trainers.torch.networks import dense_network

NUM_SAMPLES = 240  # So few that a GPU adds them up without memory of its own.
MODELS = [{"kind": "dlrm", "num_dense": 13}, {"kind": "dlrm", "num_dense": 0}, {"kind": "dcnv2", "num_dense": 13},
          {"kind": "dcnv2", "num_dense": 0}]


class LiveBytes(TorchDispatchMode):
    """Of what is made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {id(arg.untyped_storage()) for arg in args if isinstance(arg, torch.Tensor)} | set(self.sizes)
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and id(storage := tensor.untyped_storage()) not in known:
                self.sizes[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, id(storage), None)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return out


@pytest.mark.parametrize("fields", MODELS, ids=lambda fields: "-".join(map(str, fields.values())))
def test_what_is_counted_is_what_autograd_holds(fields):
    model = ModelSpec(embedding_dim=32, bottom_mlp=(64,), top_mlp=(48, 32), num_cross_layers=2, cross_rank=16, **fields,
                      tables=tuple(Table(name=f"t{number}", rows=100, dim=32) for number in range(5)))
    network, dense = dense_network(model), torch.zeros(NUM_SAMPLES, model.num_dense)
    rows = torch.zeros(NUM_SAMPLES, 160, requires_grad=True)
    with LiveBytes() as live:
        pooled = rows.clone()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = network(dense, pooled)
        outputs.float().mean().backward()
    layers = layers_of(model)
    held = both_passes(layers, 160, NUM_SAMPLES, size=2).peak
    assert held <= live.peak <= held + 5 * layers.num_values  # with copies and gradients of weights


def test_the_gradient_of_a_bias_takes_what_an_h200_showed():
    assert _sum_bytes(1024, num_samples=16_384) == 134_217_728
