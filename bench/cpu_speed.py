"""How fast one CPU training step is: plain PyTorch, stock TorchRec, and this trainer.

All three train the same model from the same batches in one process, taking turns a few
steps at a time, so that a busy machine slows them alike. The peers are at their best: fused
dense Adagrad, the sparse pipeline, and TorchRec in fp32 and in bf16 autocast both.

    python bench/cpu_speed.py --steps 60 --batch-size 2048 --json cpu_speed.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import embark.trainers.torch  # noqa: F401  isort: skip  before torch: it tells torch's threads how to wait
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from embark.data import SampleSource, open_source
from embark.spec import RunSpec, load_spec
from embark.trainers.torch.batch import DeviceBatch, ToDevice
from embark.trainers.torch.trainer import TorchTrainer
from embark.trainers.torch.world import World, join

NUM_TABLES = 26
NUM_ROWS = 100_000
DIM = 64
NUM_DENSE = 13
BOTTOM_LAYERS = [512, 256, DIM]
TOP_LAYERS = [512, 256, 1]
LEARNING_RATE = 0.01
STEPS_PER_TURN = 3
CPU = torch.device("cpu")
FEATURES = [f"cat_{table}" for table in range(NUM_TABLES)]


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    train: Callable[[Sequence[Batch]], None]
    """Train one turn's batches."""
    logits: Callable[[Batch], Tensor]


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    samples_per_s: float
    step_ms: float
    auc: float


