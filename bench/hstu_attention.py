"""HSTU's attention over jagged sequences on one GPU: Triton's kernels beside padded attention, in bf16.

    python bench/hstu_attention.py                # against eager attention and padded FlexAttention
    python bench/hstu_attention.py --tune         # the kernels alone, cut in other ways
    python bench/hstu_attention.py --block        # three blocks, fused and by PyTorch's operations

Lengths are Zipf's: 1 to 4,096, each as likely as its inverse. Heads are those of the preset mlperf-hstu: 4 of 128.
FLOPs are those of causal pairs of rows of one sample, with no padding: forward 2 products (q·k and weights·v),
backward 5 (scores again, the gradients of weights, q, k and v) of 2 FLOPs for each pair, head and column. Biases, SiLU
and what a kernel computes twice count nothing. The share is of 989 TFLOP/s, an H200's dense bf16. FlexAttention has a
softmax in the place of SiLU, which it cannot leave out, and a mask of blocks by which it skips padding and what is not
causal.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from embark.spec import load_spec
from embark.trainers.torch.networks import hstu_attention as attention_module
from embark.trainers.torch.networks import hstu_kernels, sequences
from embark.trainers.torch.networks.hstu_attention import hstu_attention
from embark.trainers.torch.networks.hstu_kernels import Inputs, Tile
from embark.trainers.torch.networks.jagged import JaggedLayout

HEADS, WIDTH, LONGEST, PEAK = 4, 128, 4096, 989e12
CASES = {"no bias": (False, False), "position bias": (True, False), "position and time bias": (True, True)}
TILES = {
    "forward": [(64, 32, 4, 3, True), (128, 32, 4, 3, True), (64, 64, 4, 3, True), (128, 32, 8, 3, True),
                (128, 64, 8, 3, True)],
    "keys": [(64, 64, 4, 2, True), (64, 32, 4, 3, True), (128, 64, 8, 3, True), (128, 32, 8, 3, True)],
    "queries": [(128, 64, 4, 3), (64, 64, 4, 3), (128, 32, 4, 4)],
    "sums": [(32, 32, 1, 1), (64, 32, 2, 1), (128, 16, 4, 1)],
}


class Batch:
    """Sequences, their biases and the gradient that comes back. Without a seed all are as long as can be."""

    def __init__(self, num_samples: int, seed: int | None) -> None:
        odds = 1 / np.arange(1, LONGEST + 1)
        lengths = np.full(num_samples, LONGEST) if seed is None else np.random.default_rng(seed).choice(
            np.arange(1, LONGEST + 1), num_samples, p=odds / odds.sum())
        self.lengths = torch.tensor(lengths, device="cuda")
        self.offsets = torch.tensor(np.concatenate([[0], lengths.cumsum()]), device="cuda").int()
        self.pairs = float((lengths * (lengths + 1) / 2).sum())
        total = int(lengths.sum())
        torch.manual_seed(seed or 0)
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
        with torch.autocast("cuda", torch.bfloat16, enabled=is_bf16), \
                mock.patch.object(attention_module, "uses_kernels", no_kernels):
            return self.kernels(leaves)


def no_kernels(*_: object) -> bool:
    """As on a CPU. A Mock would keep the tensors that it is called with."""
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--eager-samples", type=int, default=128, help="eager attention keeps all scores")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--only", type=int, nargs=2, metavar=("PART", "PARTS"),
                        help="with --tune: compile this part of all variants, and end")
    parser.add_argument("--block", action="store_true", help="three blocks of HSTU instead, fused and plain")
    parser.add_argument("--no-flex", action="store_true")
    given = parser.parse_args()
    torch.utils.deterministic.fill_uninitialized_memory = False
    if given.only:
        compile_part(*given.only)
        return
    batch, full = Batch(given.samples, seed=1), Batch(24, seed=None)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {given.samples} sequences, {len(batch.q):,} "
          f"rows, mean {len(batch.q) / given.samples:.0f}, longest {int(batch.lengths.max())}; {HEADS} heads of "
          f"{WIDTH}, bf16", flush=True)
    if given.block:
        measure_blocks(Batch(256, seed=1))
        return
    if given.tune:
        tune(batch, full)
    else:
        compare_numbers(Batch(12, seed=2))
    for name, (positions, times) in CASES.items():
        measure(f"kernels, {name}", batch, batch.kernels, batch.leaves(positions=positions, times=times))
        measure(f"kernels, {name}, 24 sequences of {LONGEST}", full, full.kernels,
                full.leaves(positions=positions, times=times))
    if given.tune:
        return
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


def passes(batch: Batch, case: str, part: str) -> Callable[[], object]:
    """A forward pass, or a backward pass, which the other tiles are for."""
    positions, times = CASES[case]
    inputs = Inputs(batch.q, batch.k, batch.v, batch.position_bias if positions else None,
                    batch.time_bias if times else None, batch.times, batch.layout, LONGEST)
    if part == "forward":
        out = torch.empty_like(batch.v)
        return lambda: hstu_kernels.forward(inputs, out)
    grads = [torch.empty_like(one) for one in (batch.q, batch.k, batch.v)]
    return lambda: hstu_kernels.backward(inputs, batch.grad, grads)


def compile_part(part: int, parts: int) -> None:
    """Compile this part of all variants, for others that run at the same time to compile the rest."""
    batch, before = Batch(1, seed=2), hstu_kernels.BF16
    variants = [(name, tile, case) for name, tiles in TILES.items() for tile in tiles for case in CASES]
    for name, tile, case in variants[part::parts]:
        hstu_kernels.BF16 = {**before, name: Tile(*tile)}
        try:
            passes(batch, case, name)()
            torch.cuda.synchronize()
        except Exception as error:  # one that does not fit is passed over
            print(f"{name} {tile}: {type(error).__name__}: {str(error)[-150:]}", flush=True)


def tune(*batches: Batch) -> None:
    """Times of the passes by how each kernel is cut. What is fastest is kept."""
    for name, tiles in TILES.items():
        fastest = float("inf")
        kept = best = hstu_kernels.BF16
        for tile in tiles:
            hstu_kernels.BF16 = {**best, name: Tile(*tile)}
            taken = []
            try:
                for case in CASES:
                    if name != "sums" or case != "no bias":
                        taken.append([milliseconds(passes(batch, case, name), times=5) for batch in batches])
            except Exception as error:  # one that does not fit is passed over
                print(f"{name} {tile}: {type(error).__name__}: {str(error)[-150:]}", flush=True)
                continue
            together = sum(sum(times) for times in taken)
            if together < fastest:
                fastest, kept = together, hstu_kernels.BF16
            print(f"{name} {tile}: " + ", ".join(" / ".join(f"{ms:.3f}" for ms in times) for times in taken)
                  + f" ms; together {together:.2f}", flush=True)
        hstu_kernels.BF16 = kept
    print(f"fastest: {hstu_kernels.BF16}", flush=True)


def measure_blocks(batch: Batch) -> None:
    """Three blocks of HSTU forward and backward, fused, and by PyTorch's operations around the same attention."""
    model = load_spec("mlperf-hstu", ["model.dropout=0.2"]).model
    blocks = torch.nn.ModuleList(sequences.HSTUBlock(model, HEADS * WIDTH, LONGEST) for _ in range(3)).cuda()
    for block in blocks:
        block.time_bias = torch.nn.Parameter(torch.zeros(32, device="cuda"))
    rows = torch.randn(len(batch.q), HEADS * WIDTH, device="cuda")
    numbers = torch.arange(len(rows), device="cuda"), LONGEST

    def step() -> Tensor:
        blocks.zero_grad(set_to_none=True)
        given = values = rows.detach().requires_grad_()
        of_batch = sequences.Rows(batch.offsets, batch.times, JaggedLayout(batch.offsets, len(rows)), numbers)
        with torch.autocast("cuda", torch.bfloat16):
            for block in blocks:
                values = block(values, of_batch)
        values.backward(rows)
        return given.grad

    found = {}
    for name in ("fused", "plain"):
        torch.cuda.reset_peak_memory_stats()
        with nullcontext() if name == "fused" else mock.patch.object(sequences, "uses_kernels", no_kernels):
            taken, found[name] = milliseconds(step, together=1), step()
            is_same = torch.equal(found[name], step())
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
                step()
                torch.cuda.synchronize()
        print(f"three blocks, {len(rows):,} rows, {name}: {taken:.1f} ms, "
              f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB; bit for bit the same: {is_same}", flush=True)
        for event in sorted(profiled.key_averages(), key=lambda one: -one.self_device_time_total)[:16]:
            print(f"    {event.self_device_time_total / 1e3:.2f} ms, {event.count} times {event.key[:80]}", flush=True)
    apart = (found["fused"] - found["plain"]).norm() / found["plain"].norm()
    print(f"gradients of the rows, fused and plain, are apart by {apart:.1e} of their norm")


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
