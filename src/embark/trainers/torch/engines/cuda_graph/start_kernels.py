"""What a step begins with, in one Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor

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
