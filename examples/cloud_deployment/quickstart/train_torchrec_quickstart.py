"""Train a DLRM to predict clicks with TorchRec: model, sharding plan, pipeline, checkpoints and data in one file.

    python train_torchrec_quickstart.py                                 # on a CPU or one GPU
    torchrun --nproc_per_node=4 train_torchrec_quickstart.py            # one process ("rank") for each of four GPUs
"""

import argparse
import importlib
import logging
import os
import time
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim import CombinedOptimizer, KeyedOptimizerWrapper, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter


def main() -> None:
    args = parse_args()
    logging.captureWarnings(True)  # TorchRec and torch warn about each other's defaults
    logging.disable(logging.WARNING)
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # without torchrun
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo", **alone)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    show = print if rank == 0 else lambda *_, **__: None
    model, optimizer = make_model(args, device)
    show(str(model.plan).rsplit("\n\n", 1)[0], "\n")
    dataset = file_dataset(args) if args.dataset_path else SyntheticDataset(args)
    steps_per_epoch = len(dataset) // args.batch_size if args.dataset_path else args.num_batches_per_epoch
    num_steps, first_step = args.num_epochs * steps_per_epoch, 0
    # A checkpoint has the tables of all ranks and loads at any number of ranks. DCP writes .metadata last.
    state, folder = {"model": model, "optimizer": optimizer}, Path(args.checkpoint_path)
    if args.checkpoint_path and (saved := sorted(folder.glob("step-*/.metadata"))):
        dcp.load(state, checkpoint_id=saved[-1].parent)
        first_step = int(saved[-1].parent.name.removeprefix("step-"))
        show(f"resumed from {saved[-1].parent}")
    if args.batch_size % world_size or not num_steps:
        raise SystemExit("--batch_size must be a multiple of the number of ranks, and at most the number of samples")
    part = args.batch_size // world_size  # each rank reads its part of every batch
    starts = [step % steps_per_epoch * args.batch_size + rank * part for step in range(first_step, num_steps)]
    loader = DataLoader(dataset, sampler=[slice(start, start + part) for start in starts], batch_size=None,
                        collate_fn=to_batch, num_workers=2 if is_cuda else 0, pin_memory=is_cuda)
    # While batch i trains, the ids of batch i + 1 go to the ranks that hold their rows, and batch i + 2 to the GPU.
    pipeline, batches = TrainPipelineSparseDist(model, optimizer, device), iter(loader)
    losses, began_s = [], time.perf_counter()
    for step in range(first_step + 1, num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * (1 - (step - 1) / num_steps)  # linear decay
        losses.append(pipeline.progress(batches)[0])  # forward, backward, update; returns loss, logits and labels
        if step % args.log_interval == 0 or step == num_steps:
            mean = torch.stack(losses).double().mean() / world_size
            dist.all_reduce(mean)
            rate = len(losses) * args.batch_size / (time.perf_counter() - began_s)
            show(f"step {step}/{num_steps}   loss {mean.item():.6f}   {rate:,.0f} samples/s", flush=True)
            losses, began_s = [], time.perf_counter()
        if args.checkpoint_path and (step % args.checkpoint_interval == 0 or step == num_steps):
            dcp.save(state, checkpoint_id=folder / f"step-{step:09}")
    show("`embark train quickstart` adds faster steps, AUC, curves, exact resume, costs, and jobs on AWS, Azure, GCP.")
    dist.destroy_process_group()


def make_model(args: argparse.Namespace, device: torch.device) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """DLRM: an embedding table for each categorical feature, MLPs, and dot products of all pairs of vectors."""
    names = [f"cat_{i}" for i in range(len(args.rows))]
    torch.manual_seed(args.seed)  # the same dense layers on every rank
    tables = EmbeddingBagCollection(device=torch.device("meta"), tables=[  # on `meta`: no memory before sharding
        EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=rows, embedding_dim=args.embedding_dim,
                           init_fn=partial(init_table, f"{args.seed}/{name}"))
        for name, rows in zip(names, args.rows, strict=True)])
    model = DLRMTrain(DLRM(tables, args.num_dense_features, args.dense_arch_layer_sizes, args.over_arch_layer_sizes))
    # The tables' optimizer runs inside the backward pass, and updates only the rows that the batch has looked up.
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": args.learning_rate, "eps": 1e-8})
    # The planner gives each table to a rank and balances their work. A Topology can tell it of GPUs with over 32 GB.
    allowed = dict.fromkeys(names, ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"]))
    planner = EmbeddingShardingPlanner(batch_size=args.batch_size // dist.get_world_size(), constraints=allowed)
    plan = planner.collective_plan(model, pg=dist.group.WORLD)  # rank 0 searches, all get the same plan
    # Each table now gets its memory, on its rank. Dense layers are on every rank; DDP averages their gradients.
    sharded = DistributedModelParallel(model, device=device, plan=plan)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))  # what has no optimizer yet
    adagrad = partial(torch.optim.Adagrad, lr=args.learning_rate, eps=1e-8, fused=device.type == "cpu" or None)
    return sharded, CombinedOptimizer([sharded.fused_optimizer, KeyedOptimizerWrapper(dense, adagrad)])


