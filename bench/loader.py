"""How fast ready batches come: Embark's loader on prepared data, and PyTorch's DataLoader over TorchRec's Criteo pipe.

Both read the same rows, one-hot and of Criteo 1TB's shape, out of the page cache, and take turns. The peer is
`InMemoryBinaryCriteoIterDataPipe` under `DataLoader(pipe, batch_size=None, collate_fn=lambda x: x)`, as TorchRec's DLRM
example has it, with 0, 1 and 2 worker processes and with and without `shuffle_batches`. It holds all rows in memory,
where Embark maps them.

Batches end in pinned memory: where there is a GPU in CUDA's, the peer's by `pin_memory=True`; where there is none in
pages locked by `mlock`, the peer's by one copy into buffers that are there already, which is less than CUDA would ask
of it. The peer without that copy is shown too: then a batch is partly a view of the rows themselves.

What a ready batch is: of the peer, its dense features, a KeyedJaggedTensor and labels. Of Embark, the same
(`KeyedJaggedTensor`), or the bytes of a block (`raw`), which the device decodes.

    python bench/loader.py --num-rows 4000000 --json loader.json
"""

import argparse
import ctypes
import gc
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import embark.trainers.torch  # noqa: F401  isort: skip  before torch: it tells torch's threads how to wait
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe

from embark.data import Loader, open_source, resolve_from_data
from embark.data.loader import RawLoader
from embark.data.prepared import MANIFEST, Feature, Layout, Manifest, PartWriter, Rows
from embark.data.prepared.source import PreparedSource
from embark.model.steps import num_together
from embark.spec import PRESETS, resolve
from embark.trainers.torch.batch import RawDecoder, ToDevice, pinned

NUM_DENSE = 13
CRITEO_1TB_ROWS = [table.rows for table in PRESETS["criteo-1tb"]().model.table_list()]
CHUNK_ROWS = 262_144
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    is_peer: bool
    """One that Embark is measured against: it pins too."""
    epoch: Callable[[int], Iterator[object]]
    """From a batch size to an epoch's batches."""


@dataclass(frozen=True, slots=True)
class Result:
    batch_size: int
    name: str
    is_peer: bool
    samples_per_s: float
    slowest_samples_per_s: float


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="embark-bench-") as directory:
        write_rows(Path(directory), args.num_rows)
        contenders = [*ours(Path(directory), args.num_threads), *peers(Path(directory))]
        check(Path(directory))
        results = [
            result for size in args.batch_sizes for result in measure(contenders, size, args.num_rows, args.rounds)
        ]
    print_table(results, args)
    if args.json:
        report = {
            "num_rows": args.num_rows, "num_threads": args.num_threads, "cores": len(os.sched_getaffinity(0)),
            "memory": "pinned" if DEVICE.type == "cuda" else "locked", "torch": torch.__version__,
            "results": [asdict(result) for result in results],
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def write_rows(directory: Path, num_rows: int) -> None:
    """The same random rows, prepared and as the peer's npy files."""
    rng = np.random.default_rng(1)
    layout = Layout(tuple(f"int_{i}" for i in range(NUM_DENSE)),
                    tuple(Feature(f"cat_{i}", rows) for i, rows in enumerate(CRITEO_1TB_ROWS)))
    writer = PartWriter(directory / "prepared", "train", layout)
    shapes: dict[str, tuple[int, Any]] = {
        "dense": (NUM_DENSE, np.float32), "sparse": (len(CRITEO_1TB_ROWS), np.int32), "labels": (1, np.int32)
    }
    arrays = {
        name: np.lib.format.open_memmap(directory / f"{name}.npy", "w+", dtype, (num_rows, width))
        for name, (width, dtype) in shapes.items()
    }
    for start in range(0, num_rows, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, num_rows)
        dense = rng.standard_normal((stop - start, NUM_DENSE), np.float32)
        ids = [rng.integers(0, rows, (stop - start, 1), np.int32) for rows in CRITEO_1TB_ROWS]
        label = rng.integers(0, 2, stop - start, np.int32)
        writer.add(Rows(label, dense, tuple(ids), (None,) * len(ids)))
        arrays["dense"][start:stop] = dense
        arrays["sparse"][start:stop] = np.concatenate(ids, axis=1)
        arrays["labels"][start:stop, 0] = label
    manifest = Manifest(layout, {"train": tuple(writer.close())})
    (directory / "prepared" / MANIFEST).write_text(manifest.to_text())


def open_ours(directory: Path, shuffle: str) -> PreparedSource:
    data = {"kind": "prepared", "path": str(directory / "prepared"), "shuffle": shuffle}
    source = open_source(resolve_from_data(resolve({"data": data})), allocate=pinned(DEVICE))
    assert isinstance(source, PreparedSource)
    return source


def locked(size_bytes: int) -> NDArray[np.uint8]:
    """Pages that stay where they are, as pinned ones do."""
    memory = mmap.mmap(-1, max(size_bytes, 1))
    buffer = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(buffer.ctypes.data), ctypes.c_size_t(size_bytes)):
        raise OSError(ctypes.get_errno(), "mlock: raise the limit with ulimit -l unlimited")
    return buffer


