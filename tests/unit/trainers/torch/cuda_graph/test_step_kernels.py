"""The window that two kernels fill is the one that torch fills."""

from __future__ import annotations

import pytest
import torch

from embark.trainers.torch.metrics import MetricWindow

NO_STEP = torch.iinfo(torch.int64).max


def measured(kernels, logits: torch.Tensor, label: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Counts, sums and the first bad step after two batches in steps 7 and 8."""
    from embark.trainers.torch.engines.cuda_graph import step_kernels

    window, bad_loss = MetricWindow(torch.device("cpu")), torch.tensor([NO_STEP])
    partial = torch.full(step_kernels.partial_shape(len(label)), torch.nan)
    for step in (7, 8):
        step_kernels.measure(logits, label, *window.on_device, partial, bad_loss, torch.tensor([step]))
    return list(window.on_device), int(bad_loss)


def test_counts_and_sums_are_those_of_torch(kernels):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(700, generator=generator) * 6  # some beyond the outermost bins
    label = torch.randint(0, 2, (700,), generator=generator).float()
    (counts, sums), bad_loss = measured(kernels, logits, label)
    plain = MetricWindow(torch.device("cpu"))
    for _ in range(2):
        plain.accumulate(logits, label)
    assert torch.equal(counts, plain.on_device[0])
    assert counts.sum() == 1400
    torch.testing.assert_close(sums, plain.on_device[1], rtol=1e-6, atol=0)
    assert bad_loss == NO_STEP


def test_rows_that_are_no_prediction_count_nowhere(kernels):
    generator = torch.Generator().manual_seed(4)
    logits, label = torch.randn(300, generator=generator), torch.ones(300)
    label[::3] = torch.nan
    logits[3] = torch.nan
    is_counted = ~label.isnan()
    (counts, sums), bad_loss = measured(kernels, logits, label)
    (wanted_counts, wanted_sums), _ = measured(kernels, logits[is_counted], label[is_counted])
    assert torch.equal(counts, wanted_counts)
    torch.testing.assert_close(sums, wanted_sums)
    assert bad_loss == NO_STEP
    plain = MetricWindow(torch.device("cpu"))
    for _ in range(2):
        plain.accumulate(logits.nan_to_num(), label.nan_to_num(), is_counted.float())
    assert torch.equal(counts, plain.on_device[0])
    torch.testing.assert_close(sums, plain.on_device[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_is_noted_with_its_first_step(kernels, bad):
    logits = torch.zeros(300)
    logits[299] = bad
    (counts, sums), bad_loss = measured(kernels, logits, torch.zeros(300))
    assert bad_loss == 7
    assert not sums[0].isfinite()
    assert counts.sum() == 600
