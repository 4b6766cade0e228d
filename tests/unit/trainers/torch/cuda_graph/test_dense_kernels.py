"""Each Triton kernel of the dense layers gives what plain torch gives."""

from __future__ import annotations

import pytest
import torch

from embark.model.work import padded
from embark.trainers.torch.engines.cuda_graph.flat_parameters import Head, Layer
from embark.trainers.torch.engines.cuda_graph.ops import TorchOps

PLAIN = TorchOps()
DTYPES = [torch.float32, torch.float16]  # the interpreter knows no bf16
NUM_SAMPLES = 6
PORTIONS = 7
"""Of 300 samples: more rows each than a kernel takes at a time, and fewer in the last."""


def close(mine: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(mine.float(), plain.float(), rtol=tolerance, atol=tolerance)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_vectors", "dim", "has_bottom"),
                         [(27, 16, True), (5, 12, True), (4, 16, False), (1, 16, False), (2, 8, True)])
def test_dots_of_all_pairs_and_their_way_back(kernels, dtype, num_vectors, dim, has_bottom):
    bottom = normal(NUM_SAMPLES, padded(dim), dtype=dtype) if has_bottom else None
    pooled = normal(NUM_SAMPLES, (num_vectors - has_bottom) * dim, dtype=dtype)
    width = padded((dim if has_bottom else num_vectors * dim) + num_vectors * (num_vectors - 1) // 2)
    grad = normal(NUM_SAMPLES, width, dtype=dtype)
    found = []
    for ops in (PLAIN, kernels[1]):
        out = torch.zeros(NUM_SAMPLES, width, dtype=dtype)
        ops.interact(bottom, pooled, out, num_vectors=num_vectors, dim=dim)
        to_bottom = None if bottom is None else torch.zeros_like(bottom)
        to_pooled = torch.zeros_like(pooled)
        ops.interact_backward(bottom, pooled, grad, to_bottom, to_pooled, num_vectors=num_vectors, dim=dim)
        found.append([out, to_pooled, *([] if to_bottom is None else [to_bottom])])
    for plain, mine in zip(*found, strict=True):
        close(mine, plain, dtype)
    assert found[1][1].abs().sum() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_relu", [True, False])
def test_relu_backward_and_its_sums(kernels, dtype, has_relu):
    grad, active = normal(300, 200, dtype=dtype), normal(300, 200, dtype=dtype)
    plain, mine = grad.clone(), grad.clone()
    plain_sums, my_sums = torch.zeros(1, 200), torch.zeros(PORTIONS, 200)
    PLAIN.relu_backward(plain, active if has_relu else None, plain_sums)
    kernels[1].relu_backward(mine, active if has_relu else None, my_sums)
    assert torch.equal(mine, plain)
    close(my_sums.sum(0), plain_sums[0], dtype)


@pytest.mark.parametrize(("name", "few"), [("grad_input_relu", 0), ("grad_input_relu_tma", 0),
                                           ("grad_input_relu_tma", 300)])
@pytest.mark.parametrize("depth", [8, 96, 128])
def test_the_gradient_of_an_input_behind_its_relu(kernels, depth, name, few, monkeypatch):
    """As a product, a ReLU's way back and sums, one after the other."""
    monkeypatch.setattr(kernels[1], "FEW_SAMPLES", few)
    weight, grad, active = (normal(*shape, dtype=torch.float16) for shape in ((depth, 136), (300, depth), (300, 136)))
    plain, mine, plain_sums, my_sums = *(torch.zeros_like(active) for _ in range(2)), torch.zeros(1, 136), torch.zeros(
        PORTIONS, 136)
    PLAIN.grad_input_relu(grad, Layer(weight, None, weight, None), active, plain, plain_sums)
    getattr(kernels[1], name)(grad, weight, active, mine, my_sums)
    torch.testing.assert_close(mine, plain, rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(my_sums.sum(0), mine.float().sum(0), rtol=1e-4, atol=1e-3)
    assert torch.equal(mine == 0, active <= 0)


def test_portions_are_added_up(kernels):
    sums, out = normal(300, 100), torch.zeros(100)
    kernels[1].add_up(sums, out)
    torch.testing.assert_close(out, sums.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [17, 256])
@pytest.mark.parametrize("has_relu", [True, False])
def test_the_last_layer_the_loss_and_the_way_back(kernels, dtype, width, has_relu):
    before = normal(300, padded(width), dtype=dtype)
    before[:, width:] = 0
    active = before.relu() if has_relu else before
    weight, bias = normal(width, dtype=dtype), normal(1, dtype=dtype)
    label = torch.randint(0, 2, (300,)).float()
    found = []
    for ops in (PLAIN, kernels[1]):
        portions = 1 if ops is PLAIN else PORTIONS
        logits, grad = torch.zeros(300), torch.zeros(300, padded(width), dtype=dtype)
        sums, grad_sums = torch.zeros(portions, width + 1), torch.zeros(portions, padded(width))
        arguments = {"num_global": 300, "has_relu": has_relu}
        if ops is PLAIN:
            ops.head(active, Head(weight, bias, sums, width), label, logits, grad, grad_sums, **arguments)
        else:
            ops.head(active, weight, bias, label, logits, grad, sums, grad_sums, width=width, **arguments)
        found.append([logits, grad, sums.sum(0), grad_sums.sum(0)])
    for plain, mine in zip(*found, strict=True):
        close(mine, plain, dtype)
    values = before[:, :width].float().requires_grad_()
    seen = values.relu() if has_relu else values
    torch.nn.functional.binary_cross_entropy_with_logits(seen @ weight.float() + bias.float(), label).backward()
    assert values.grad is not None
    close(found[1][1][:, :width], values.grad, dtype)  # and what autograd gives


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_layers_and_their_way_back(kernels, dtype):
    first, up, crossed = (normal(300, 136, dtype=dtype) + at for at in range(3))
    found = []
    for ops in (PLAIN, kernels[1]):
        out, grad_up, grad_first = (torch.zeros_like(first) for _ in range(3))
        sums = torch.zeros(1 if ops is PLAIN else PORTIONS, 136)
        ops.cross(first, up, crossed, out)
        for is_first_call, is_last_call in ((True, False), (False, True)):
            ops.cross_backward(crossed, first, up, grad_up, grad_first, sums, is_first_call=is_first_call,
                               is_last_call=is_last_call)
        found.append([out, grad_up, grad_first, sums.sum(0)])
    for plain, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine.float(), plain.float(), rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize(("rate", "decay"), [(0.05, 0.0), (0.05, 0.4), (0.0, 0.4)])
def test_the_dense_optimizers_are_those_of_torch(kernels, optimizer, rate, decay):
    """One step from a state that has seen gradients: by Triton, by plain torch, and by torch's own optimizer."""
    num_values, num_places = 3000, 4000
    values, grads = normal(num_values), normal(num_places)
    places = torch.randperm(num_places, generator=torch.Generator().manual_seed(3))[:num_values]
    state, second = normal(num_values + 1)[1:].abs(), normal(num_values + 2)[2:].abs()
    decays = torch.where(torch.arange(num_values) % 3 > 0, decay, 0.0) if decay else None
    found = []
    for ops in (PLAIN, kernels[1]):
        master, shadow, one, two = values.clone(), torch.zeros(num_places), state.clone(), second.clone()
        ops.optimizer_step(master, places, grads, shadow, one, two, torch.tensor([rate]), torch.tensor([7]), decays,
                           optimizer=optimizer, eps=1e-8)
        assert torch.equal(shadow[places], master)
        found.append([master, one, two])
    for plain, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)
    parameter = torch.nn.Parameter(values * (1 - rate * (decays if decay else 0)))
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[optimizer]
    own = kind([parameter], lr=rate, **({} if optimizer == "sgd" else {"eps": 1e-8}))
    count = torch.tensor(7.0)
    if optimizer == "adagrad":
        own.state[parameter].update(step=count, sum=state.clone())
    elif optimizer == "adam":
        own.state[parameter].update(step=count, exp_avg=state.clone(), exp_avg_sq=second.clone())
    parameter.grad = grads[places]
    own.step()
    torch.testing.assert_close(found[1][0], parameter.detach(), rtol=1e-5, atol=1e-6)
    if rate == 0:
        assert torch.equal(found[1][0], values)
