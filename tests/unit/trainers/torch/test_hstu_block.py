"""A fused block of HSTU against the plain one: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from embark.trainers.torch.networks import sequences
from embark.trainers.torch.networks.jagged import JaggedLayout
from embark.trainers.torch.networks.layers import SequenceDropout
from embark.trainers.torch.networks.sequences import HSTUBlock, Rows


def block_of(dim, num_heads, max_length, dropout, *, times):
    """An HSTUBlock whose norms and biases are not those of the start."""
    block = HSTUBlock.__new__(HSTUBlock)
    nn.Module.__init__(block)
    block.num_heads, block.max_length = num_heads, max_length
    block.norm, block.attended_norm = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
    block.uvqk, block.out = nn.Linear(dim, 4 * dim), nn.Linear(dim, dim)
    block.position_bias = nn.Parameter(torch.randn(2 * max_length - 1))
    block.time_bias = nn.Parameter(torch.randn(32)) if times else None
    block.dropout = SequenceDropout(dropout)
    block.dropout.key, block.dropout.first_sample = 0xC0FFEE12, 3
    for layer in (block.norm, block.attended_norm):
        nn.init.normal_(layer.weight, mean=1.0, std=0.1)
        nn.init.normal_(layer.bias, std=0.1)
    return block


def both_ways(lengths, tail, dim, num_heads, *, dropout, times, device, wide=torch.float32, dtype=None):
    """Output and gradients of the fused block, and of the plain one in `wide`, of as many rows as samples have."""
    from embark.trainers.torch.networks.hstu_block_kernels import fused_block

    torch.manual_seed(5)
    total, max_length = sum(lengths), max(lengths) + 2
    block = block_of(dim, num_heads, max_length, dropout, times=times).to(device)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    values, grad = torch.randn(2, total + tail, dim, device=device)
    stamps = torch.randint(0, 3_000_000, (total + tail,), device=device).cumsum(0) if times else None
    numbers = torch.arange(total + tail, device=device) * 7
    found = []
    for is_fused in (True, False):
        own = copy.deepcopy(block) if is_fused else copy.deepcopy(block).to(wide)
        rows = (values if is_fused else values[:total].to(wide)).detach().requires_grad_()
        with torch.autocast(device, dtype or torch.bfloat16, enabled=is_fused and dtype is not None):
            if is_fused:
                out = fused_block(own, rows, stamps, JaggedLayout(offsets, total + tail),
                                  own.dropout.drawn(numbers, 100))
            else:
                known = None if stamps is None else stamps[:total]
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(sequences, "uses_kernels", lambda *_: False)
                    out = own(rows, Rows(offsets, known, JaggedLayout(offsets, total), (numbers[:total], 100)))
        (out * (grad if is_fused else grad[:total]).to(out.dtype)).sum().backward()
        found.append({"out": out.detach(), "rows": rows.grad,
                      **{name: value.grad for name, value in own.named_parameters()}})
    return found


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("lengths", "dim", "num_heads", "dropout", "times"), [
    ((5, 0, 1, 37), 32, 2, 0.3, True), ((20, 3), 24, 1, 0.0, False)])
def test_a_fused_block_computes_what_a_plain_one_does(lengths, dim, num_heads, dropout, times):
    fused, plain = both_ways(lengths, 0, dim, num_heads, dropout=dropout, times=times, device=DEVICE,
                             wide=torch.float64)
    assert fused.keys() == plain.keys()
    for name, wanted in plain.items():
        torch.testing.assert_close(fused[name], wanted.float(), atol=3e-4, rtol=1e-3, msg=lambda text, n=name: n + text)


def test_rows_behind_the_last_sample_are_zeros_and_change_nothing():
    fused, plain = both_ways((5, 9), 19, 16, 1, dropout=0.3, times=True, device=DEVICE, wide=torch.float64)
    for name in ("out", "rows"):
        assert torch.count_nonzero(fused[name][14:]) == 0
        fused[name] = fused[name][:14]
    for name, wanted in plain.items():
        torch.testing.assert_close(fused[name], wanted.float(), atol=3e-4, rtol=1e-3)


@pytest.mark.gpu
def test_in_bf16_a_fused_block_is_as_near_as_bf16_is():
    cases = [both_ways((300, 0, 129, 1, 64), 40, 128, 2, dropout=0.3, times=True, device="cuda", dtype=torch.bfloat16)
             for _ in range(2)]
    fused, plain = cases[0]
    for name, wanted in plain.items():
        found = fused[name][:len(wanted)].float()
        assert (found - wanted).square().mean().sqrt() < 2**-6 * wanted.square().mean().sqrt(), name
    assert all(torch.equal(fused[name], cases[1][0][name]) for name in fused)
