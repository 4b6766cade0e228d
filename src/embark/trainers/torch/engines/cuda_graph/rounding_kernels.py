"""Triton functions that round values in fp32 to 16 bits stochastically, by random bits that a hash gives."""

import triton
import triton.language as tl


@triton.jit
def mixed(bits):
    """A hash of 32-bit numbers: https://nullprogram.com/blog/2018/07/31/."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def rounded_to_bf16(value, random):
    """As `rounded`; bf16 has the exponents of fp32."""
    bits = (value.to(tl.uint32, bitcast=True) + (random & 0xFFFF)) & 0xFFFF0000
    return tl.where(value == value, bits.to(tl.float32, bitcast=True), value).to(tl.bfloat16)


@triton.jit
def rounded(value, random):
    """To one of the two neighbours in fp16: the nearer, the likelier. What has no digits behind stays as it is,
    infinities and NaN too."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + (random & 0x1FFF)) & 0xFFFFE000
    # Below 2^-14 fp16 has steps of 2^-24.
    steps = tl.abs(value) * 16777216.0 + (random & 0x1FFF).to(tl.float32) * 0.0001220703125
    small = (tl.floor(steps) * 5.9604644775390625e-08).to(tl.uint32, bitcast=True)
    magnitude = tl.where(magnitude < 0x38800000, small, normal)
    nearby = (magnitude | (bits & 0x80000000)).to(tl.float32, bitcast=True)
    return tl.where(value == value, nearby, value).to(tl.float16)
