"""Jagged HSTU attention against the same written out sample by sample."""

import math

import torch

from embark.trainers.torch.networks.hstu_attention import hstu_attention, time_bucket
from embark.trainers.torch.networks.jagged import Padding

LENGTHS = (5, 0, 1, 9, 2, 9)
MAX_LENGTH = 12


def plain(q, k, v, offsets, *, position_bias, times, time_bias):
    found = []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        for row in range(start, end):
            total = torch.zeros_like(v[row])
            for key in range(start, row + 1):
                bias = position_bias[row - key + MAX_LENGTH - 1] + time_bias[time_bucket(times[row] - times[key], 8)]
                score = (q[row] * k[key]).sum(dim=1) / math.sqrt(q.shape[-1]) + bias
                total = total + (score * score.sigmoid() / MAX_LENGTH)[:, None] * v[key]
            found.append(total)
    return torch.stack(found)


def test_values_and_gradients_are_those_of_each_sample_alone():
    generator = torch.Generator().manual_seed(1)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    inputs = [draw(sum(LENGTHS), 2, 4), draw(sum(LENGTHS), 2, 4), draw(sum(LENGTHS), 2, 3), draw(2 * MAX_LENGTH - 1),
              draw(8)]
    times = torch.randint(0, 1000, (sum(LENGTHS),), generator=generator)
    weight = draw(sum(LENGTHS), 2, 3)
    found = []
    for attention in (hstu_attention, plain):
        q, k, v, position_bias, time_bias = own = [value.clone().requires_grad_() for value in inputs]
        more = (MAX_LENGTH,) if attention is hstu_attention else ()
        out = attention(q, k, v, offsets, *more, position_bias=position_bias, times=times, time_bias=time_bias)
        (out * weight).sum().backward()
        found.append([out.detach(), *(value.grad for value in own)])
    for mine, wanted in zip(*found, strict=True):
        assert torch.allclose(mine, wanted, atol=1e-10)


def test_padding_comes_back_as_it_went():
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    values = torch.arange(sum(LENGTHS) * 3).view(-1, 3)
    padding = Padding(offsets)
    groups = padding.pad(values)
    assert sorted(tuple(group.shape[:2]) for group in groups) == [(1, 1), (1, 2), (1, 5), (2, 9)]
    assert torch.equal(padding.unpad(groups), values)
