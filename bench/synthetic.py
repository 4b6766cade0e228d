"""How fast synthetic samples come: a loader's threads by numpy, and the device by torch, in turns.

On a CPU the device is the CPU itself, with torch's threads. Processor time is steadier than rates on a busy machine.

    python bench/synthetic.py --num-threads 1 2
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import embark.trainers.torch  # noqa: F401  isort: skip  before torch: it tells torch's threads how to wait
import torch

from embark.data import Loader
from embark.data.synthetic import SyntheticSource
from embark.model.steps import num_together
from embark.spec import PRESETS
from embark.trainers.torch.engines.cuda_graph.batch_layout import DrawnLayout, PackedLayout
from embark.trainers.torch.engines.pipeline import BatchRange

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def main() -> None:
    args = parse_args()
    spec = PRESETS[args.preset]()
    source = SyntheticSource(spec.model, spec.data)
    print(f"{args.preset}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, device {DEVICE}, "
          f"{args.num_samples:,} samples a round, median of {args.rounds}")
    for batch_size in args.batch_sizes:
        contenders: dict[str, Callable[[BatchRange], Iterator[int]]] = {
            f"numpy, {num} threads": by_threads(source, num) for num in args.num_threads
        }
        contenders[f"torch on {DEVICE.type}"] = by_device(source, batch_size)
        part = BatchRange(batch_size, 0, 1, 0, max(args.num_samples // batch_size, 2 * num_together(batch_size)))
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        cpu_s: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(args.rounds):
            for name, epoch in contenders.items():
                began = time.process_time()
                rates[name].append(samples_per_s(epoch(part), batch_size))
                cpu_s[name].append((time.process_time() - began) / (part.stop_step * batch_size) * 1e6)
        first = statistics.median(next(iter(rates.values())))
        for name, found in rates.items():
            median = statistics.median(found)
            print(f"batch {batch_size:6,}  {name:18} {median / 1e6:8.3f} M samples/s  "
                  f"{min(found) / 1e6:.3f} to {max(found) / 1e6:.3f}  {median / first:.2f}×  "
                  f"{statistics.median(cpu_s[name]):.2f} s of processor time a million")


def by_threads(source: SyntheticSource, num_threads: int) -> Callable[[BatchRange], Iterator[int]]:
    def epoch(part: BatchRange) -> Iterator[int]:
        with Loader(source, **asdict(part), num_threads=num_threads) as loader:
            for _ in loader:
                yield 1

    return epoch


def by_device(source: SyntheticSource, batch_size: int) -> Callable[[BatchRange], Iterator[int]]:
    packed = PackedLayout(batch_size, source.num_dense, tuple(source.multi_hot))
    layout = DrawnLayout(source, packed, DEVICE)
    slot = torch.empty(layout.size_bytes, dtype=torch.uint8, device=DEVICE)

    def epoch(part: BatchRange) -> Iterator[int]:
        with layout.feed(source, part, DEVICE) as blocks:
            for block in blocks:
                block.write(slot)
                if DEVICE.type == "cuda":
                    torch.cuda.synchronize(DEVICE)
                block.correct(slot)
                yield block.num_batches

    return epoch


def samples_per_s(epoch: Iterator[int], batch_size: int) -> float:
    """From the first batches to the last, so that starting threads does not count."""
    next(epoch)
    began = time.perf_counter()
    num_batches = sum(epoch)
    return num_batches * batch_size / (time.perf_counter() - began)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="quickstart", choices=PRESETS)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[2_048, 65_536])
    parser.add_argument("--num-threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--num-samples", type=int, default=524_288)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