def init_table(key: str, weight: torch.Tensor) -> None:
    """Uniform in ±1 / sqrt(rows), each block of rows with its own seed: the same at any number of ranks."""
    bound, generator = max(1, len(weight)) ** -0.5, torch.Generator(weight.device)
    for i, block in enumerate(weight.detach().split(65_536)):
        block.uniform_(-bound, bound, generator=generator.manual_seed(zlib.crc32(f"{key}/{i}".encode())))


def to_batch(samples: tuple[torch.Tensor, ...]) -> Batch:
    """Ids lie feature by feature; lengths say how many each sample has of each: 1 here, any number in general."""
    dense, ids, labels = samples  # [n, D], [n, F], [n]
    names, lengths = [f"cat_{i}" for i in range(ids.shape[1])], torch.ones(ids.numel(), dtype=torch.int32)
    return Batch(dense, KeyedJaggedTensor.from_lengths_sync(names, ids.T.reshape(-1), lengths), labels)


def file_dataset(args: argparse.Namespace) -> TensorDataset:
    """Columns label, dense_0 …, cat_0 … of an NPZ or Parquet file."""
    is_npz = args.dataset_path.endswith(".npz")
    columns = (np.load if is_npz else importlib.import_module("pyarrow.parquet").read_table)(args.dataset_path)
    dense = np.stack([columns[f"dense_{i}"] for i in range(args.num_dense_features)], axis=1).astype(np.float32)
    ids = (np.stack([columns[f"cat_{i}"] for i in range(len(args.rows))], axis=1) % args.rows).astype(np.int32)
    return TensorDataset(*map(torch.from_numpy, (dense, ids, np.asarray(columns["label"]).astype(np.float32))))


