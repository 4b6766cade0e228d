"""Steps of DIN, SASRec and HSTU on one device: the captured step beside TorchRec's pipeline, as `embark bench` times
them.

    python bench/sequence_steps.py               # on a GPU
    python bench/sequence_steps.py --tiny        # tries all of it on a CPU; its figures say nothing

sasrec: 512 histories of 7.3 items in the mean, as Amazon's video games have them, 64 negatives each, 48 wide. din:
2,048 histories of up to 100 items. hstu: a ranker with three layers of width 512 over 256 histories of 1 to 4,096
items, each length as likely as its inverse.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embark.spec import RunSpec, resolve
from embark.trainers.torch.bench.run import bench

NUM_BATCHES = 17  # What is in memory before the clock starts, and a few held-out samples.
KINDS = {"sasrec": (512, 51, 20_000), "din": (2048, 100, 100_000), "hstu": (256, 4096, 46_950)}
"""Batch size, longest history, items."""


def write_log(path: Path, num_users: int, longest: int, num_items: int) -> None:
    """Write a log of users and items; two items of each user are held out."""
    draw = np.random.default_rng(1)
    lengths = np.minimum(2 + draw.geometric(1 / 6.3, num_users) + 1, longest + 1)
    users, items = np.repeat(np.arange(num_users), lengths), draw.integers(num_items, size=lengths.sum())
    np.savetxt(path, np.stack([users, items], 1), "%d", ",", header="user,item", comments="")


def write_ranked(path: Path, num_samples: int, longest: int, num_items: int) -> None:
    """Write histories, candidates, shops and clicks."""
    draw = np.random.default_rng(1)
    odds = 1 / np.arange(1, longest + 1)
    lengths = draw.choice(np.arange(1, longest + 1), num_samples, p=odds / odds.sum())
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    items = pa.ListArray.from_arrays(offsets, draw.integers(num_items, size=offsets[-1]))
    columns = {"item": items, "shown": draw.integers(num_items, size=num_samples),
               "shop": draw.integers(1000, size=num_samples), "label": draw.integers(2, size=num_samples)}
    pq.write_table(pa.table(columns), path)


def spec_of(kind: str, folder: Path, *, is_tiny: bool) -> RunSpec:
    """Write the data of a kind, and return its spec."""
    batch_size, longest, num_items = KINDS[kind]
    dim = {"sasrec": 48, "din": 64, "hstu": 512}[kind]
    if is_tiny:
        batch_size, longest, num_items, dim = 32, min(longest, 60), 500, 16
    num_samples = NUM_BATCHES * batch_size
    history: dict[str, Any] = {"name": "item", "rows": num_items, "pooling": "none", "max_length": longest}
    if kind == "sasrec":
        path = folder / "log.csv"
        write_log(path, num_samples, longest, num_items)
        tables = [history, {"name": "negatives", "shares": "item", "pooling": "none", "max_length": 64}]
        model: dict[str, Any] = {"tables": tables, "dropout": 0.5,
                                 "sequence": {"history": "item", "negatives": "negatives"}}
        data: dict[str, Any] = {"kind": "interactions"}
    else:
        path = folder / f"{kind}.parquet"
        write_ranked(path, num_samples, longest, num_items)
        tables = [history, {"name": "shown", "shares": "item"}, {"name": "shop", "rows": 1000}]
        blocks = {"num_blocks": 3, "num_heads": 4} if kind == "hstu" else {}
        model = {"tables": tables, "dropout": 0.1 if kind == "hstu" else 0.0,
                 "top_mlp": [512 if kind == "hstu" else 200],
                 "sequence": {"history": "item", "candidate": "shown", **blocks}}
        data = {"kind": "columns", "eval_fraction": 0.02}
    return resolve({
        "model": {"kind": kind, "num_dense": 0, "embedding_dim": dim, **model},
        "data": {"path": str(path), **data},
        "train": {"batch_size": batch_size, "dense_optimizer": "adam", "learning_rate": 0.01,
                  "precision": "fp32" if kind == "sasrec" else "bf16"},
        **({"place": {"device": "cpu"}} if is_tiny else {}),
    }, ["train.engine=cuda_graph", *(["train.precision=fp32"] if is_tiny else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", choices=list(KINDS), nargs="*", default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=3.0, help="for each engine")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kind in asked.kinds:
            spec = spec_of(kind, Path(folder), is_tiny=asked.tiny)
            found = bench(spec, seconds=0.1 if asked.tiny else asked.seconds, peers=True, progress=lambda _name: None)
            print(f"{kind}, batch {found.batch_size:,}, {found.device}, {found.library}")
            for row in found.rows:
                print(f"  {row.name}: {row.samples_per_s:,.0f} sequences/s, {row.step_ms:.2f} ms a step "
                      f"({row.fastest_ms:.2f} to {row.slowest_ms:.2f}), first step {row.first_step_s:.1f} s, "
                      f"{row.memory_bytes / 2**30:.1f} GiB, Embark is {row.ratio:.1f}×", flush=True)


if __name__ == "__main__":
    main()
