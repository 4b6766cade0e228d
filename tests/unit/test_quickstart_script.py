"""The quickstart script: short, stock TorchRec without Embark, and with the losses of `embark train quickstart`."""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from limits import HANG_S

from embark.spec import load_spec

SCRIPT = Path(__file__).parents[2] / "examples" / "templates" / "train_torchrec_quickstart.py"
FLAGS = (
    "--batch_size=64", "--embedding_dim=16", "--num_epochs=2", "--num_batches_per_epoch=10", "--learning_rate=0.02",
    "--num_embeddings_per_feature=70000,40,30,20,2", "--num_dense_features=4", "--dense_arch_layer_sizes=32,16",
    "--over_arch_layer_sizes=32,1", "--seed=7", "--log_interval=1",
)
SETTINGS = (
    "train.batch_size=64", "model.embedding_dim=16", "train.num_epochs=2", "data.num_train_samples=640",
    "data.num_eval_samples=0", "train.learning_rate=0.02", "model.num_tables=5",
    "model.rows_per_table=[70000, 40, 30, 20, 2]", "model.num_dense=4", "model.bottom_mlp=[32]", "model.top_mlp=[32]",
    "train.seed=7", "data.seed=7", "watch.every=1", "watch.tensorboard=false", "store.checkpoint_at_end=false",
    "train.engine=pipeline", "train.precision=fp32", "place.device=cpu",
)
"""What FLAGS mean, as settings of the quickstart's spec."""
PRINTED = 1e-6
"""The script prints six digits, and takes its mean from the batches' means, not from the sum over the samples."""
Losses = list[float]