class SyntheticDataset(Dataset):
    """Clicks drawn by a hidden model; sample i is a function of the seed and i. The best possible AUC is about 0.80."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.seed, self.num_dense, self.rows = args.seed, args.num_dense_features, np.array(args.rows)[:, None]
        self.table, self.num_pairs = np.arange(len(self.rows))[:, None], min(4, len(self.rows) // 2)
        self.weights = quarter(random_bits(np.arange(self.num_dense), self.seed, 0x1DDE, 1), 0)
        terms = self.draw(2, 0, 16_384)[2]  # of other samples, to find scales and bias with
        falling = [1 / (2 + np.arange(num)) for num in (1, len(self.rows), self.num_pairs)]  # the first matter most
        variance = np.concatenate([share * f / f.sum() for share, f in zip((0.40, 0.45, 0.15), falling, strict=True)])
        scales = (np.sqrt(variance) / terms.std(axis=1, dtype=float)).astype(np.float32)[:, None]
        logit = sum(terms * scales).astype(float)
        factor, bias = 1.4 / logit.std(), -1.4 / logit.std() * logit.mean()
        for _ in range(30):  # Newton's method: the bias at which a quarter of the samples are clicks
            chance = 1 / (1 + np.exp(-logit * factor - bias))
            bias += (0.25 - chance.mean()) / (chance * (1 - chance)).mean()
        self.bias, self.scales = np.float32(bias), scales * np.float32(factor)

    def __getitem__(self, part: slice) -> tuple[torch.Tensor, ...]:
        dense, ids, terms = self.draw(0, part.start, part.stop)
        chance = 1 / (1 + np.exp(-sum(terms * self.scales, self.bias)))
        coin = (random_bits(np.arange(part.start, part.stop), self.seed, 0, 3) >> np.uint64(11)) * 2.0**-53
        return tuple(map(torch.from_numpy, (dense, ids.T, (coin < chance).astype(np.float32))))

    def draw(self, split: int, start: int, stop: int) -> tuple[np.ndarray, ...]:
        """Dense features, ids, and what the dense features, the tables and pairs of tables add to the logit."""
        bits = random_bits(np.arange(start * self.num_dense, stop * self.num_dense), self.seed, split, 2)
        sums = bits.view(np.uint16).reshape(-1, self.num_dense, 4).sum(axis=2, dtype=np.float32)
        dense = (sums - 131_070) * np.float32(3**0.5 / 65_536)  # nearly normal: sums of four uniform numbers
        u = (random_bits(np.arange(start, stop), self.seed, split, 0, self.table) >> np.uint64(11)) * 2.0**-53
        low, high = 0.5 ** (1 - 1.2), (self.rows + 0.5) ** (1 - 1.2)  # Zipf: id k has a chance close to (k + 1)^-1.2
        ids = np.clip((u * (high - low) + low) ** (1 / (1 - 1.2)) - 0.5, 0, self.rows - 1).astype(np.int32)
        bits, decay = random_bits(ids, self.seed, 0x1DDE, 0, self.table), 50 / (ids + 50)
        effects, *latent = (((quarter(bits, i) + min(i, 1)) * decay).astype(np.float32) for i in range(3))
        pairs = sum(v[0 : 2 * self.num_pairs : 2] * v[1 : 2 * self.num_pairs : 2] for v in latent)
        of_dense = sum(w * (x + 0.3 * x * x) for w, x in zip(self.weights, dense.T, strict=True))
        return dense, ids, np.concatenate([of_dense[None], effects, pairs])


def random_bits(counters: np.ndarray, *stream: int | np.ndarray) -> np.ndarray:
    """64 random bits for each counter (SplitMix64); an array in the stream's key makes as many streams."""
    step, bits = np.uint64(0x9E3779B97F4A7C15), np.zeros(1, np.uint64)
    for addend in (*(np.asarray(part, np.uint64) + step for part in stream), counters.astype(np.uint64) * step):
        bits = bits + addend
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            bits = (bits ^ bits >> np.uint64(shift)) * np.uint64(factor)
    return bits


def quarter(bits: np.ndarray, which: int) -> np.ndarray:  # one of four 16-bit parts, with mean 0 and variance 1
    return (bits.view(np.uint16)[..., which::4].astype(np.float32) - 32_767.5) * np.float32(12**0.5 / 65_536)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    for name, default, text in (
        ("batch_size", 2048, "samples per step, over all ranks"), ("learning_rate", 0.01, "at the start"),
        ("num_epochs", 1, "passes over the data"), ("num_batches_per_epoch", 976, "of synthetic data"),
        ("dataset_path", "", "NPZ or Parquet file of your data"), ("checkpoint_path", "", "to save to and resume from"),
        ("num_dense_features", 13, "numbers per sample"), ("num_sparse_features", 26, "ids per sample, and tables"),
        ("num_embeddings", 100_000, "rows of each table"), ("num_embeddings_per_feature", [], "if they differ"),
        ("embedding_dim", 64, "width of the tables"), ("over_arch_layer_sizes", [512, 256, 1], "top MLP"),
        ("dense_arch_layer_sizes", [], "bottom MLP; empty: 512,256,embedding_dim"), ("seed", 1, "of random numbers"),
        ("log_interval", 20, "steps between lines"), ("checkpoint_interval", 100, "steps between checkpoints"),
    ):
        kind = (lambda text: [int(size) for size in text.split(",")]) if isinstance(default, list) else type(default)
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: {default})")
    args = parser.parse_args()
    args.rows = args.num_embeddings_per_feature or [args.num_embeddings] * args.num_sparse_features
    args.dense_arch_layer_sizes = args.dense_arch_layer_sizes or [512, 256, args.embedding_dim]
    if args.dense_arch_layer_sizes[-1] != args.embedding_dim or args.over_arch_layer_sizes[-1] != 1:
        parser.error("--dense_arch_layer_sizes must end in --embedding_dim, and --over_arch_layer_sizes in 1")
    return args


if __name__ == "__main__":
    main()