ALLOCATE = pinned(DEVICE) or locked


class Pinning:
    """Copies the peer's batches into a ring of locked buffers; its lengths and offsets are the same in every batch."""

    def __init__(self) -> None:
        self._ring: list[list[torch.Tensor]] = []
        self._next = 0

    def __call__(self, batch: Any) -> object:
        parts = [batch.dense_features, batch.sparse_features.values(), batch.labels]
        if len(self._ring) < 4:
            self._ring.append([
                torch.from_numpy(locked(p.numel() * p.element_size())).view(p.dtype).view(p.shape) for p in parts])
        held = self._ring[self._next % 4]
        self._next += 1
        for to, part in zip(held, parts, strict=True):
            to.copy_(part)
        return held


def ours(directory: Path, num_threads: int) -> list[Contender]:
    share: dict[str, Any] = {"rank": 0, "world_size": 1, "start_step": 0, "num_threads": num_threads, "depth": 4}
    names = [f"cat_{i}" for i in range(len(CRITEO_1TB_ROWS))]

    def raw(source: PreparedSource, batch_size: int) -> Iterator[object]:
        num_steps = source.num_train_samples // batch_size
        with RawLoader(source, batch_size=batch_size, stop_step=num_steps, allocate=ALLOCATE,
                       capacity=num_together(batch_size), **share) as loader:
            for batches in loader:
                yield from range(batches.num_batches)
                loader.release(batches)

    def decoded(source: PreparedSource, batch_size: int) -> Iterator[object]:
        to_device = ToDevice(names, DEVICE)
        num_steps = source.num_train_samples // batch_size
        with Loader(source, batch_size=batch_size, stop_step=num_steps, **share) as loader:
            yield from map(to_device, loader)

    def contender(kind: str, make: Callable[[PreparedSource, int], Iterator[object]], shuffle: str) -> Contender:
        source = open_ours(directory, shuffle)
        return Contender(f"Embark, {kind}, shuffle = {shuffle}", False, lambda size: make(source, size))

    return [
        contender("raw", raw, "blocks"), contender("raw", raw, "rows"),
        contender("KeyedJaggedTensor", decoded, "blocks"), contender("KeyedJaggedTensor", decoded, "rows"),
    ]


def peers(directory: Path) -> list[Contender]:
    paths = {f"{name}_paths": [str(directory / f"{name}.npy")] for name in ("dense", "sparse", "labels")}

    def contender(num_workers: int, shuffle: bool, *, must_pin: bool = True) -> Contender:
        def epoch(batch_size: int) -> Iterator[object]:
            pipe = InMemoryBinaryCriteoIterDataPipe(
                "train", **paths, batch_size=batch_size, rank=0, world_size=1, drop_last=True, shuffle_batches=shuffle
            )
            loader: DataLoader[object] = DataLoader(
                pipe, batch_size=None, pin_memory=must_pin and DEVICE.type == "cuda", collate_fn=lambda batch: batch,
                num_workers=num_workers, **({"prefetch_factor": 4} if num_workers else {}),
            )
            return map(Pinning(), loader) if must_pin and DEVICE.type != "cuda" else iter(loader)

        ending = (", shuffle_batches" if shuffle else "") + ("" if must_pin else ", NOT pinned")
        return Contender(f"DataLoader, {num_workers} workers{ending}", must_pin, epoch)

    pinning = [contender(num_workers, shuffle) for shuffle in (False, True) for num_workers in (0, 1, 2)]
    return [*pinning, contender(0, False, must_pin=False)]


