#!/usr/bin/env python3
"""Train DLRM with a handful of flags. Every flag is a field of the spec; `embark train` does the work.

    python train_torchrec_quickstart.py
    torchrun --nproc_per_node=4 train_torchrec_quickstart.py --batch_size 4096 --embedding_dim 256
    python train_torchrec_quickstart.py --dataset_path clicks.parquet   # columns label, dense_0 …, cat_0 …
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import NoReturn

from embark.__main__ import run


def main() -> None:
    args = parser().parse_args()
    words = [word for setting in settings(args) for word in ("--set", setting)]
    sys.exit(run(["train", "quickstart", *words]))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description="DLRM on synthetic data or your own", allow_abbrev=False)
    p.add_argument("--batch_size", type=int, default=2048, help="samples in a step, over all ranks")
    p.add_argument("--embedding_dim", type=int, default=64, help="width of the embedding rows")
    p.add_argument("--num_epochs", type=int, default=1)
    p.add_argument("--num_batches_per_epoch", type=int, default=0, help="synthetic data: batches in an epoch")
    p.add_argument("--learning_rate", type=float, help="of tables and dense layers")
    p.add_argument("--num_embeddings", type=int, default=100_000, help="rows of every table")
    p.add_argument("--num_embeddings_per_feature", help="rows of each table, with commas between")
    p.add_argument("--num_sparse_features", type=int, default=26)
    p.add_argument("--num_dense_features", type=int, default=13)
    p.add_argument("--dense_arch_layer_sizes", help="bottom MLP, such as 512,256,64; its last is --embedding_dim")
    p.add_argument("--over_arch_layer_sizes", default="512,256,1", help="top MLP; its last is 1")
    p.add_argument("--dataset_path", default="", help="a CSV, Parquet or NPZ file; synthetic data without it")
    p.add_argument("--checkpoint_interval", type=int, default=0, help="steps between checkpoints; 0: at the end only")
    p.add_argument("--checkpoint_path", default="runs", help="directory of the runs")
    p.add_argument("--enable_spot_recovery", action="store_true", help="checkpoint every 100 steps")
    p.add_argument("--enable_preemption_recovery", action="store_true", help="the same")
    return p


def settings(args: argparse.Namespace) -> Iterator[str]:
    """The flags as arguments of `--set`. A stopped run always resumes from its last checkpoint."""
    yield f"train.batch_size={args.batch_size}"
    yield f"train.num_epochs={args.num_epochs}"
    yield f"model.embedding_dim={args.embedding_dim}"
    yield f"model.num_dense={args.num_dense_features}"
    if args.learning_rate is not None:
        yield f"train.learning_rate={args.learning_rate}"
    if args.num_embeddings_per_feature:
        rows = sizes("--num_embeddings_per_feature", args.num_embeddings_per_feature)
        yield f"model.num_tables={len(rows)}"
        yield f"model.rows_per_table={rows}"
    else:
        yield f"model.num_tables={args.num_sparse_features}"
        yield f"model.rows_per_table={args.num_embeddings}"
    if args.dense_arch_layer_sizes:
        *hidden, last = sizes("--dense_arch_layer_sizes", args.dense_arch_layer_sizes)
        if last != args.embedding_dim:
            refuse(f"--dense_arch_layer_sizes ends in {last}, but --embedding_dim is {args.embedding_dim}")
        yield f"model.bottom_mlp={hidden}"
    *hidden, last = sizes("--over_arch_layer_sizes", args.over_arch_layer_sizes)
    if last != 1:
        refuse(f"--over_arch_layer_sizes ends in {last}, not in 1")
    yield f"model.top_mlp={hidden}"
    if args.dataset_path:
        yield "data.kind=columns"
        yield f"data.path={args.dataset_path}"
        yield f"data.dense_columns={[f'dense_{i}' for i in range(args.num_dense_features)]}"
    elif args.num_batches_per_epoch:
        yield f"data.num_train_samples={args.num_batches_per_epoch * args.batch_size}"
    recovers = args.enable_spot_recovery or args.enable_preemption_recovery
    yield f"store.checkpoint_every={args.checkpoint_interval or (100 if recovers else 0)}"
    yield f"store.root={args.checkpoint_path}"


def sizes(flag: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        refuse(f"{flag} {text}: not whole numbers with commas between")


def refuse(what: str) -> NoReturn:
    sys.stderr.write(f"error: {what}\n")
    sys.exit(64)


if __name__ == "__main__":
    main()
