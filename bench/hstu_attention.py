"""HSTU's attention over jagged sequences on one GPU: Triton's kernels beside padded attention, in bf16.

    python bench/hstu_attention.py                # against eager attention and padded FlexAttention
    python bench/hstu_attention.py --tune         # the kernels alone, cut in other ways

Lengths are Zipf's: 1 to 4,096, each as likely as its inverse. Heads are those of the preset mlperf-hstu: 4 of 128.
FLOPs are those of causal pairs of rows of one sample, with no padding: forward 2 products (q·k and weights·v),
backward 5 (scores again, the gradients of weights, q, k and v) of 2 FLOPs for each pair, head and column. Biases, SiLU
and what a kernel computes twice count nothing. The share is of 989 TFLOP/s, an H200's dense bf16. FlexAttention has a
softmax in the place of SiLU, which it cannot leave out, and a mask of blocks by which it skips padding and what is not
causal.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import numpy as np
import torch
from torch import Tensor

from embark.trainers.torch.networks import hstu_kernels
from embark.trainers.torch.networks.hstu_attention import eager_attention, hstu_attention
from embark.trainers.torch.networks.hstu_kernels import Inputs, Tile
from embark.trainers.torch.networks.jagged import JaggedLayout

HEADS, WIDTH, LONGEST, PEAK = 4, 128, 4096, 989e12
TILES = {
    "forward": [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 4), (128, 128, 8, 2)],
    "keys": [(128, 32, 8, 2), (128, 32, 8, 3), (64, 32, 4, 2), (64, 64, 4, 2), (64, 32, 4, 3), (64, 64, 4, 1)],
    "queries": [(128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (128, 64, 8, 1), (64, 32, 4, 3)],
    "square": [(64, 64, 4, 2), (64, 64, 4, 1), (64, 64, 8, 2), (64, 64, 4, 3), (32, 32, 4, 2), (64, 64, 8, 1)],
}


class Batch:
    """Sequences, their biases and the gradient that comes back."""

    def __init__(self, num_samples: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        odds = 1 / np.arange(1, LONGEST + 1)
        lengths = draw.choice(np.arange(1, LONGEST + 1), num_samples, p=odds / odds.sum())
        self.lengths = torch.tensor(lengths, device="cuda")
        self.offsets = torch.tensor(np.concatenate([[0], lengths.cumsum()]), device="cuda").int()
        self.pairs = float((lengths * (lengths + 1) / 2).sum())
        total = int(lengths.sum())
        torch.manual_seed(seed)
        self.q, self.k, self.v, self.grad = torch.randn(
            4, total, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16).unbind()
        self.position_bias = torch.randn(2 * LONGEST - 1, device="cuda") * 0.1
        self.time_bias = torch.randn(32, device="cuda") * 0.1
        self.times = torch.randint(0, 3600, (total,), device="cuda").cumsum(0)
        self.layout = JaggedLayout(self.offsets, total)

    def leaves(self, *, positions: bool, times: bool, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor | None]:
        """What gradients are asked of."""
        found = {name: getattr(self, name).to(dtype, copy=True).requires_grad_() for name in ("q", "k", "v")}
        found["position_bias"] = self.position_bias.clone().requires_grad_() if positions else None
        found["time_bias"] = self.time_bias.clone().requires_grad_() if times else None
        return found

    def kernels(self, leaves: dict[str, Tensor | None]) -> Tensor:
        """A new layout each time, as for each batch in training."""
        return hstu_attention(**leaves, offsets=self.offsets, max_length=LONGEST, times=self.times)

    def eager(self, leaves: dict[str, Tensor | None]) -> Tensor:
        """As on a CPU."""
        is_bf16 = leaves["q"] is not None and leaves["q"].dtype == torch.bfloat16
        with torch.autocast("cuda", torch.bfloat16, enabled=is_bf16):
            return eager_attention(**leaves, padding=self.layout.padding, max_length=LONGEST,
                                   times=self.times if leaves["time_bias"] is not None else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--eager-samples", type=int, default=128, help="eager attention keeps all scores")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--only", type=int, help="with --tune: compile this one of each kernel's, and end")
    parser.add_argument("--no-flex", action="store_true")
    given = parser.parse_args()
    batch = Batch(given.samples, seed=1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {given.samples} sequences, {len(batch.q):,} "
          f"rows, mean {len(batch.q) / given.samples:.0f}, longest {int(batch.lengths.max())}; {HEADS} heads of "
          f"{WIDTH}, bf16", flush=True)
    if given.tune:
        tune(batch, given.only)
        return
    compare_numbers(Batch(12, seed=2))
    for name, positions, times in (("no bias", False, False), ("position bias", True, False),
                                   ("position and time bias", True, True)):
        measure(f"kernels, {name}", batch, batch.kernels, batch.leaves(positions=positions, times=times))
    few = Batch(given.eager_samples, seed=1)
    for name, attention in (("kernels", few.kernels), ("eager, padded by groups of similar length", few.eager)):
        measure(f"{given.eager_samples} sequences: {name}, position bias", few, attention,
                few.leaves(positions=True, times=False))
    if not given.no_flex:
        flex(batch)


def compare_numbers(batch: Batch) -> None:
    """Errors of bf16 against eager attention in fp32, as a share of the root mean square of each tensor."""
    wanted = run(batch.eager, batch.leaves(positions=True, times=True, dtype=torch.float32), batch.grad.float())
    for name, attention in (("kernels", batch.kernels), ("eager", batch.eager)):
        found = run(attention, batch.leaves(positions=True, times=True), batch.grad)
        errors = {part: ((found[part].float() - wanted[part]).square().mean().sqrt()
                         / wanted[part].square().mean().sqrt()).item() for part in wanted}
        print(f"{name} in bf16, error against eager in fp32: "
              + ", ".join(f"{part} {error:.1e}" for part, error in errors.items()), flush=True)
    again = run(batch.kernels, batch.leaves(positions=True, times=True), batch.grad)
    same = run(batch.kernels, batch.leaves(positions=True, times=True), batch.grad)
    print(f"kernels, twice: bit for bit the same: {all(torch.equal(again[part], same[part]) for part in again)}")


def run(attention: Callable[[dict[str, Tensor | None]], Tensor], leaves: dict[str, Tensor | None], grad: Tensor,
        ) -> dict[str, Tensor]:
    """The output and the gradients."""
    out = attention(leaves)
    named = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    grads = torch.autograd.grad(out, list(named.values()), grad.to(out.dtype))
    return {"out": out.detach(), **dict(zip(named, grads, strict=True))}


def measure(name: str, batch: Batch, attention: Callable[[dict[str, Tensor | None]], Tensor],
            leaves: dict[str, Tensor | None], grad: Tensor | None = None) -> None:
    """Prints times and shares of the peak."""
    grad = batch.grad if grad is None else grad
    torch.cuda.reset_peak_memory_stats()
    try:
        forward_ms = milliseconds(lambda: attention(leaves))
        both_ms = milliseconds(lambda: run(attention, leaves, grad))
    except torch.OutOfMemoryError as error:
        print(f"{name}: {str(error).split('. ')[0]}", flush=True)
        return
    product = 2 * batch.pairs * HEADS * WIDTH
    shares = (2 * product / forward_ms, 5 * product / (both_ms - forward_ms), 7 * product / both_ms)
    print(f"{name}: forward {forward_ms:.2f} ms ({shares[0] * 1e3 / PEAK:.1%}), backward {both_ms - forward_ms:.2f} ms "
          f"({shares[1] * 1e3 / PEAK:.1%}), both {both_ms:.2f} ms ({shares[2] * 1e-9:.0f} TFLOP/s, "
          f"{shares[2] * 1e3 / PEAK:.1%}); {torch.cuda.max_memory_allocated() / 1e9:.1f} GB", flush=True)


def flex(batch: Batch) -> None:
    """FlexAttention, compiled, over [samples, heads, LONGEST, WIDTH]."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    lengths, num_samples = batch.lengths, len(batch.lengths)
    place = torch.arange(LONGEST, device="cuda")
    is_row = place < lengths[:, None]

    def padded(values: Tensor) -> Tensor:
        found = values.new_zeros(num_samples, LONGEST, HEADS, WIDTH)
        found[is_row] = values
        return found.transpose(1, 2).contiguous()

    def is_seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query < lengths[sample])

    blocks = create_block_mask(is_seen, num_samples, None, LONGEST, LONGEST, device="cuda")
    bias = batch.position_bias.clone().requires_grad_()

    def with_bias(score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + bias[query - key + LONGEST - 1]

    compiled = torch.compile(flex_attention, dynamic=False)
    leaves: dict[str, Tensor | None] = {name: padded(getattr(batch, name)).requires_grad_() for name in ("q", "k", "v")}
    grad = padded(batch.grad)
    for name, score_mod in (("no bias", None), ("position bias", with_bias)):
        try:
            measure(f"FlexAttention, padded, {name}", batch, lambda own, mod=score_mod: compiled(
                own["q"], own["k"], own["v"], score_mod=mod, block_mask=blocks), leaves, grad)
        except Exception as error:  # inductor's, where no block size of its own fits the GPU
            print(f"FlexAttention, padded, {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def tune(batch: Batch, only: int | None) -> None:
    """Times of each kernel by how it is cut, without and with a position bias."""
    bias = batch.position_bias[LONGEST - 1:].contiguous()
    plain = Inputs(batch.q, batch.k, batch.v, None, None, None, batch.layout, LONGEST)
    biased = replace(plain, position_bias=bias)
    kernels: dict[str, list[Callable[[], object]]] = {
        "forward": [lambda one=one: hstu_kernels.forward(one) for one in (plain, biased)],
        "keys": [lambda one=one: hstu_kernels.backward_keys(one, batch.grad) for one in (plain, biased)],
        "queries": [lambda: hstu_kernels.backward_queries(plain, batch.grad)],
        "square": [lambda: hstu_kernels.backward_queries(biased, batch.grad)]}
    before, product = hstu_kernels.BF16, 2 * batch.pairs * HEADS * WIDTH
    for name, starts in kernels.items():
        for tile in TILES[name] if only is None else TILES[name][only:only + 1]:
            hstu_kernels.BF16 = replace(before, **{name: Tile(*tile)})
            try:
                if only is not None:
                    for start in starts:
                        start()
                    continue
                taken = [milliseconds(start) for start in starts]
                print(f"{name} {tile}: " + ", ".join(f"{ms:.2f} ms" for ms in taken) + "; a product in "
                      f"{taken[0] / {'forward': 2, 'keys': 4}.get(name, 3):.3f} ms, at the peak "
                      f"{product / PEAK * 1e3:.3f} ms", flush=True)
            except Exception as error:  # one that does not fit is passed over
                print(f"{name} {tile}: {type(error).__name__}: {str(error)[:100]}", flush=True)
    hstu_kernels.BF16 = before


def milliseconds(start: Callable[[], object], *, times: int = 7, together: int = 3) -> float:
    """Median, after one that is not counted; some at a time, so that the GPU does not wait for Python."""
    found = []
    for _ in range(times + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(together):
            start()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / together)
    return median(found[1:])


if __name__ == "__main__":
    main()