def check(directory: Path) -> None:
    """Both give the same rows: the first batch of each, in the order of the files."""
    peer: Any = next(peers(directory)[-1].epoch(1_024))
    source = open_ours(directory, "none")
    batch = ToDevice(list(peer.sparse_features.keys()), torch.device("cpu"))(source.train_rows(0, 0, 1_024))
    decoder = RawDecoder(source.layout, [f.name for f in source.layout.features], 1_024, DEVICE)
    buffer = np.empty(decoder.size_bytes, np.uint8)
    source.train_raw([(0, 0, 1_024)], buffer)
    dense, ids, label = decoder.decode(torch.from_numpy(buffer).to(DEVICE))
    for found in ((batch.dense, batch.sparse.values(), batch.label), (dense.cpu(), ids.cpu(), label.cpu())):
        assert torch.equal(found[0], peer.dense_features)
        assert torch.equal(found[1], peer.sparse_features.values())
        assert torch.equal(found[2], peer.labels.float())


def measure(contenders: list[Contender], batch_size: int, num_rows: int, rounds: int) -> list[Result]:
    rates: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds + 1):
        for contender in contenders:
            rates[contender.name].append(samples_per_s(contender, batch_size, num_rows // batch_size))
            gc.collect()
    # The first round maps files and fills caches.
    return [
        Result(batch_size, c.name, c.is_peer, statistics.median(rates[c.name][1:]), min(rates[c.name][1:]))
        for c in contenders
    ]


def samples_per_s(contender: Contender, batch_size: int, num_batches: int) -> float:
    """From the first batch to the last of an epoch, so that starting threads or processes does not count.

    Each of the peer's workers gives all rows, so two of them would go on for two epochs.
    """
    batches = contender.epoch(batch_size)
    next(batches)
    began = time.perf_counter()
    num_batches = sum(1 for _ in islice(batches, num_batches - 1))
    return num_batches * batch_size / (time.perf_counter() - began)


def print_table(results: list[Result], args: argparse.Namespace) -> None:
    memory = "CUDA's pinned" if DEVICE.type == "cuda" else "locked"
    print(f"{args.num_rows:,} rows, {len(os.sched_getaffinity(0))} cores, {args.num_threads} loader threads, {memory} "
          f"memory, median of {args.rounds} epochs\n")
    for batch_size in args.batch_sizes:
        of_size = [result for result in results if result.batch_size == batch_size]
        best_peer = max(result.samples_per_s for result in of_size if result.is_peer)
        print(f"batch {batch_size:,}")
        print(f"{'':44} {'M samples/s':>11} {'batches/s':>10} {'slowest':>8} {'of best peer':>12}")
        for result in of_size:
            print(f"{result.name:44} {result.samples_per_s / 1e6:11.2f} {result.samples_per_s / batch_size:10.0f} "
                  f"{result.slowest_samples_per_s / 1e6:8.2f} {result.samples_per_s / best_peer:11.2f}×")
        print("\nEmbark against each peer:")
        for peer in (result for result in of_size if result.is_peer):
            ratios = ", ".join(
                f"{result.samples_per_s / peer.samples_per_s:.1f}× ({result.name.removeprefix('Embark, ')})"
                for result in of_size if result.name.startswith("Embark")
            )
            print(f"  {peer.name:36} {ratios}")
        print()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-rows", type=int, default=4_000_000)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[2_048, 8_192, 65_536])
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="where to write the rows; about 270 bytes each")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
