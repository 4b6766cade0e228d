"""Each step begins with its own rates, whichever code takes them over."""

from __future__ import annotations

import pytest
import torch

from embark.trainers.torch.engines.cuda_graph.engine import NUM_ROWS, StepRates


@pytest.mark.parametrize("width", [0, 13])
def test_the_kernel_starts_a_step_as_torch_does(kernels, width):
    from embark.trainers.torch.engines.cuda_graph import step_kernels

    dense = torch.arange(1600.0).remainder(97).view(100, 16)[:, :width]
    rows = torch.arange(3.0 * NUM_ROWS).view(NUM_ROWS, 3)
    inputs, step, now = torch.zeros(100, 16, dtype=torch.bfloat16), torch.tensor([NUM_ROWS + 4]), torch.zeros(3)
    step_kernels.start(dense, inputs, step, rows, now)
    assert int(step) == NUM_ROWS + 5
    assert now.tolist() == [15.0, 16.0, 17.0]
    assert torch.equal(inputs[:, :width], dense.to(torch.bfloat16))
    assert not inputs[:, width:].any()


def test_each_step_has_its_rates_from_any_first_step_on():
    rates, first = StepRates(lambda step: [step, -step], torch.device("cpu")), NUM_ROWS + 7
    step, nothing = torch.tensor([first - 1]), torch.zeros(1, 0)
    for number in range(first, first + 2 * NUM_ROWS):
        rates.upload_rates(number)
        rates.start(nothing, nothing, step)
        assert rates.now.tolist() == [number, -number]
    assert int(step) == first + 2 * NUM_ROWS - 1
