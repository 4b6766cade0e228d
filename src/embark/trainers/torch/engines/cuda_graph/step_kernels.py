"""Triton kernels that begin a step and that count its metrics.

Two kernels do what `MetricWindow.accumulate` needs some thirty for: at small batches each launch costs as much as its
work.
"""

import triton
import triton.language as tl
from torch import Tensor

from embark.run.evaluation import LARGEST_LOGIT, NUM_BINS

SAMPLES = 256  # Samples of a program.
NUM_SUMS = 4  # Log loss, predicted clicks, clicks, logits that are no numbers.


def partial_shape(num_samples: int) -> tuple[int, int]:
    """Shape of what the two kernels of `measure` hand each other."""
    return triton.cdiv(num_samples, SAMPLES), NUM_SUMS


def measure(
    logits: Tensor, label: Tensor, counts: Tensor, sums: Tensor, partial: Tensor, bad_loss: Tensor, step: Tensor
) -> None:
    """Add a batch to the window's `counts` and `sums`; `bad_loss` keeps the first step whose loss is not finite.

    A label of NaN is that of a row that is no prediction.
    """
    _measure[(partial.shape[0],)](
        logits, label, counts, partial, logits.numel(), NUM_BINS / (2 * LARGEST_LOGIT), LARGEST_LOGIT,
        BINS=NUM_BINS, SAMPLES=SAMPLES, num_warps=4,
    )
    _add_up[(1,)](partial, sums, bad_loss, step, partial.shape[0], PROGRAMS=triton.next_power_of_2(partial.shape[0]),
                  num_warps=4)


@triton.jit
def _measure(
    logits, label, counts, partial, num_samples, bins_per_logit, largest, BINS: tl.constexpr, SAMPLES: tl.constexpr
):
    program = tl.program_id(0)
    at = program * SAMPLES + tl.arange(0, SAMPLES)
    is_sample = at < num_samples
    logit = tl.load(logits + at, mask=is_sample, other=0.0)
    clicked = tl.load(label + at, mask=is_sample, other=0.0)
    is_sample &= clicked == clicked
    clicked = tl.where(is_sample, clicked, 0.0)
    loss = tl.maximum(logit, 0.0) - logit * clicked + tl.log(1.0 + tl.exp(-tl.abs(logit)))
    loss = tl.where(logit == logit, loss, logit)  # a maximum may lose NaN
    chance = 1.0 / (1.0 + tl.exp(-logit))
    is_bad = is_sample & ((logit != logit) | (tl.abs(logit) == float("inf")))
    to = partial + program * 4
    tl.store(to, tl.sum(tl.where(is_sample, loss, 0.0), axis=0))
    tl.store(to + 1, tl.sum(tl.where(is_sample, chance, 0.0), axis=0))
    tl.store(to + 2, tl.sum(clicked, axis=0))
    tl.store(to + 3, tl.sum(is_bad.to(tl.float32), axis=0))
    within = tl.where(logit == logit, logit, 0.0)
    within = tl.minimum(tl.maximum(within, -largest), largest)
    bin_ = tl.minimum(((within + largest) * bins_per_logit).to(tl.int32), BINS - 1)
    # Whole numbers: their sum does not depend on the order.
    tl.atomic_add(counts + bin_ + clicked.to(tl.int32) * BINS, tl.full([SAMPLES], 1.0, tl.float64), mask=is_sample)


@triton.jit
def _add_up(partial, sums, bad_loss, step, num_programs, PROGRAMS: tl.constexpr):
    at = tl.arange(0, PROGRAMS)
    is_program = at < num_programs
    for which in tl.static_range(3):
        total = tl.sum(tl.load(partial + at * 4 + which, mask=is_program, other=0.0).to(tl.float64), axis=0)
        tl.store(sums + which, tl.load(sums + which) + total)
    if tl.sum(tl.load(partial + at * 4 + 3, mask=is_program, other=0.0), axis=0) > 0:
        tl.store(bad_loss, tl.minimum(tl.load(bad_loss), tl.load(step)))


BLOCK = 512


def start(dense: Tensor, inputs: Tensor, step: Tensor, rows: Tensor, rates: Tensor) -> None:
    """Count the step, copy its row of `rows` to `rates`, and `dense` to the first columns of `inputs`."""
    num_rows, num_rates = rows.shape
    _start[(1 + triton.cdiv(dense.numel(), BLOCK),)](
        dense, inputs, step, rows, rates, dense.numel(), dense.shape[1], dense.stride(0), inputs.stride(0), num_rates,
        NUM_ROWS=num_rows, RATES=triton.next_power_of_2(num_rates), SIZE=BLOCK, num_warps=4,
    )


@triton.jit
def _start(
    dense, inputs, step, rows, rates, num_values, width, dense_stride, stride, num_rates, NUM_ROWS: tl.constexpr,
    RATES: tl.constexpr, SIZE: tl.constexpr,
):
    if tl.program_id(0) == 0:
        number = tl.load(step) + 1
        which = tl.arange(0, RATES)
        row = tl.load(rows + number % NUM_ROWS * num_rates + which, mask=which < num_rates)
        tl.store(rates + which, row, mask=which < num_rates)
        tl.debug_barrier()  # all its threads have read the last one's
        tl.store(step, number)
    else:
        at = (tl.program_id(0) - 1) * SIZE + tl.arange(0, SIZE)
        sample = (at // width).to(tl.int64)
        value = tl.load(dense + sample * dense_stride + at % width, mask=at < num_values, other=0.0)
        tl.store(inputs + sample * stride + at % width, value.to(inputs.dtype.element_ty), mask=at < num_values)
