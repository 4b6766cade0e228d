"""Models for other runtimes score 10,000 raw rows as `embark score` does, where Embark cannot be imported."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from exported_runs import draw_rows, prepared_spec, write_csv
from limits import HANG_S

from embark import export_portable, export_run, model_inputs, score_file
from embark.__main__ import run as embark
from embark.errors import DataError, UserError
from embark.spec import resolve
from embark.store.atomic_file import SCRATCH_SUFFIX
from embark.trainers import train
from embark.trainers.torch.scoring.portable_model import FEATURES

NUM_ROWS = 10_000
SAME_KERNELS = torch.backends.mkl.is_available()  # Without MKL `embark score` multiplies by faster layers of its own.
NO_COMPILER = {"cpp.cxx": ("no-such-compiler",)}
COLUMNS = ("click", "stars", "kind", "price", "user", "seen", "seconds", "shop")
TABLES: list[dict[str, Any]] = [
    {"name": "seen", "rows": 9, "multi_hot": 4, "pooling": "mean"}, {"name": "shop", "rows": 5},
    {"name": "user", "rows": 60}]
TASKS = [{"name": "click"}, {"name": "stars", "loss": "regression"},
         {"name": "kind", "loss": "softmax", "num_classes": 3}]
CODE = """
import torch

class MyModel(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.top = torch.nn.Linear(model.num_dense + 24, 1)

    def forward(self, dense, pooled):
        return self.top(torch.cat([dense, *({BODY}(one) for one in pooled.values())], dim=1))
"""
FIELDS = {"top_mlp": [12, 6], "num_cross_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {}, "dcnv2": {"kind": "dcnv2", "num_cross_layers": 2, "cross_rank": 4},
    **{kind: {"kind": kind, **FIELDS} for kind in ("deepfm", "wide_deep", "xdeepfm", "autoint", "finalmlp", "tabm")},
    "masknet": {"kind": "masknet", "cross_rank": 5, **FIELDS},
    "several tasks": {"tasks": TASKS, "task_head": "mmoe"},
    "two towers": {"kind": "two_tower", "two_tower": {"item": "shop", "user": "user", "item_layers": [4],
                                                      "user_layers": [4], "normalize": True}},
    "sums of ids": {"tables": [{**TABLES[0], "pooling": "sum"}, *TABLES[1:]]},
    "a shared table": {"tables": [{"name": "seen", "shares": "user", "multi_hot": 4}, *TABLES[1:]]},
    "a dynamic table": {"tables": [*TABLES[:2], {"name": "user", "ids": "dynamic", "capacity": 32}]},
    "a custom model": {"kind": "my_model:MyModel", "code": CODE.replace("{BODY}", "torch.tanh")},
}
TORCH_ALONE = """
import json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
sys.modules |= dict.fromkeys(["embark", "torchrec", "fbgemm_gpu"])  # to import one of them fails
import torch
def scores(parts):
    found = model(*(parts[one["name"]] for one in features["inputs"]))
    return {one["name"]: values for one, values in zip(features["outputs"], found, strict=True)}
def first(num):
    sizes = {name.rpartition(".")[0]: int(values[num]) for name, values in inputs.items() if name.endswith(".offsets")}
    return {name: values[: sizes.get(name.removesuffix(".ids"), num)] for name, values in inputs.items()}
for folder in sys.argv[2:]:
    features, inputs = json.load(open(folder + "/features.json")), torch.load(folder + "/inputs.pt")
    path = folder + ("/1/" if os.path.exists(folder + "/config.pbtxt") else "/") + features["file"]
    is_compiled = features["runtime"] == "aoti"
    model = torch._inductor.aoti_load_package(path) if is_compiled else torch.export.load(path).module()
    torch.save({num: scores(first(num) if num else inputs) for num in (0, 1, 2)}, folder + "/scores.pt")
"""
ONNX_ALONE = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
sys.modules |= dict.fromkeys(["embark", "torch", "torchrec", "fbgemm_gpu"])
import numpy, onnxruntime
for folder in sys.argv[2:]:
    features = json.load(open(folder + "/features.json"))
    session = onnxruntime.InferenceSession(folder + "/" + features["file"])
    assert [one.name for one in session.get_inputs()] == [one["name"] for one in features["inputs"]]
    assert [one.name for one in session.get_outputs()] == [one["name"] for one in features["outputs"]]
    found = session.run(None, dict(numpy.load(folder + "/inputs.npz")))
    numpy.savez(folder + "/scores.npz", **{one["name"]: array for one, array in zip(features["outputs"], found)})
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Rows of a log; some have an empty list, the first one too."""
    draw, path = random.Random(1), tmp_path_factory.mktemp("rows") / "rows.csv"
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(COLUMNS)
        for row in range(NUM_ROWS):
            seen = draw.sample(range(9), row % 4)
            lines.writerow([row % 3 % 2, draw.random(), draw.randrange(3), draw.uniform(-1, 1), draw.randrange(60),
                            "|".join(map(str, seen)), "|".join(str(draw.randrange(4)) for _ in seen),
                            draw.randrange(5)])
    return path


def trained(folder: Path, rows: Path, name: str) -> str:
    """A run of a few steps."""
    spec = resolve({
        "name": "small", "model": {"num_dense": 1, "embedding_dim": 8, "bottom_mlp": [8], "top_mlp": [8],
                                   "tables": TABLES, **MODELS[name]},
        "data": {"kind": "columns", "path": str(rows), "dense_columns": ["price"],
                 **({} if "tasks" in MODELS[name] else {"label": "click"})},
        "train": {"batch_size": 64, "num_steps": 6, "precision": "fp32", "learning_rate": 0.1},
        "place": {"device": "cpu"}, "store": {"root": str(folder)}, "watch": {"tensorboard": False}})
    return str(train(spec, fresh=True)["run_dir"])


def expected_scores(run: str, rows: Path) -> dict[str, Any]:
    exported, code = export_run(run), Path(run) / "my_model.py"
    code.write_text(str(MODELS["a custom model"]["code"]))
    score_file(exported.uri, str(rows), Path(run) / "scores.parquet",
               model_file=str(code) if exported.model_file else "")
    table = pq.read_table(Path(run) / "scores.parquet")
    return {name: np.array(table[name].to_pylist(), np.float32) for name in table.column_names}


def alone(runner: str, folders: Sequence[Path], package: str) -> None:
    """Run a script in a Python that finds this package, and numpy, alone."""
    places = dict.fromkeys(str(Path(find_spec(name).origin).parents[1]) for name in (package, "numpy"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-S", "-c", runner, json.dumps([*places]), *map(str, folders)],
                          env=environment, text=True, capture_output=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr


def scores_by_torch(rows: Path, *folders: Path) -> list[dict[int, dict[str, Any]]]:
    """Scores by torch alone of the model in each folder: of all rows under 0, and of the first one and two."""
    for folder in folders:
        arrays = model_inputs(str(folder), str(rows))
        torch.save({name: torch.from_numpy(values) for name, values in arrays.items()}, folder / "inputs.pt")
    alone(TORCH_ALONE, folders, "torch")
    found = [torch.load(folder / "scores.pt") for folder in folders]
    return [{num: {name: values.numpy() for name, values in outputs.items()} for num, outputs in one.items()}
            for one in found]


def assert_alike(found: dict[int, dict[str, Any]], expected: dict[str, Any], *, same_bits: bool = False) -> None:
    assert set(found[0]) == set(expected)
    for name, values in expected.items():
        assert len(values) == NUM_ROWS
        assert len(np.unique(values)) > 50
        assert np.array_equal(found[0][name], values) if same_bits else np.abs(found[0][name] - values).max() <= 1e-6
        for num in (1, 2):  # sizes that torch's exporter would take for constants
            assert found[num][name].shape == values[:num].shape
            assert np.abs(found[num][name] - values[:num]).max() <= 1e-6


@pytest.mark.slow
def test_columns_that_are_transformed_score_bit_for_bit_in_plain_torch(tmp_path, capsys):
    train_rows = write_csv(tmp_path / "train.csv", draw_rows(1_000, 3))
    later = write_csv(tmp_path / "later.csv", draw_rows(NUM_ROWS, 7, new_words=["never seen", "Ωμέγα "]))
    run = str(train(prepared_spec(tmp_path, train_rows, later), fresh=True)["run_dir"])
    with torch._inductor.config.patch(NO_COMPILER):
        assert embark(["export", run, "--format", "aoti", "--to", str(tmp_path / "portable")]) == 0
    said = capsys.readouterr().out
    assert "There is no C++ compiler: model.pt2 is not compiled, and torch.export.load opens it." in said
    found, = scores_by_torch(later, tmp_path / "portable")
    assert_alike(found, expected_scores(run, later), same_bits=SAME_KERNELS)
    features = json.loads((tmp_path / "portable" / FEATURES).read_text())
    arrays = model_inputs(str(tmp_path / "portable"), str(later))
    sizes = {"rows": NUM_ROWS, "num_tags": len(arrays["tags.ids"])}
    assert {one["name"]: (one["dtype"], tuple(sizes.get(size, size) for size in one["shape"]))
            for one in features["inputs"]} == {name: (str(values.dtype), values.shape)
                                               for name, values in arrays.items()}
    bad = write_csv(tmp_path / "bad.csv", [*draw_rows(3, 7), ["w1", "", "1", "cheap", "", "", "0"]])
    with pytest.raises(DataError, match=r"1 of 4 rows cannot be read: .*line 5.*'cheap' is not a number"):
        model_inputs(str(tmp_path / "portable"), str(bad))


@pytest.mark.slow
def test_every_kind_of_model_scores_bit_for_bit_in_plain_torch(rows, tmp_path):
    runs = {name: trained(tmp_path / str(number), rows, name) for number, name in enumerate(MODELS)}
    with torch._inductor.config.patch(NO_COMPILER):
        results = [export_portable(run) for run in runs.values()]
    assert {result.runtime for result in results} == {"program"}
    for run, found in zip(runs.values(), scores_by_torch(rows, *(Path(one.path) for one in results)), strict=True):
        assert_alike(found, expected_scores(run, rows), same_bits=SAME_KERNELS)


@pytest.mark.slow
def test_a_compiled_package_scores_as_embark_score_within_1e_6(rows, tmp_path):
    run = trained(tmp_path, rows, "dlrm")
    result = export_portable(run)
    assert result.runtime == "aoti"
    found, = scores_by_torch(rows, Path(result.path))
    assert_alike(found, expected_scores(run, rows))


@pytest.mark.slow
def test_a_model_repository_has_the_tensors_of_its_configuration(rows, tmp_path):
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

    run = trained(tmp_path, rows, "several tasks")
    folder = Path(export_portable(run, str(tmp_path / "repository"), format="triton").path)
    assert folder == tmp_path / "repository" / "small"
    config = text_format.Parse((folder / "config.pbtxt").read_text(), ModelConfig())
    assert (config.name, config.platform, config.max_batch_size) == ("small", "torch_aoti", 0)
    arrays, expected = model_inputs(str(folder), str(rows)), expected_scores(run, rows)
    assert_alike(*scores_by_torch(rows, folder), expected)
    types = {"float32": "TYPE_FP32", "int64": "TYPE_INT64"}
    for prefix, tensors, entries in (("INPUT", arrays, config.input), ("OUTPUT", expected, config.output)):
        assert [one.name for one in entries] == [f"{prefix}__{number}" for number in range(len(tensors))]
        for one, values in zip(entries, tensors.values(), strict=True):
            assert DataType.Name(one.data_type) == types[str(values.dtype)]
            assert len(one.dims) == values.ndim
            assert all(size in (-1, found) for size, found in zip(one.dims, values.shape, strict=True))


@pytest.mark.slow
def test_onnx_scores_as_embark_score_within_1e_6(rows, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    runs = [trained(tmp_path / str(number), rows, name) for number, name in enumerate(MODELS)]
    folders = [Path(export_portable(run, format="onnx").path) for run in runs]
    for folder in folders:
        np.savez(folder / "inputs.npz", **model_inputs(str(folder), str(rows)))
    alone(ONNX_ALONE, folders, "onnxruntime")
    for run, folder in zip(runs, folders, strict=True):
        found = np.load(folder / "scores.npz")
        for output, values in expected_scores(run, rows).items():
            assert np.abs(found[output] - values).max() <= 1e-6, run


@pytest.mark.slow
def test_an_operator_without_a_form_in_onnx_is_named(rows, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    monkeypatch.setitem(MODELS, "bessel", {
        "kind": "my_model:MyModel", "code": CODE.replace("{BODY}", "torch.special.bessel_j0")})
    run = trained(tmp_path, rows, "bessel")
    with pytest.raises(UserError, match=r"bessel_j0 has no form in ONNX"):
        export_portable(run, format="onnx")
    assert not [path for path in Path(run).iterdir() if "onnx" in path.name]


def test_what_cannot_be_written_is_refused_and_nothing_is_replaced(rows, tmp_path):
    run = trained(tmp_path, rows, "dlrm")
    target = tmp_path / "mine"
    target.mkdir()
    (target / "file").write_text("of the user")
    for force in (False, True):
        with pytest.raises(UserError, match="mine: exists"):
            export_portable(run, str(target), force=force)
    with pytest.raises(UserError, match="s3://bucket/model is not a folder on this machine"):
        export_portable(run, "s3://bucket/model")
    with pytest.raises(UserError, match="file/model/onnx: cannot be written"):
        export_portable(run, str(target / "file/model/onnx"))
    assert (target / "file").read_text() == "of the user"
    for flag in (["--delta"], ["--tables", "int8"], ["--only", "shop"]):
        assert embark(["export", run, "--format", "onnx", *flag]) == 64


def test_a_compiler_that_fails_is_an_error_in_words_and_leaves_nothing(rows, tmp_path):
    run = trained(tmp_path, rows, "dlrm")
    with torch._inductor.config.patch({"cpp.cxx": ("false",)}), \
            pytest.raises(UserError, match=r"torch cannot compile the model: .*false"):
        export_portable(run)
    assert not list(Path(run).glob(f".*{SCRATCH_SUFFIX}")) + list(Path(run).glob("aoti"))


@pytest.mark.slow
def test_what_a_killed_export_left_is_deleted_by_the_next(rows, tmp_path):
    run, folder = trained(tmp_path, rows, "dlrm"), tmp_path / "to"
    code = ("import os, signal, sys\nfrom embark.trainers.torch.scoring import portable_model\n"
            "portable_model._build = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            "portable_model.export_portable(*sys.argv[1:])")
    done = subprocess.run([sys.executable, "-c", code, run, folder / "model"], check=False, timeout=HANG_S)
    assert done.returncode == -signal.SIGKILL
    assert [path.suffix for path in folder.iterdir()] == [SCRATCH_SUFFIX]
    with torch._inductor.config.patch(NO_COMPILER):
        export_portable(run, str(folder / "model"))
    assert [path.name for path in folder.iterdir()] == ["model"]


def test_inputs_of_a_folder_without_an_exported_model_are_refused(rows, tmp_path):
    with pytest.raises(UserError, match=r"has no artifact\.json") as found:
        model_inputs(str(tmp_path), str(rows))
    assert "embark export RUN --format" in str(found.value.fix)


def test_a_model_of_sequences_is_refused_in_a_sentence(tmp_path):
    spec = resolve({
        "name": "history", "model": {"kind": "sasrec", "num_dense": 0, "embedding_dim": 8, "tables": [
            {"name": "item", "rows": 50, "pooling": "none", "max_length": 8},
            {"name": "negatives", "shares": "item", "pooling": "none", "max_length": 8}],
            "sequence": {"history": "item", "negatives": "negatives"}},
        "data": {"num_train_samples": 256, "num_eval_samples": 64}, "place": {"device": "cpu"},
        "train": {"batch_size": 32, "num_steps": 2}, "store": {"root": str(tmp_path)}, "watch": {"tensorboard": False}})
    run = str(train(spec, fresh=True)["run_dir"])
    with pytest.raises(UserError, match="models of sequences are not exported to other runtimes yet"):
        export_portable(run)
