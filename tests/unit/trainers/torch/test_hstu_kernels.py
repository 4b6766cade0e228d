"""HSTU's Triton kernels against the eager attention: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from embark.trainers.torch.networks import hstu_attention
from embark.trainers.torch.networks.jagged import JaggedLayout

NUM_BUCKETS = 8


def both_ways(
        monkeypatch, lengths, max_length, heads, widths, *, positions, times, dtype=torch.float32, num_spare=0):
    """By the kernels, and by eager attention with more bits: the output and the gradients of all that has one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator, total = torch.Generator().manual_seed(7), sum(lengths) + num_spare
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(device)  # noqa: E731
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    # Rows that are parts of wider ones, as the model has them, and seconds that come in order.
    parts = [heads * widths[0], heads * widths[0], heads * widths[1]]
    inputs = [one.unflatten(1, (heads, -1)) for one in draw(total, sum(parts)).to(dtype).split(parts, dim=1)]
    inputs += [draw(2 * max_length - 1)] * positions + [draw(NUM_BUCKETS)] * times
    stamps = torch.randint(0, 60, (total,), generator=generator).cumsum(0).to(device) if times else None
    layout = JaggedLayout(offsets, total, max_length * bool(num_spare))
    grad = draw(total, heads, widths[1]).to(dtype)
    found = []
    for is_eager in (False, True):
        wide = torch.float64 if dtype == torch.float32 else torch.float32
        own = [(one.to(wide) if is_eager else one).detach().requires_grad_() for one in inputs]
        monkeypatch.setattr(hstu_attention, "uses_kernels", lambda *_, is_eager=is_eager: not is_eager)
        out = hstu_attention.hstu_attention(
            *own[:3], offsets, max_length, position_bias=own[3] if positions else None, times=stamps,
            time_bias=own[-1] if times else None, layout=layout)
        found.append([out.detach(), *torch.autograd.grad(out, own, grad.to(out.dtype))])
    return found


CASES = [
    ((5, 0, 1, 37, 33), 40, 2, (16, 16), True, True),  # no row, one row, more than a block
    ((70,), 100, 1, (12, 20), True, False),  # widths that are no power of two
    ((0, 3, 0), 3, 1, (16, 16), False, True),
    ((33, 1), 33, 1, (16, 16), False, False),
]


@pytest.mark.parametrize(("lengths", "max_length", "heads", "widths", "positions", "times"), CASES)
def test_values_and_gradients_are_those_of_eager_attention(
        monkeypatch, lengths, max_length, heads, widths, positions, times):
    kernels, eager = both_ways(monkeypatch, lengths, max_length, heads, widths, positions=positions, times=times)
    for mine, wanted in zip(kernels, eager, strict=True):
        torch.testing.assert_close(mine, wanted.float(), atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(("lengths", "max_length", "heads", "widths", "positions", "times"), CASES)
def test_spare_rows_are_zeros_and_have_no_gradients(monkeypatch, lengths, max_length, heads, widths, positions, times):
    kernels, eager = both_ways(
        monkeypatch, lengths, max_length, heads, widths, positions=positions, times=times, num_spare=21)
    for mine, wanted in zip(kernels, eager, strict=True):
        torch.testing.assert_close(mine, wanted.float(), atol=3e-5, rtol=1e-4)
    exact, _ = both_ways(monkeypatch, lengths, max_length, heads, widths, positions=positions, times=times)
    assert kernels[0].shape[0] == exact[0].shape[0] + 21
    for rows in kernels[:4]:
        assert not rows[sum(lengths) :].any()


def test_blocks_that_the_gpu_copies_hold_what_loads_do(monkeypatch):
    """Behind a sample's last row they hold the next one's."""
    from embark.trainers.torch.networks import hstu_kernels

    tile = hstu_kernels.Tile(32, 16, 4, 1, tma=True)
    monkeypatch.setattr(hstu_kernels, "FP32", {**hstu_kernels.FP32, "forward": tile, "keys": tile})
    kernels, eager = both_ways(monkeypatch, (5, 70, 0, 33), 80, 2, (16, 16), positions=True, times=True)
    for mine, wanted in zip(kernels, eager, strict=True):
        torch.testing.assert_close(mine, wanted.float(), atol=3e-5, rtol=1e-4)


def test_sixteen_bits_round_no_more_than_their_products(monkeypatch):
    """fp16: the interpreter does not multiply bf16."""
    kernels, eager = both_ways(monkeypatch, (5, 17), 20, 1, (16, 16), positions=True, times=False, dtype=torch.float16)
    for mine, wanted in zip(kernels, eager, strict=True):
        torch.testing.assert_close(mine.float(), wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "max_length", "heads", "widths", "positions", "times"), [
    ((300, 4096, 0, 129, 2047, 1), 4096, 4, (128, 128), True, True),
    ((1000, 64), 1000, 2, (64, 32), True, False),
    ((700, 128, 128), 1024, 1, (48, 48), False, False)])
def test_in_bf16_they_are_as_near_as_bf16_is(monkeypatch, lengths, max_length, heads, widths, positions, times):
    kernels, eager = both_ways(monkeypatch, lengths, max_length, heads, widths, positions=positions, times=times,
                               dtype=torch.bfloat16)
    for number, (mine, wanted) in enumerate(zip(kernels, eager, strict=True)):
        error = (mine.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        # Gradients of scores are rounded to bf16. In the last bucket millions of them have a sum of 0.7 where the root
        # of the sum of their squares is 12: rounding alone changes such sums by 0.020.
        assert error < (2**-5 if times and number == len(kernels) - 1 else 2**-7)
    again, _ = both_ways(monkeypatch, lengths, max_length, heads, widths, positions=positions, times=times,
                         dtype=torch.bfloat16)
    assert all(map(torch.equal, kernels, again))


@pytest.mark.gpu
def test_a_gpu_takes_the_kernels_and_a_cpu_does_not():
    q = torch.zeros(3, 1, 16)
    assert not hstu_attention.uses_kernels(q, 16)
    assert hstu_attention.uses_kernels(q.cuda(), 16)