def losses_in(output: str) -> Losses:
    return [float(loss) for loss in re.findall(r"^step \d+/\d+   loss (\S+)", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_torchrec_quickstart", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run_script(script, monkeypatch, tmp_path, capsys) -> Iterator[Callable[..., Losses]]:
    """A function from flags to the printed losses, in this process."""
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> Losses:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
        script.main()
        return losses_in(capsys.readouterr().out)

    yield run
    logging.disable(logging.NOTSET)
    logging.captureWarnings(False)


def embark_losses(root: Path, settings: tuple[str, ...] = SETTINGS) -> Losses:
    from embark.trainers import train

    values = train(load_spec("quickstart", [*settings, f"store.root={root}"]), fresh=True)
    return step_losses(Path(values["run_dir"]))


def step_losses(run_dir: Path) -> Losses:
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "step"]


def environment(tmp_path: Path) -> dict[str, str]:
    """One in which whoever imports embark fails."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "embark.py").write_text("raise AssertionError('embark was imported')\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path / "blocked"), "OMP_NUM_THREADS": "1"}


def execute(words: list[str], folder: Path, env: dict[str, str], python: str = sys.executable) -> str:
    done = subprocess.run([python, *words], cwd=folder, env=env, text=True, capture_output=True, timeout=HANG_S,
                          check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_at_most_200_lines_and_imports_no_embark():
    text = SCRIPT.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert max(map(len, text.splitlines())) <= 120
    nodes = list(ast.walk(ast.parse(text)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.split(".")[0] == "embark"]


@pytest.mark.parametrize(
    ("rows", "num_dense", "seed"), [([100_000] * 26, 13, 1), ([50, 40, 30], 4, 7), ([2], 1, 2**40)])
def test_its_samples_are_those_of_embark_to_the_bit(script, rows, num_dense, seed):
    from embark.data import open_source

    spec = load_spec("quickstart", [f"model.num_tables={len(rows)}", f"model.rows_per_table={rows}",
                                    f"model.num_dense={num_dense}", f"data.seed={seed}"])
    mine = script.SyntheticDataset(Namespace(rows=rows, num_dense_features=num_dense, seed=seed))
    source = open_source(spec)
    for start, stop in ((0, 2048), (1_234_567, 1_234_568), (1_990_000, 2_000_000)):
        dense, ids, labels = (part.numpy() for part in mine[slice(start, stop)])
        batch = source.train_rows(0, start, stop)
        assert np.array_equal(dense, batch.dense)
        assert np.array_equal(ids.T.reshape(-1), batch.ids)
        assert np.array_equal(labels, batch.label)


def test_its_losses_are_those_of_embark_train_with_stock_arithmetic(run_script, monkeypatch, tmp_path):
    """On a CPU Embark sums gradients in its own lookup and interaction, in another order; without those, nothing else
    differs, be it weights, samples, optimizers, rates or the plan."""
    import torch

    from embark.trainers.torch import trainer
    from embark.trainers.torch.networks.dlrm import PairwiseDots

    def stock_dots(self: PairwiseDots, vectors: torch.Tensor) -> torch.Tensor:
        return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pair_cells)

    printed = run_script(*FLAGS)
    monkeypatch.setattr(trainer, "use_fast_cpu_lookup", lambda model: 0)
    monkeypatch.setattr(PairwiseDots, "forward", stock_dots)
    assert len(printed) == 20
    assert printed == pytest.approx(embark_losses(tmp_path), abs=PRINTED, rel=0)


def test_its_losses_are_those_of_embark_train_but_for_rounding(run_script, tmp_path):
    """The first steps agree to the printed digits. Then Adagrad, dividing by the root of the first gradients, turns
    differences of rounding into some 1e-3, as it does for one bit in the initial tables (bench/RESULTS.md)."""
    printed, losses = run_script(*FLAGS), embark_losses(tmp_path)
    assert printed[:4] == pytest.approx(losses[:4], abs=2 * PRINTED, rel=0)
    assert printed == pytest.approx(losses, abs=5e-3, rel=0)
    assert losses[-1] < losses[0]


def test_a_stopped_run_resumes_with_the_same_losses(run_script, tmp_path):
    printed = run_script(*FLAGS, "--checkpoint_path=kept", "--checkpoint_interval=8")
    assert sorted(os.listdir(tmp_path / "kept")) == ["step-000000008", "step-000000016", "step-000000020"]
    for step in ("step-000000016", "step-000000020"):
        (tmp_path / "kept" / step / ".metadata").unlink()  # as if stopped while it wrote
    assert run_script(*FLAGS, "--checkpoint_path=kept") == printed[8:]
    assert run_script(*FLAGS, "--checkpoint_path=kept") == []


@pytest.mark.parametrize("name", ["clicks.npz", "clicks.parquet"])
def test_it_trains_on_columns_of_a_file(run_script, script, tmp_path, name):
    """The synthetic samples from a file give the synthetic losses; an id may be any whole number."""
    from pyarrow import parquet, table

    rows = [70_000, 40, 30, 20, 2]
    dense, ids, labels = script.SyntheticDataset(Namespace(rows=rows, num_dense_features=4, seed=7))[slice(0, 650)]
    columns = {"label": labels.numpy().astype(np.int64), **{f"dense_{i}": dense[:, i].numpy() for i in range(4)},
               **{f"cat_{i}": ids[:, i].numpy().astype(np.int64) - 3 * rows[i] for i in range(5)}}
    if name.endswith(".npz"):
        np.savez(tmp_path / name, **columns)
    else:
        parquet.write_table(table(columns), tmp_path / name)
    assert run_script(*FLAGS, f"--dataset_path={name}") == run_script(*FLAGS)


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("--dense_arch_layer_sizes=512,256,64 --embedding_dim=128", "must end in --embedding_dim"),
        ("--over_arch_layer_sizes=512,2", "--over_arch_layer_sizes in 1"),
        ("--num_embeddings_per_feature=3,x", "argument --num_embeddings_per_feature: invalid"),
        ("--batch_sizes=3", "unrecognized arguments: --batch_sizes=3"),
    ],
)
def test_it_refuses_what_cannot_be(script, monkeypatch, capsys, flags, what):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags.split()])
    with pytest.raises(SystemExit) as ended:
        script.parse_args()
    assert ended.value.code == 2
    assert what in capsys.readouterr().err


def test_its_defaults_are_the_preset_s(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    args, spec = script.parse_args(), load_spec("quickstart", [])
    assert args.rows == [table.rows for table in spec.model.table_list()]
    assert args.dense_arch_layer_sizes == [*spec.model.bottom_mlp, spec.model.embedding_dim]
    assert args.over_arch_layer_sizes == [*spec.model.top_mlp, 1]
    assert (args.num_dense_features, args.embedding_dim) == (spec.model.num_dense, spec.model.embedding_dim)
    assert (args.batch_size, args.learning_rate) == (spec.train.batch_size, spec.train.learning_rate)
    assert (args.num_epochs, args.seed, args.seed) == (spec.train.num_epochs, spec.train.seed, spec.data.seed)
    assert args.num_batches_per_epoch == spec.data.num_train_samples // spec.train.batch_size
    assert args.log_interval == spec.watch.every


def test_plain_python_trains_where_embark_cannot_be_imported(tmp_path):
    output = execute([str(SCRIPT), *FLAGS], tmp_path, environment(tmp_path))
    assert "cat_0 | table_wise" in output
    assert len(losses_in(output)) == 20
    assert output.splitlines()[-1].startswith("`embark train quickstart` adds")


@pytest.mark.slow
def test_under_torchrun_two_ranks_give_the_losses_of_one(run_script, tmp_path, warm_python):
    """Over 100 steps, and with checkpoints that load at another number of ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT)]
    flags = [*FLAGS, "--num_batches_per_epoch=50", "--checkpoint_interval=60"]
    alone = run_script(*flags)
    words = [*torchrun, *flags, "--checkpoint_path=kept"]
    two = losses_in(execute(words, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"}, warm_python))
    assert len(two) == 100
    assert two[:4] == pytest.approx(alone[:4], abs=2 * PRINTED, rel=0)
    assert two == pytest.approx(alone, abs=5e-3, rel=0)  # gradients are summed in two parts
    (tmp_path / "kept" / "step-000000100" / ".metadata").unlink()
    assert run_script(*flags, "--checkpoint_path=kept") == pytest.approx(two[60:], abs=5e-3, rel=0)