def main() -> None:
    args = parse_args()
    spec = load_spec("quickstart", [
        f"train.batch_size={args.batch_size}", f"train.learning_rate={LEARNING_RATE}", "train.decay=none",
        f"train.dense_learning_rate={LEARNING_RATE}", "place.device=cpu",
    ])
    with join(spec.place) as world:
        results = run(spec, world, args.steps)
    print_table(results, args)
    if args.json:
        report = {
            "steps": args.steps,
            "batch_size": args.batch_size,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "results": [asdict(result) for result in results],
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def run(spec: RunSpec, world: World, num_steps: int) -> list[Result]:
    batch_size = spec.train.batch_size
    source = open_source(spec)
    ready = ToDevice(FEATURES, CPU)
    batches = [as_torchrec(ready(source.train_rows(0, i * batch_size, (i + 1) * batch_size))) for i in range(num_steps)]
    held_out = [
        as_torchrec(ready(source.eval_rows(i * batch_size, (i + 1) * batch_size)))
        for i in range(max(1, 40_000 // batch_size))
    ]
    contenders = [plain_pytorch(), stock_torchrec(autocast=False), stock_torchrec(autocast=True),
                  ours(spec, world, source)]
    turn_s: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    turns = [batches[start : start + STEPS_PER_TURN] for start in range(0, num_steps, STEPS_PER_TURN)]
    for turn in turns:
        for contender in contenders:
            start_s = time.perf_counter()
            contender.train(turn)
            turn_s[contender.name].append((time.perf_counter() - start_s) / len(turn))
    results = []
    for contender in contenders:
        # The first turn fills caches and pipelines; the median forgives the neighbours.
        step_s = statistics.median(turn_s[contender.name][1:] or turn_s[contender.name])
        scores = torch.cat([contender.logits(batch) for batch in held_out])
        labels = torch.cat([batch.labels for batch in held_out])
        results.append(Result(contender.name, batch_size / step_s, step_s * 1e3, auc(scores, labels)))
    return results


def as_torchrec(batch: DeviceBatch) -> Batch:
    return Batch(batch.dense, batch.sparse, batch.label)


def plain_pytorch() -> Contender:
    """One sparse nn.EmbeddingBag a table, and the Adagrad of torch, which takes sparse gradients."""
    torch.manual_seed(0)

    class PlainDLRM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(
                nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True) for _ in range(NUM_TABLES)
            )
            for table in self.tables:
                nn.init.uniform_(table.weight, -(NUM_ROWS**-0.5), NUM_ROWS**-0.5)
            self.bottom = mlp(NUM_DENSE, BOTTOM_LAYERS, relu_last=True)
            num_pairs = (NUM_TABLES + 1) * NUM_TABLES // 2
            self.top = mlp(DIM + num_pairs, TOP_LAYERS, relu_last=False)
            first, second = torch.triu_indices(NUM_TABLES + 1, NUM_TABLES + 1, offset=1)
            self.register_buffer("cells", first * (NUM_TABLES + 1) + second)

        def forward(self, batch: Batch) -> Tensor:
            bottom = self.bottom(batch.dense_features)
            ids = batch.sparse_features.values().view(NUM_TABLES, -1)
            vectors = torch.stack([bottom, *(table(ids[t, :, None]) for t, table in enumerate(self.tables))], dim=1)
            # The quickest of the ways that autograd differentiates by itself.
            dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.cells)
            return self.top(torch.cat([bottom, dots], dim=1)).squeeze(1)

    model = PlainDLRM()
    sparse = torch.optim.Adagrad(model.tables.parameters(), lr=LEARNING_RATE)
    dense = torch.optim.Adagrad([*model.bottom.parameters(), *model.top.parameters()], lr=LEARNING_RATE, fused=True)

    def train(turn: Sequence[Batch]) -> None:
        for batch in turn:
            sparse.zero_grad()
            dense.zero_grad()
            binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
            sparse.step()
            dense.step()

    @torch.no_grad()
    def logits(batch: Batch) -> Tensor:
        return model(batch)

    return Contender("plain PyTorch, fp32", train, logits)


def stock_torchrec(autocast: bool) -> Contender:
    """TorchRec as its examples use it: DMP, DLRM, fused row-wise Adagrad, the sparse pipeline."""
    torch.manual_seed(0)
    model = DLRMTrain(
        DLRM(
            make_tables(),
            dense_in_features=NUM_DENSE,
            dense_arch_layer_sizes=BOTTOM_LAYERS,
            over_arch_layer_sizes=TOP_LAYERS,
            dense_device=CPU,
        )
    )
    ebc_path = "model.sparse_arch.embedding_bag_collection"
    dmp, optimizer = shard(model, ebc_path)
    pipeline = TrainPipelineSparseDist(dmp, optimizer, CPU)

    def train(turn: Sequence[Batch]) -> None:
        feed = iter(turn)
        for _ in turn:
            # Within the loop: a context keeps its casts of the weights until it ends.
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                pipeline.progress(feed)

    @torch.no_grad()
    def logits(batch: Batch) -> Tensor:
        pipeline.detach()
        dmp.eval()
        _, (_, scores, _) = dmp(batch)
        return scores

    return Contender(f"stock TorchRec DMP, {'bf16' if autocast else 'fp32'}", train, logits)


def ours(spec: RunSpec, world: World, source: SampleSource) -> Contender:
    """What `embark train` runs: the same model, its engine, its schedule and its metrics."""
    built = TorchTrainer(spec, world, 1000, source)

    def train(turn: Sequence[Batch]) -> None:
        feed = iter([DeviceBatch(b.dense_features, b.sparse_features, b.labels) for b in turn])
        for step in range(len(turn)):
            built.optimizers.set_rates(step)
            built.engine.step(feed, step)

    def logits(batch: Batch) -> Tensor:
        with built.engine.evaluating() as model:
            _, (_, scores, _) = model(DeviceBatch(batch.dense_features, batch.sparse_features, batch.labels))
        return scores

    return Contender("Embark", train, logits)


def shard(model: nn.Module, ebc_path: str) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    ebc = model.get_submodule(ebc_path)
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": LEARNING_RATE})
    sharder = EmbeddingBagCollectionSharder()
    sharding = {feature: table_wise(rank=0, device="cpu") for feature in FEATURES}
    module_plan = construct_module_sharding_plan(ebc, sharding, sharder, world_size=1, device_type="cpu")
    dmp = DistributedModelParallel(model, device=CPU, plan=ShardingPlan({ebc_path: module_plan}), sharders=[sharder])
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=LEARNING_RATE, fused=True),
    )
    return dmp, CombinedOptimizer([dmp.fused_optimizer, dense])


def make_tables() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=feature, num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=[feature])
            for feature in FEATURES
        ],
        device=torch.device("meta"),
    )


def mlp(num_inputs: int, layers: Sequence[int], relu_last: bool) -> nn.Sequential:
    modules: list[nn.Module] = []
    for width in layers:
        modules += [nn.Linear(num_inputs, width), nn.ReLU()]
        num_inputs = width
    return nn.Sequential(*(modules if relu_last else modules[:-1]))


def auc(scores: Tensor, labels: Tensor) -> float:
    ranks = torch.empty_like(scores, dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, scores.numel() + 1, dtype=torch.float64)
    num_positive = float(labels.sum())
    num_negative = labels.numel() - num_positive
    return (float(ranks[labels > 0].sum()) - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


def print_table(results: Sequence[Result], args: argparse.Namespace) -> None:
    mine = results[-1]
    print(f"{args.steps} steps of {args.batch_size} samples, {torch.get_num_threads()} threads")
    print(f"{'':28}{'samples/s':>11}{'ms/step':>9}{'ours is':>9}{'AUC':>8}")
    for result in results:
        ratio = mine.samples_per_s / result.samples_per_s
        print(f"{result.name:28}{result.samples_per_s:>11,.0f}{result.step_ms:>9.1f}{ratio:>8.2f}x{result.auc:>8.4f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="training steps of each contender")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
