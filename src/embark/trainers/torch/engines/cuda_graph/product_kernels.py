"""The gradient of a layer's input behind its ReLU, with the column sums that are the bias's gradient, in one product.
The sums are those of portions of the batch, as in `dense_kernels`."""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from embark.trainers.torch.engines.cuda_graph.dense_kernels import MAX_PORTIONS
from embark.trainers.torch.engines.cuda_graph.dependent_launch_kernels import CAN_WAIT, EARLY, wait_for_inputs
from embark.trainers.torch.engines.cuda_graph.ops import FEW_SAMPLES

ROWS = 64  # Of a program, and of a portion; a small batch has at least as many portions, and the others stay 0.
MANY_ROWS = 128  # Likewise.
MAX_SAMPLES = MAX_PORTIONS * MANY_ROWS
HAS_TMA = CAN_WAIT.value  # Both begin with compute capability 9.0.


def grad_input_relu(grad: Tensor, weight: Tensor, active: Tensor, out: Tensor, sums: Tensor) -> None:
    """out = grad @ weight where `active` is above zero, else zero; its column sums, by portions, in `sums`."""
    (num_samples, width), depth = out.shape, grad.shape[1]
    step = min(64, max(16, triton.next_power_of_2(depth)))
    grid = (triton.cdiv(num_samples, ROWS) * triton.cdiv(width, 128),)
    _grad_input_relu[grid](
        grad, weight, active, out, sums, num_samples, width, depth, grad.stride(0), weight.stride(0), out.stride(0),
        sums.stride(0), IS_EVEN=depth % step == 0, ROWS=ROWS, COLUMNS=128, DEPTH=step, num_warps=4,
        num_stages=3, **EARLY,
    )


def grad_input_relu_tma(grad: Tensor, weight: Tensor, active: Tensor, out: Tensor, sums: Tensor) -> None:
    """The same for up to `MAX_SAMPLES`, in tiles that the hardware copies, where it `HAS_TMA`."""
    num_samples, width = out.shape
    rows = ROWS if num_samples <= FEW_SAMPLES else MANY_ROWS

    def tiled(matrix: Tensor, *tile: int) -> TensorDescriptor:
        return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(tile))

    _grad_input_relu_tma[(triton.cdiv(num_samples, rows) * triton.cdiv(width, 128),)](
        tiled(grad, rows, 64), tiled(weight, 64, 128), tiled(active, rows, 128), tiled(out, rows, 128), sums, width,
        grad.shape[1], sums.stride(0), ROWS=rows, COLUMNS=128, DEPTH=64, num_warps=4, num_stages=3, **EARLY,
    )


@triton.jit
def _grad_input_relu(
    grad, weight, active, out, sums, num_samples, width, depth, grad_stride, weight_stride, stride, sums_stride,
    IS_EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):
    wait_for_inputs()
    across = tl.cdiv(width, COLUMNS)
    portion = tl.program_id(0) // across
    rows = portion * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_samples, columns < width
    steps = tl.arange(0, DEPTH)
    from_grad = grad + rows.to(tl.int64)[:, None] * grad_stride + steps[None, :]
    from_weight = weight + steps[:, None] * weight_stride + columns[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        if IS_EVEN:
            left = tl.load(from_grad, mask=is_row[:, None], other=0.0)
            right = tl.load(from_weight, mask=is_column[None, :], other=0.0)
        else:
            is_step = start + steps < depth
            left = tl.load(from_grad, mask=is_row[:, None] & is_step[None, :], other=0.0)
            right = tl.load(from_weight, mask=is_step[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        from_grad += DEPTH
        from_weight += DEPTH * weight_stride
    at = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    is_value = is_row[:, None] & is_column[None, :]
    height = tl.load(active + at, mask=is_value, other=0.0)
    value = tl.where(height > 0, total, 0.0).to(out.dtype.element_ty)
    tl.store(out + at, value, mask=is_value)
    tl.store(sums + portion.to(tl.int64) * sums_stride + columns, tl.sum(value.to(tl.float32), axis=0), mask=is_column)


@triton.jit
def _grad_input_relu_tma(
    grad, weight, active, out, sums, width, depth, sums_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A tile's load reads zeros beyond the matrix, and its store writes nothing there."""
    wait_for_inputs()
    across = tl.cdiv(width, COLUMNS)
    portion = tl.program_id(0) // across
    row, column = portion * ROWS, tl.program_id(0) % across * COLUMNS
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        total = tl.dot(grad.load([row, start]), weight.load([start, column]), total)
    height = active.load([row, column])
    value = tl.where(height > 0, total, 0.0).to(height.dtype)
    out.store([row, column], value)
    columns = column + tl.arange(0, COLUMNS)
    tl.store(sums + portion.to(tl.int64) * sums_stride + columns, tl.sum(value.to(tl.float32), axis=0),
             mask=columns < width)
