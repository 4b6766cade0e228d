"""Layers in int8: exact sums of the quantized numbers, whichever rows share the batch."""

import pytest
import torch
from torch import nn

from embark.trainers.torch.scoring.cpu_layers import Int8Linear, has_int8_products

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")


def layer() -> tuple[nn.Linear, Int8Linear]:
    torch.manual_seed(3)
    linear = nn.Linear(415, 130)
    if not has_int8_products():
        # Where such layers are not used, a processor may add two products of bytes in 16 bits: no two may exceed them.
        with torch.no_grad():
            linear.weight[:, 0] = 2 * linear.weight.abs().amax(1)
            linear.weight[:, 1:4] = 0
    return linear, Int8Linear(linear)


@torch.inference_mode()
def test_the_result_is_that_of_rows_and_weights_rounded_to_127_levels():
    linear, in_int8 = layer()
    rows = torch.randn(40, 415) * torch.logspace(-3, 3, 40)[:, None]
    largest, weight_scale = rows.abs().amax(1, keepdim=True), linear.weight.abs().amax(1) / 127
    sums = (rows * (127 / largest)).round().double() @ (linear.weight / weight_scale[:, None]).round().double().T
    expected = sums * (largest / 127) * weight_scale + linear.bias
    assert torch.allclose(in_int8(rows).double(), expected, rtol=1e-6, atol=1e-6)
    off = (in_int8(rows) - linear(rows)).abs().amax(1) / linear(rows).abs().amax(1)
    assert 0 < off.max() < 0.02


@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_beside_others():
    _, in_int8 = layer()
    rows = torch.randn(33, 415)
    rows[5] *= 1e6
    rows[6] = 0
    together = in_int8(rows)
    assert all(torch.equal(in_int8(rows[i : i + 1])[0], together[i]) for i in range(33))
    assert torch.equal(together[6], in_int8.bias)


@torch.inference_mode()
def test_a_row_that_is_not_finite_stays_so_alone():
    _, in_int8 = layer()
    rows = torch.randn(3, 415)
    rows[0, 7], rows[1, 7] = torch.nan, torch.inf
    assert not in_int8(rows)[:2].isfinite().any()
    assert in_int8(rows)[2].isfinite().all()
