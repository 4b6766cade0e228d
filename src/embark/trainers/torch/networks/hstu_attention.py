"""HSTU's attention over jagged sequences: SiLU of each score instead of a softmax over all."""

import math

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from .jagged import JaggedLayout

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_KERNEL_WIDTH = 128


def hstu_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_length: int, *,
    position_bias: Tensor | None = None, times: Tensor | None = None, time_bias: Tensor | None = None,
    layout: JaggedLayout | None = None,
) -> Tensor:
    """Compute SiLU(q·k / √width + bias) / max_length, times v, over a row and those before: [total, heads, width of v].

    `q`, `k`, `v`: [total, heads, width], the rows of all samples one behind the other. `offsets`: [samples + 1].
    `position_bias`: [2 · max_length − 1], by the query's position less the key's, plus max_length − 1. `time_bias`:
    [buckets], by `time_bucket` of the difference of the two `times` [total]. `layout`: that of `offsets`, if it is at
    hand. A GPU runs Triton's kernels (`uses_kernels`); all else is padded.
    """
    layout = layout or JaggedLayout(offsets, len(q))
    if uses_kernels(q, max(q.shape[2], v.shape[2])):
        from .hstu_kernels import TritonAttention

        if torch.is_autocast_enabled(q.device.type):
            q, k, v = (one.to(torch.get_autocast_dtype(q.device.type)) for one in (q, k, v))
        found: Tensor = TritonAttention.apply(q, k, v, position_bias, time_bias, times, layout, max_length)
        return found
    padding = layout.padding
    of_times = padding.pad(times) if times is not None else [None] * len(padding.groups)
    groups = []
    for one_q, one_k, one_v, one_times in zip(
            padding.pad(q), padding.pad(k), padding.pad(v), of_times, strict=True):
        scores = torch.einsum("blhd,bmhd->bhlm", one_q, one_k) / math.sqrt(q.shape[-1])
        length = one_q.shape[1]
        places = torch.arange(length, device=q.device)
        apart = places[:, None] - places[None, :]
        if position_bias is not None:
            scores = scores + embedding(apart + max_length - 1, position_bias[:, None])[..., 0]
        if one_times is not None and time_bias is not None:
            buckets = time_bucket(one_times[:, :, None] - one_times[:, None, :], len(time_bias))
            scores = scores + embedding(buckets, time_bias[:, None])[:, None, :, :, 0]
        weights = silu(scores) / max_length
        # Padding lies behind a sample's last row, where a causal mask hides it from every row that counts.
        groups.append(torch.einsum("bhlm,bmhd->blhd", torch.where(apart >= 0, weights, 0.0), one_v))
    return padding.unpad(groups)


def time_bucket(difference: Tensor, num_buckets: int) -> Tensor:
    """Return ⌊log₂(1 + |seconds|)⌋, and the last bucket for all that is longer."""
    return (torch.frexp(1.0 + difference.abs().float()).exponent.long() - 1).clamp_(max=num_buckets - 1)


def uses_kernels(values: Tensor, width: int) -> bool:
    """Return whether kernels compute it: attention on a GPU, in heads that fit its registers."""
    return values.is_cuda and len(values) > 0 and values.dtype in KERNEL_DTYPES and width <= MAX_KERNEL_WIDTH
