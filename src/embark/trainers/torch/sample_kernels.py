"""A Triton kernel that draws synthetic samples, a block of them at a time, from the first dense feature to the label.

It repeats what `SyntheticSource` computes, operation by operation, without fused multiply-adds.
"""

import triton
import triton.language as tl
from torch import Tensor

from embark.data.synthetic import CURVATURE, HEAD, LATENT_MEAN, LOW
from embark.features.hashing import FIRST, SECOND, STEP

SAMPLES_AT_A_TIME = 128
LOGARITHM, POWER, NEITHER = range(3)
"""What the integral over the ids is: a logarithm, a power, or the number itself."""
_STEP, _FIRST, _SECOND = tl.constexpr(STEP), tl.constexpr(FIRST), tl.constexpr(SECOND)
_CURVATURE, _HEAD = tl.constexpr(CURVATURE), tl.constexpr(float(HEAD))
_LATENT_MEAN, _LOW = tl.constexpr(LATENT_MEAN), tl.constexpr(LOW)
_TO_UNIT = tl.constexpr(2.0**-53)
_BELL_SCALE, _QUARTER_SCALE = tl.constexpr(3**0.5 / 65536), tl.constexpr(12**0.5 / 65536)
_LOGARITHM, _POWER = tl.constexpr(LOGARITHM), tl.constexpr(POWER)


def draw_samples(
    starts: Tensor, dense: Tensor, ids: Tensor, label: Tensor, is_uncertain: Tensor, logits: Tensor, *, keys: Tensor,
    table_keys: Tensor, sizes: Tensor, spans: Tensor, doubles: Tensor, floats: Tensor, num_pairs: int, integral: int,
    is_ragged: bool,
) -> None:
    """Fill K batches of B samples: `dense` [K, B, num_dense], `ids` [K, …]; `label`, `is_uncertain`, `logits` [K, B].

    `keys`: of dense features and labels. By table: `table_keys` (ids, lengths, effects), `sizes` (ids per sample, where
    they begin, whether they are averaged), `spans` (the integral, the last row). `doubles`: the integral's beginning,
    the inverse of its power, the tolerances of ids and labels. `floats`: the dense features' scale, the bias, the
    scales of tables and of pairs, the weights of the dense features.
    """
    num_batches, size = label.shape
    block = SAMPLES_AT_A_TIME if label.is_cuda else triton.next_power_of_2(label.numel())
    _draw[(triton.cdiv(label.numel(), block),)](
        starts, dense, ids, label, is_uncertain, logits, keys, table_keys, sizes, spans, doubles, floats,
        num_batches, size, dense.stride(0), ids.stride(0), label.stride(0), dense.shape[2], sizes.shape[0], num_pairs,
        INTEGRAL=integral, IS_RAGGED=is_ragged, BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )


