"""What a round of the soak trains, drawn from its seed: a model, ranks, an engine, a store and data."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from prepared_rows import make_prepared

from embark.data.prepared import Feature

STEPS_ON_A_GPU = 8
"""Times those on a CPU: else the first start or two would finish the run."""


@dataclass(frozen=True)
class Case:
    """What a round trains."""

    trainer: str  # torch or jax
    device: str
    num_ranks: int
    store: str  # folder or bucket
    data: str
    sets: tuple[str, ...]
    spec: str

    def __str__(self) -> str:
        return f"{self.trainer}, {self.device}, {self.num_ranks} ranks, {self.store}, {self.data} data"


def draw_case(rng: random.Random, trainers: list[str], stores: list[str], folder: Path, device: str) -> Case:
    trainer, store = rng.choice(trainers), rng.choice(stores)
    num_ranks = rng.choice([1, 2, 2, 3]) if trainer == "torch" else 1
    data = rng.choice(["synthetic", "prepared", "columns"])
    kind, num_dense, dim = rng.choice(["dlrm", "dcnv2"]), rng.choice([0, 3, 8]), rng.choice([8, 16, 64])
    if kind == "dlrm" and not num_dense:
        num_dense = 2
    tables = [Feature(f"t{i}", rng.choice([7, 100, 301]), multi_hot=hot, is_ragged=hot > 1 and data != "columns")
              for i in range(rng.randint(1, 4)) for hot in [rng.choice([1, 1, 3]) if data != "columns" else 1]]
    is_cuda = trainer == "torch" and device == "cuda"
    num_ranks, scale = (1, STEPS_ON_A_GPU) if is_cuda else (num_ranks, 1)  # NCCL wants a GPU for each rank
    batch = 12 * rng.randint(1, 4)
    steps = rng.randint(70, 110) * scale
    keep = rng.randint(1, 3)
    spec = [
        'name = "run"', "[model]", f'kind = "{kind}"', f"num_dense = {num_dense}", f"embedding_dim = {dim}",
        "bottom_mlp = [16]", "top_mlp = [16]", "cross_rank = 8", "num_cross_layers = 2",
        *(f'[[model.tables]]\nname = "{t.name}"\nrows = {t.rows}\nmulti_hot = {t.multi_hot}\n'
          f'pooling = "{rng.choice(["sum", "mean"])}"' for t in tables),
        "[data]", "num_train_samples = 1024", f"num_eval_samples = {rng.choice([0, 96])}",
        f"ragged = {str(data == 'synthetic').lower()}", f"seed = {rng.randint(0, 99)}",
        "[train]", f"batch_size = {batch}", f"num_steps = {steps}", f"num_epochs = {100 * scale}",
        f"learning_rate = {0.05 if kind == 'dlrm' else 1e-5}",
        f'optimizer = "{rng.choice(["sgd", "adagrad", "rowwise_adagrad"])}"',
        f'dense_optimizer = "{rng.choice(["sgd", "adagrad", "adam"])}"', 'precision = "fp32"',
        f"seed = {rng.randint(0, 99)}", f'decay = "{rng.choice(["none", "cosine"])}"', "warmup_steps = 5",
        f"eval_every = {rng.choice([0, 15])}",
        *([f'engine = "{rng.choice(["cuda_graph", "pipeline"])}"'] if is_cuda else []),
        "[place]", f'device = "{device if trainer == "torch" else "jax"}"', "timeout_s = 120",
        "[store]", f"checkpoint_every = {rng.randint(2, 6)}", f"keep_checkpoints = {keep}",
        f"in_background = {str(rng.random() < 0.7).lower()}", "[watch]", "every = 1", "tensorboard = false",
    ]
    sets: tuple[str, ...] = ()
    if data == "prepared":
        make_prepared(folder / "data", tuple(tables), train=600, validation=96, num_dense=num_dense)
        sets = ("data.kind=prepared", f"data.path={folder / 'data'}")
    elif data == "columns":
        write_csv(folder / "rows.csv", tables, num_dense, rng)
        names = json.dumps([f"d{i}" for i in range(num_dense)])
        sets = ("data.kind=columns", f"data.path={folder / 'rows.csv'}", f"data.dense_columns={names}")
    return Case(trainer, device if trainer == "torch" else "cpu", num_ranks, store, data, sets, "\n".join(spec) + "\n")


def write_csv(path: Path, tables: list[Feature], num_dense: int, rng: random.Random) -> None:
    columns = ["label", *(f"d{i}" for i in range(num_dense)), *(t.name for t in tables)]
    rows = ([rng.randint(0, 1), *(round(rng.random(), 4) for _ in range(num_dense)),
             *(rng.randrange(t.rows) for t in tables)] for _ in range(700))
    path.write_text("\n".join(",".join(map(str, row)) for row in [columns, *rows]) + "\n")
