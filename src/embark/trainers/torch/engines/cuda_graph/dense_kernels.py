"""Triton kernels of the dense network: what cuBLAS does not do in one pass.

Sums over the batch are kept for a fixed number of portions of it and added up afterwards, so that a run repeats to
the bit.
"""

import torch
import triton
import triton.language as tl
import triton.language.extra.cuda
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import FEW_SAMPLES

CAN_WAIT = tl.constexpr(torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0))
EARLY = {"launch_pdl": True} if CAN_WAIT.value else {}
"""How a kernel that begins with `wait_for_inputs` is launched."""


@triton.jit
def wait_for_inputs():
    """Wait until the kernels in front have ended; before it, nothing may be read or written.

    Programmatic dependent launch, from compute capability 9.0 on: a kernel is on its way to the multiprocessors before
    the one in front of it has ended, and waits there.
    """
    if CAN_WAIT:
        tl.extra.cuda.gdc_wait()


MAX_VECTORS = 64  # More would not fit the registers.
HEAD_VALUES = 2048  # Values of the input that a program reads at a time.
HEAD_WARPS = 1
MAX_PORTIONS = 1024
SGD = tl.constexpr(0)
ADAGRAD = tl.constexpr(1)
ADAM = tl.constexpr(2)


def num_portions(num_samples: int) -> int:
    """Number of portions of the batch whose sums are kept apart: enough to keep a large card's multiprocessors busy."""
    return min(MAX_PORTIONS, max(128, num_samples // 64))


def interact(
    bottom: Tensor | None, pooled: Tensor, out: Tensor, *, num_vectors: int, dim: int, input_precision: str = "ieee"
) -> None:
    """Write the vectors that are passed on, then the dots of all pairs i < j, into the first columns of `out`."""
    grid = (pooled.shape[0],)
    _interact[grid](
        pooled if bottom is None else bottom, pooled, out, 0 if bottom is None else bottom.stride(0), pooled.stride(0),
        out.stride(0), N=num_vectors,
        VECTORS=max(16, triton.next_power_of_2(num_vectors)), D=dim, DIM=max(16, triton.next_power_of_2(dim)),
        HAS_BOTTOM=bottom is not None, INPUT_PRECISION=input_precision, num_warps=1 if dim <= 64 else 2, **EARLY,
    )


def interact_backward(
    bottom: Tensor | None, pooled: Tensor, grad: Tensor, grad_bottom: Tensor | None, grad_pooled: Tensor,
    *, num_vectors: int, dim: int,
) -> None:
    """Compute the gradients of `interact`'s inputs from that of its output."""
    grid = (pooled.shape[0],)
    _interact_backward[grid](
        pooled if bottom is None else bottom, pooled, grad, grad_pooled if grad_bottom is None else grad_bottom,
        grad_pooled, 0 if bottom is None else bottom.stride(0), pooled.stride(0), grad_pooled.stride(0), grad.stride(0),
        N=num_vectors,
        VECTORS=max(16, triton.next_power_of_2(num_vectors)), D=dim, DIM=max(16, triton.next_power_of_2(dim)),
        HAS_BOTTOM=bottom is not None, num_warps=1 if dim <= 64 else 2, **EARLY,
    )


def relu_backward(grad: Tensor, active: Tensor | None, sums: Tensor) -> None:
    """Zero `grad` in place where `active` is not above zero, and write its column sums, by portions, into `sums`."""
    num_samples, width = grad.shape
    rows = triton.cdiv(num_samples, sums.shape[0])
    block = 64 if width <= 64 else 128
    _relu_backward[(sums.shape[0], triton.cdiv(width, block))](
        grad, grad if active is None else active, sums, num_samples, width, grad.stride(0),
        grad.stride(0) if active is None else active.stride(0), sums.stride(0), rows,
        HAS_RELU=active is not None, ROWS=min(16, triton.next_power_of_2(rows)), COLUMNS=block, num_warps=2, **EARLY,
    )


def add_up(sums: Tensor, out: Tensor) -> None:
    """Sum over the portions."""
    portions, width = sums.shape
    _add_up[(triton.cdiv(width, 16),)](sums, out, portions, width, sums.stride(0), ROWS=128, COLUMNS=16, num_warps=4,
                                       **EARLY)


def head(
    active: Tensor, weight: Tensor, bias: Tensor, label: Tensor, logits: Tensor, grad: Tensor, sums: Tensor,
    grad_sums: Tensor, *, width: int, num_global: int, has_relu: bool,
) -> None:
    """Compute the last layer, the loss's gradient and that of the layer before, in one pass over `active`.

    `sums` gets, by portions, the gradient of `weight` and behind it that of `bias`; `grad_sums` the column sums of
    `grad`, which is what the bias of the layer before wants.
    """
    num_samples = active.shape[0]
    rows = triton.cdiv(num_samples, sums.shape[0])
    _head[(sums.shape[0],)](
        active, weight, bias, label, logits, grad, sums, grad_sums, num_samples, width, active.stride(0),
        grad.stride(0), sums.stride(0), grad_sums.stride(0), rows, 1.0 / num_global, HAS_RELU=has_relu,
        ROWS=min(max(1, HEAD_VALUES // triton.next_power_of_2(width)), triton.next_power_of_2(rows)),
        WIDTH=triton.next_power_of_2(width), num_warps=max(HEAD_WARPS, triton.next_power_of_2(width) // 512), **EARLY,
    )


def cross(first: Tensor, up: Tensor, crossed: Tensor, out: Tensor) -> None:
    """Compute out = first * up + crossed."""
    _cross[(triton.cdiv(out.numel(), 1024),)](first, up, crossed, out, out.numel(), BLOCK=1024, num_warps=4, **EARLY)


def cross_backward(
    grad: Tensor, first: Tensor, up: Tensor, grad_up: Tensor, grad_first: Tensor, sums: Tensor,
    *, is_first_call: bool, is_last_call: bool,
) -> None:
    """Compute grad_up = grad * first and grad_first (+)= grad * up (+ grad).

    `sums` gets the column sums of grad_up, by portions.
    """
    num_samples, width = grad.shape
    rows = triton.cdiv(num_samples, sums.shape[0])
    _cross_backward[(sums.shape[0], triton.cdiv(width, 128))](
        grad, first, up, grad_up, grad_first, sums, num_samples, width, grad.stride(0), sums.stride(0), rows,
        IS_FIRST=is_first_call, IS_LAST=is_last_call, ROWS=min(16, triton.next_power_of_2(rows)), COLUMNS=128,
        num_warps=4, **EARLY,
    )


def optimizer_step(
    master: Tensor, indices: Tensor, grads: Tensor, shadow: Tensor, state: Tensor, second_state: Tensor, rates: Tensor,
    step: Tensor, decays: Tensor | None, *, optimizer: str, eps: float,
) -> None:
    """Do one step of the dense optimizer over all parameters, and round the copy that the next step computes with.

    `decays` is the weight decay of each value.
    """
    kind = {"sgd": SGD, "adagrad": ADAGRAD, "adam": ADAM}[optimizer].value
    _optimizer_step[(triton.cdiv(master.numel(), 1024),)](
        master, indices, grads, shadow, state, second_state, rates, step, decays, master.numel(), eps, KIND=kind,
        BLOCK=1024, num_warps=4, **EARLY,
    )


@triton.jit
def _vectors(
    bottom, pooled, sample, bottom_stride, pooled_stride, N: tl.constexpr, VECTORS: tl.constexpr, D: tl.constexpr,
    DIM: tl.constexpr, HAS_BOTTOM: tl.constexpr,
):
    vector = tl.arange(0, VECTORS)
    columns = tl.arange(0, DIM)
    is_column = (columns < D)[None, :]
    offset = 1 if HAS_BOTTOM else 0
    at = pooled + sample * pooled_stride + (vector - offset)[:, None] * D + columns[None, :]
    is_pooled = ((vector >= offset) & (vector < N))[:, None] & is_column
    vectors = tl.load(at, mask=is_pooled, other=0.0)
    if HAS_BOTTOM:
        first = tl.load(bottom + sample * bottom_stride + columns, mask=columns < D, other=0.0)
        vectors = tl.where((vector == 0)[:, None], first[None, :], vectors)
    return vectors


@triton.jit
def _interact(
    bottom, pooled, out, bottom_stride, pooled_stride, out_stride, N: tl.constexpr, VECTORS: tl.constexpr,
    D: tl.constexpr, DIM: tl.constexpr, HAS_BOTTOM: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):
    wait_for_inputs()
    sample = tl.program_id(0).to(tl.int64)
    vectors = _vectors(bottom, pooled, sample, bottom_stride, pooled_stride, N, VECTORS, D, DIM, HAS_BOTTOM)
    dots = tl.dot(vectors, tl.trans(vectors), input_precision=INPUT_PRECISION)
    first = tl.arange(0, VECTORS)[:, None]
    second = tl.arange(0, VECTORS)[None, :]
    columns = tl.arange(0, DIM)
    to = out + sample * out_stride
    passed_on: tl.constexpr = D if HAS_BOTTOM else N * D
    if HAS_BOTTOM:
        passed = tl.load(bottom + sample * bottom_stride + columns, mask=columns < D, other=0.0)
        tl.store(to + columns, passed, mask=columns < D)
    else:
        is_value = (first < N) & (columns < D)[None, :]
        tl.store(to + first * D + columns[None, :], vectors, mask=is_value)
    pair = first * (2 * N - first - 1) // 2 + second - first - 1
    tl.store(to + passed_on + pair, dots.to(out.dtype.element_ty), mask=(first < second) & (second < N))


@triton.jit
def _interact_backward(
    bottom, pooled, grad, grad_bottom, grad_pooled, bottom_stride, pooled_stride, grad_pooled_stride, grad_stride,
    N: tl.constexpr, VECTORS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, HAS_BOTTOM: tl.constexpr,
):
    wait_for_inputs()
    sample = tl.program_id(0).to(tl.int64)
    vectors = _vectors(bottom, pooled, sample, bottom_stride, pooled_stride, N, VECTORS, D, DIM, HAS_BOTTOM)
    first = tl.arange(0, VECTORS)[:, None]
    second = tl.arange(0, VECTORS)[None, :]
    low = tl.minimum(first, second)
    high = tl.maximum(first, second)
    pair = low * (2 * N - low - 1) // 2 + high - low - 1
    passed_on: tl.constexpr = D if HAS_BOTTOM else N * D
    come = grad + sample * grad_stride
    cells = tl.load(come + passed_on + pair, mask=(low < high) & (high < N), other=0.0)
    back = tl.dot(cells, vectors, input_precision="ieee")
    vector = tl.arange(0, VECTORS)
    columns = tl.arange(0, DIM)
    is_value = (vector < N)[:, None] & (columns < D)[None, :]
    if HAS_BOTTOM:
        passed = tl.load(come + columns, mask=columns < D, other=0.0).to(tl.float32)
        back += tl.where((vector == 0)[:, None], passed[None, :], 0.0)
        to_bottom = tl.broadcast_to((grad_bottom + sample * bottom_stride + columns)[None, :], [VECTORS, DIM])
        tl.store(to_bottom, back.to(grad_bottom.dtype.element_ty), mask=is_value & (vector == 0)[:, None])
    else:
        passed = tl.load(come + vector[:, None] * D + columns[None, :], mask=is_value, other=0.0)
        back += passed.to(tl.float32)
    offset = 1 if HAS_BOTTOM else 0
    to = grad_pooled + sample * grad_pooled_stride + (vector - offset)[:, None] * D + columns[None, :]
    tl.store(to, back.to(grad_pooled.dtype.element_ty), mask=is_value & (vector >= offset)[:, None])


@triton.jit
def _relu_backward(
    grad, active, sums, num_samples, width, grad_stride, active_stride, sums_stride, rows_each,
    HAS_RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    wait_for_inputs()
    portion = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    total = tl.zeros([COLUMNS], tl.float32)
    begin = portion * rows_each
    end = tl.minimum(begin + rows_each, num_samples)
    for start in range(begin, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        is_value = (rows < end)[:, None] & is_column[None, :]
        at = grad + rows.to(tl.int64)[:, None] * grad_stride + columns[None, :]
        value = tl.load(at, mask=is_value, other=0.0)
        if HAS_RELU:
            height = tl.load(active + rows.to(tl.int64)[:, None] * active_stride + columns[None, :], mask=is_value,
                             other=0.0)
            value = tl.where(height > 0, value, 0.0).to(grad.dtype.element_ty)
            tl.store(at, value, mask=is_value)
        total += tl.sum(value.to(tl.float32), axis=0)
    tl.store(sums + portion.to(tl.int64) * sums_stride + columns, total, mask=is_column)


@triton.jit
def _add_up(sums, out, portions, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    wait_for_inputs()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, portions, ROWS):
        rows = start + tl.arange(0, ROWS)
        is_value = (rows < portions)[:, None] & (columns < width)[None, :]
        total += tl.load(sums + rows[:, None] * stride + columns[None, :], mask=is_value, other=0.0)
    tl.store(out + columns, tl.sum(total, axis=0), mask=columns < width)


@triton.jit
def _head(
    active, weight, bias, label, logits, grad, sums, grad_sums, num_samples, width, active_stride, grad_stride,
    sums_stride, grad_sums_stride, rows_each, share, HAS_RELU: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):
    wait_for_inputs()
    portion = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    is_column = columns < width
    factor = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    shift = tl.load(bias).to(tl.float32)
    weight_total = tl.zeros([WIDTH], tl.float32)
    grad_total = tl.zeros([WIDTH], tl.float32)
    bias_total = tl.zeros([ROWS], tl.float32)
    begin = portion * rows_each
    end = tl.minimum(begin + rows_each, num_samples)
    for start in range(begin, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        is_row = rows < end
        is_value = is_row[:, None] & is_column[None, :]
        height = tl.load(active + rows.to(tl.int64)[:, None] * active_stride + columns[None, :], mask=is_value,
                         other=0.0).to(tl.float32)
        logit = tl.sum(height * factor[None, :], axis=1) + shift
        tl.store(logits + rows, logit, mask=is_row)
        chance = 1.0 / (1.0 + tl.exp(-logit))
        slope = (chance - tl.load(label + rows, mask=is_row, other=0.0)) * share
        slope = tl.where(is_row, slope, 0.0)
        back = slope[:, None] * factor[None, :]
        if HAS_RELU:
            back = tl.where(height > 0, back, 0.0)
        back = back.to(grad.dtype.element_ty)
        tl.store(grad + rows.to(tl.int64)[:, None] * grad_stride + columns[None, :], back, mask=is_value)
        grad_total += tl.sum(back.to(tl.float32), axis=0)
        weight_total += tl.sum(height * slope[:, None], axis=0)
        bias_total += slope
    to = sums + portion.to(tl.int64) * sums_stride
    tl.store(to + columns, weight_total, mask=is_column)
    tl.store(to + width, tl.sum(bias_total, axis=0))
    tl.store(grad_sums + portion.to(tl.int64) * grad_sums_stride + columns, grad_total, mask=is_column)


@triton.jit
def _cross(first, up, crossed, out, num_values, BLOCK: tl.constexpr):
    wait_for_inputs()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_value = at < num_values
    value = tl.load(first + at, mask=is_value).to(tl.float32) * tl.load(up + at, mask=is_value).to(tl.float32)
    value += tl.load(crossed + at, mask=is_value).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=is_value)


@triton.jit
def _cross_backward(
    grad, first, up, grad_up, grad_first, sums, num_samples, width, stride, sums_stride, rows_each,
    IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    wait_for_inputs()
    portion = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    begin = portion * rows_each
    end = tl.minimum(begin + rows_each, num_samples)
    for start in range(begin, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        is_value = (rows < end)[:, None] & (columns < width)[None, :]
        at = rows.to(tl.int64)[:, None] * stride + columns[None, :]
        come = tl.load(grad + at, mask=is_value, other=0.0).to(tl.float32)
        to_up = (come * tl.load(first + at, mask=is_value, other=0.0).to(tl.float32)).to(grad_up.dtype.element_ty)
        tl.store(grad_up + at, to_up, mask=is_value)
        to_first = come * tl.load(up + at, mask=is_value, other=0.0).to(tl.float32)
        if not IS_FIRST:
            to_first += tl.load(grad_first + at, mask=is_value, other=0.0).to(tl.float32)
        if IS_LAST:
            to_first += come
        tl.store(grad_first + at, to_first.to(grad_first.dtype.element_ty), mask=is_value)
        total += tl.sum(to_up.to(tl.float32), axis=0)
    tl.store(sums + portion.to(tl.int64) * sums_stride + columns, total, mask=columns < width)


@triton.jit
def _optimizer_step(
    master, indices, grads, shadow, state, second_state, rates, step, decays, num_values, eps, KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_inputs()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_value = at < num_values
    place = tl.load(indices + at, mask=is_value, other=0)
    grad = tl.load(grads + place, mask=is_value, other=0.0)
    value = tl.load(master + at, mask=is_value, other=0.0)
    rate = tl.load(rates)
    kept = value
    if decays is not None:
        kept = value * (1.0 - rate * tl.load(decays + at, mask=is_value, other=0.0))
    if KIND == ADAGRAD:
        squares = tl.load(state + at, mask=is_value, other=0.0) + grad * grad
        tl.store(state + at, squares, mask=is_value)
        change = rate * grad / (tl.sqrt(squares) + eps)
    elif KIND == ADAM:
        count = (tl.load(step) + 1).to(tl.float64)  # 1 - 0.999^n keeps four digits in single precision
        mean = 0.9 * tl.load(state + at, mask=is_value, other=0.0) + 0.1 * grad
        squares = 0.999 * tl.load(second_state + at, mask=is_value, other=0.0) + 0.001 * grad * grad
        tl.store(state + at, mean, mask=is_value)
        tl.store(second_state + at, squares, mask=is_value)
        first_share = (1.0 - tl.exp(count * -0.10536051565782628)).to(tl.float32)
        second_share = (1.0 - tl.exp(count * -0.0010005003335835344)).to(tl.float32)
        change = rate * (mean / first_share) / (tl.sqrt(squares / second_share) + eps)
    else:
        change = rate * grad
    value = tl.where(rate == 0.0, value, kept - change)
    tl.store(master + at, value, mask=is_value)
    tl.store(shadow + place, value.to(shadow.dtype.element_ty), mask=is_value)


ROWS = 64  # Rows of a program and of a portion; a small batch has more portions than that, and the others stay 0.
MANY_ROWS = 128  # Rows of a program and of a portion for larger batches.
MAX_SAMPLES = MAX_PORTIONS * MANY_ROWS
HAS_TMA = CAN_WAIT.value  # Both begin with compute capability 9.0.


def grad_input_relu(grad: Tensor, weight: Tensor, active: Tensor, out: Tensor, sums: Tensor) -> None:
    """Compute grad @ weight where `active` is above zero, else zero; `sums` gets its column sums, by portions."""
    (num_samples, width), depth = out.shape, grad.shape[1]
    step = min(64, max(16, triton.next_power_of_2(depth)))
    grid = (triton.cdiv(num_samples, ROWS) * triton.cdiv(width, 128),)
    _grad_input_relu[grid](
        grad, weight, active, out, sums, num_samples, width, depth, grad.stride(0), weight.stride(0), out.stride(0),
        sums.stride(0), IS_EVEN=depth % step == 0, ROWS=ROWS, COLUMNS=128, DEPTH=step, num_warps=4,
        num_stages=3, **EARLY,
    )


def grad_input_relu_tma(grad: Tensor, weight: Tensor, active: Tensor, out: Tensor, sums: Tensor) -> None:
    """Do what `grad_input_relu` does for up to `MAX_SAMPLES`, in tiles that the hardware copies, if it `HAS_TMA`."""
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