@triton.jit
def _draw(
    starts, dense, ids, label, is_uncertain, logits, keys, table_keys, sizes, spans, doubles, floats,
    num_batches, size, dense_stride, ids_stride, label_stride, num_dense, num_tables, num_pairs,
    INTEGRAL: tl.constexpr, IS_RAGGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_here = at < num_batches * size
    batch, row = at // size, at % size
    position = tl.load(starts + batch, is_here, 0) + row
    begin, inverse_power = tl.load(doubles), tl.load(doubles + 1)
    id_tolerance, label_tolerance = tl.load(doubles + 2), tl.load(doubles + 3)
    table_scales = floats + 2
    pair_scales = table_scales + num_tables
    dense_weights = pair_scales + num_pairs

    total = tl.zeros([BLOCK], tl.float32)
    dense_key = _key(keys)
    for column in range(num_dense):
        value = _bell(_hash(dense_key, position * num_dense + column))
        tl.store(dense + batch * dense_stride + row * num_dense + column, value, is_here)
        total += tl.load(dense_weights + column) * (value + value * _CURVATURE * value)
    score = total * tl.load(floats) + tl.load(floats + 1)

    is_close = tl.zeros([BLOCK], tl.int1)
    first_latent, second_latent = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    pair_0, pair_1 = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    pair_2, pair_3 = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for table in range(num_tables):
        ids_key, effects_key = _key(table_keys + 3 * table), _key(table_keys + 3 * table + 2)
        most, first = tl.load(sizes + 3 * table), tl.load(sizes + 3 * table + 1)
        integral, last_row = tl.load(spans + 2 * table), tl.load(spans + 2 * table + 1)
        length = tl.zeros([BLOCK], tl.int64) + most
        if IS_RAGGED:
            drawn = _uniform(_hash(_key(table_keys + 3 * table + 1), position))
            length = (drawn * (most + 1).to(tl.float64)).to(tl.int64)
        divisor = tl.where(tl.load(sizes + 3 * table + 2) != 0, tl.maximum(length, 1), 1).to(tl.float64)
        effect = tl.zeros([BLOCK], tl.float64)
        first_sum, second_sum = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
        for place in range(most):
            x = _uniform(_hash(ids_key, position * most + place)) * integral
            if INTEGRAL == _LOGARITHM:
                x = tl.exp(x) * _LOW
            else:
                x += begin
                if INTEGRAL == _POWER:
                    x = tl.exp(tl.log(x) * inverse_power)
            spot = x - _LOW
            is_far = tl.abs(spot - tl.floor(spot + 0.5)) > x * id_tolerance
            is_close = is_close | (is_far == 0)
            number = tl.minimum(tl.maximum(spot, 0.0), last_row).to(tl.int64)
            weight = _HEAD / (number.to(tl.float64) + _HEAD)
            bits = _hash(effects_key, number)
            if IS_RAGGED:
                weight = tl.where(place < length, weight, 0.0)
                number = tl.where(place < length, number, -1)
            weight = weight / divisor
            effect += _quarter(bits).to(tl.float64) * weight
            first_sum += (_quarter(bits >> 16) + _LATENT_MEAN).to(tl.float64) * weight
            second_sum += (_quarter(bits >> 32) + _LATENT_MEAN).to(tl.float64) * weight
            tl.store(ids + batch * ids_stride + first * size + row * most + place, number.to(tl.int32), is_here)
        score += effect.to(tl.float32) * tl.load(table_scales + table)
        pair = first_latent * first_sum.to(tl.float32) + second_latent * second_sum.to(tl.float32)
        pair_0, pair_1 = tl.where(table == 1, pair, pair_0), tl.where(table == 3, pair, pair_1)
        pair_2, pair_3 = tl.where(table == 5, pair, pair_2), tl.where(table == 7, pair, pair_3)
        first_latent, second_latent = first_sum.to(tl.float32), second_sum.to(tl.float32)

    if num_pairs > 0:
        score += pair_0 * tl.load(pair_scales)
    if num_pairs > 1:
        score += pair_1 * tl.load(pair_scales + 1)
    if num_pairs > 2:
        score += pair_2 * tl.load(pair_scales + 2)
    if num_pairs > 3:
        score += pair_3 * tl.load(pair_scales + 3)
    probability = 1.0 / (1.0 + tl.exp(-tl.minimum(tl.maximum(score, -30.0), 30.0).to(tl.float64)))
    coin = _uniform(_hash(_key(keys + 1), position))
    is_far = tl.abs(coin - probability) > probability * label_tolerance
    tl.store(label + batch * label_stride + row, (coin < probability).to(tl.float32), is_here)
    tl.store(is_uncertain + at, (is_close | (is_far == 0)).to(tl.int8), is_here)
    tl.store(logits + at, score, is_here)


@triton.jit
def _key(at):
    return tl.load(at).to(tl.uint64, bitcast=True)


@triton.jit
def _hash(key, counters):
    bits = counters.to(tl.uint64) * _STEP + key
    bits = (bits ^ (bits >> 30)) * _FIRST
    bits = (bits ^ (bits >> 27)) * _SECOND
    return bits ^ (bits >> 31)


@triton.jit
def _uniform(bits):
    return (bits >> 11).to(tl.int64).to(tl.float64) * _TO_UNIT


@triton.jit
def _bell(bits):
    pairs = (bits & 0x0000FFFF0000FFFF) + ((bits >> 16) & 0x0000FFFF0000FFFF)
    sums = (pairs & 0xFFFFFFFF) + (pairs >> 32)
    return (sums.to(tl.int64).to(tl.float32) - 131070.0) * _BELL_SCALE


@triton.jit
def _quarter(bits):
    return ((bits & 0xFFFF).to(tl.int64).to(tl.float32) - 32767.5) * _QUARTER_SCALE
